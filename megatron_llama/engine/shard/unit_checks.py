"""What is wrong with the units of a model, and with what ``unit`` says of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from megatron_llama.engine.shard.specs import ModuleUnit
from megatron_llama.engine.shard.unit_policies import COMPUTE_DTYPES, REDUCE_DTYPES, UnitPolicy
from megatron_llama.engine.tensors import at_least_fp32
from megatron_llama.errors import describe


def unit_problems(model: nn.Module, units: Sequence[ModuleUnit]) -> Iterator[str]:
    """Yield that nothing in the model is a unit. ``units`` are those of ``module_units``."""
    if all(unit.is_root_part for unit in units):
        yield describe(
            "units",
            got="no module with parameters that matches",
            expected="at least one",
            do=f"name the classes of its repeated layers (it has {_classes(model)})",
        )


def _classes(model: nn.Module) -> str:
    """Return the names of the classes of which a model has several modules with parameters."""
    counts: dict[str, int] = {}
    for module in model.modules():
        if any(True for _ in module.parameters()):
            counts[type(module).__name__] = counts.get(type(module).__name__, 0) + 1
    repeated = sorted((name for name in counts if counts[name] > 1), key=lambda name: counts[name])
    return ", ".join(repeated[:5] or sorted(counts)[:5])


def sharing_problems(units: Sequence[ModuleUnit]) -> Iterator[str]:
    """Yield the parameters that units of several dtypes share."""
    first: dict[str, ModuleUnit] = {}
    for unit in units:
        for name in unit.parameters:
            other = first.setdefault(name, unit)
            for what in ("dtype", "reduce_dtype"):
                one, two = getattr(other.policy, what), getattr(unit.policy, what)
                if one != two:
                    yield describe(
                        name,
                        got=f"{one or f'no {what}'} by {other.name} and "
                        f"{two or f'no {what}'} by {unit.name}, which share it",
                        expected=f"one {what}",
                        do="give both the same in ml.unit",
                    )


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
