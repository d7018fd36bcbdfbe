"""What a user says of units beside their classes: ``unit``, and the checks of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from megatron_llama.engine.options import BF16, FP16, FP32, FP64
from megatron_llama.engine.shard.names import WRAPPERS
from megatron_llama.engine.tensors import at_least_fp32
from megatron_llama.errors import describe

Match = type[nn.Module] | Callable[[nn.Module], bool]
"""A class of modules, or a predicate of a module."""
DTYPE_NAMES = MappingProxyType(
    {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16, torch.float64: FP64}
)
COMPUTE_DTYPES = tuple(DTYPE_NAMES)
"""The dtypes in which a unit or the model may compute."""
REDUCE_DTYPES = (None, torch.float32, torch.bfloat16)
"""The dtypes in which gradients may travel; None and fp32: that of the masters."""


@dataclass(frozen=True)
class UnitPolicy:
    """Modules that are units, and how these compute. ``unit`` makes it."""

    match: Match
    dtype: torch.dtype | None = None
    keep: bool = False
    cast_inputs: bool = True
    output_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    explicit: bool = True
    """Whether it was made by ``unit``, and not of a class or predicate alone."""

    def __str__(self) -> str:
        """Return the words by which messages name it."""
        name = getattr(self.match, "__qualname__", repr(self.match))
        return f"ml.unit({name})" if self.explicit else name

    @property
    def options(self) -> dict[str, object]:
        """What is not as it is without ``unit``, by name."""
        usual = UnitPolicy(self.match, explicit=self.explicit)
        return {name: value for name, value in vars(self).items() if value != getattr(usual, name)}

    def matches(self, module: nn.Module) -> bool:
        """Whether a module is such a unit. One that torch.compile has wrapped counts as what it
        wraps."""
        inner = unwrapped(module)
        if isinstance(self.match, type):
            return isinstance(inner, self.match)
        return bool(self.match(inner))


def unit(
    match: Match,
    *,
    dtype: torch.dtype | None = None,
    keep: bool = False,
    cast_inputs: bool = True,
    output_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> UnitPolicy:
    """Say how some units compute: ``units=[Block, ml.unit(Router, dtype=torch.float32)]``.

    ``match`` is a class of modules, or a predicate of a module. ``dtype`` is that of the unit's
    parameters while they compute, by default that of ``shard``: a router or a norm in fp32 inside
    of a model in bf16. Masters and gradients are as everywhere. ``reduce_dtype`` is that in which
    the unit's gradients travel, fp32 or bf16, by default that of ``shard``. Units inside of it that
    have no dtype of their own have that of ``shard``.
    Floating inputs of the unit are cast to its dtype, unless ``cast_inputs=False``, and its
    floating outputs back to the dtype of what is around it, or to ``output_dtype``.
    ``keep=True`` gathers its parameters once in a step and keeps them whole until the update, with
    the strategy that gathers units anew for each pass: for units that are small and used often.

    ``shard`` refuses what fits no module, and modules that two entries of ``units`` describe in
    two ways. Raises TypeError for another ``match``."""
    if not callable(match):
        raise TypeError(
            f"ml.unit: got {match!r}, expected a class of modules or a predicate of a module"
        )
    checked = _checked(match, "ml.unit")
    return UnitPolicy(checked, dtype, keep, cast_inputs, output_dtype, reduce_dtype)


def unit_policies(
    units: Callable[[nn.Module], bool] | Iterable[type[nn.Module] | UnitPolicy],
) -> tuple[UnitPolicy, ...]:
    """Return the policies of the argument ``units`` of ``shard``. Raises TypeError for what is
    neither a class of modules nor made by ``unit``."""
    if not isinstance(units, Iterable):
        return (UnitPolicy(units, explicit=False),)
    policies = []
    for entry in units:
        if isinstance(entry, UnitPolicy):
            policies.append(entry)
        elif _is_class(entry):
            policies.append(UnitPolicy(_checked(entry, "shard(units)"), explicit=False))
        else:
            raise _no_unit(entry, "shard(units)")
    return tuple(policies)


def _checked(match: Match, where: str) -> Match:
    if _is_class(match) and not issubclass(match, nn.Module):  # type: ignore[arg-type]
        raise _no_unit(match, where)
    return match


def _no_unit(entry: object, where: str) -> TypeError:
    return TypeError(
        f"{where}: got {entry!r} in it, expected classes of modules; give "
        "units=[LlamaDecoderLayer], say, a predicate of a module, or what ml.unit returns"
    )


def _is_class(match: object) -> bool:
    return isinstance(match, type)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile(module)`` wraps, or the module itself."""
    inner = module._modules.get(WRAPPERS[0])
    return module if inner is None else inner


def policy_of(policies: Sequence[UnitPolicy], module: nn.Module) -> UnitPolicy:
    """Return the policy of a module that is a unit. Where several match, ``policy_problems`` makes
    sure that they say the same."""
    return next(policy for policy in policies if policy.matches(module))


def policy_problems(
    policies: Sequence[UnitPolicy],
    units: Mapping[str, nn.Module],
    dtype: torch.dtype | None,
    offload: str,
) -> Iterator[str]:
    """Yield what is wrong with policies, also in the model. ``units`` are its units by name, not
    those without parameters; ``dtype`` is that of the engine, ``offload`` that of its optimizer."""
    for policy in policies:
        for name, value, allowed in (
            ("dtype", policy.dtype, (None, *COMPUTE_DTYPES)),
            ("output_dtype", policy.output_dtype, (None, *COMPUTE_DTYPES)),
            ("reduce_dtype", policy.reduce_dtype, REDUCE_DTYPES),
        ):
            if value not in allowed:
                yield describe(
                    f"{policy}: {name}",
                    got=repr(value),
                    expected=f"one of {', '.join(map(str, allowed))}",
                    do=f"give another {name}",
                )
        if policy.dtype in COMPUTE_DTYPES and dtype is not None and policy.dtype != dtype:
            yield from _dtype_problems(policy, policy.dtype, dtype, offload)
        if policy.explicit and not any(policy.matches(module) for module in units.values()):
            yield describe(
                str(policy),
                got="no module with parameters that matches",
                expected="at least one unit",
                do="mend it, or take it out of units",
            )
    for name, module in units.items():
        matching = [policy for policy in policies if policy.matches(module)]
        first = matching[0]
        other = next((policy for policy in matching if policy.options != first.options), None)
        if other is not None:
            yield describe(
                name,
                got=f"a match of {first} and of {other}, which say different things of it",
                expected="one of them",
                do="give ml.unit a predicate that leaves it out",
            )


def _dtype_problems(
    policy: UnitPolicy, own: torch.dtype, dtype: torch.dtype, offload: str
) -> Iterator[str]:
    """Yield why units may not compute in ``own`` in a model that computes in ``dtype``."""
    if at_least_fp32(own) != at_least_fp32(dtype):
        yield describe(
            f"{policy}: dtype",
            got=f"{own} in a model of {dtype}",
            expected="dtypes with masters in the same one: fp64 goes with fp64 alone",
            do="give another dtype here, or in shard(dtype=)",
        )
    elif offload != "none":
        yield describe(
            f"{policy}: dtype",
            got=f"{own} in a model of {dtype}, with optimizer_offload={offload!r}",
            expected="one dtype, in which the host sends weights back",
            do="leave out one of them",
        )
