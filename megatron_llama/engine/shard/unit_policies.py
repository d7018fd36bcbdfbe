"""What a user says of units beside their classes: ``unit``, and the checks of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from megatron_llama.engine.options import BF16, FP16, FP32, FP64
from megatron_llama.engine.shard.names import WRAPPERS

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
