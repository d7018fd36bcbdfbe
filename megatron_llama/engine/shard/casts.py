"""The dtypes between units: what goes into a module is cast to the dtype in which it computes, and
what comes out of it to that of what is around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_llama.engine.shard.specs import ModuleUnit
from megatron_llama.errors import TrainingError


@dataclass(frozen=True)
class Casts:
    """The dtypes to which floating inputs and outputs of a module are cast; None: they are not."""

    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None

    def cast_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call as the module gets them."""
        return (args, kwargs) if self.inputs is None else _cast_all((args, kwargs), self.inputs)

    def cast_outputs(self, output: Any) -> Any:
        """Return what a call has returned as its caller gets it."""
        if self.outputs is None:
            return output
        cast = _cast_all(output, self.outputs)
        for leaf in tree_leaves(cast):
            # torch's pytree takes a dataclass that nobody has registered for a leaf.
            if is_dataclass(leaf) and not isinstance(leaf, type):
                _require_dtype(leaf, self.outputs)
        return cast


def unit_casts(
    units: Sequence[ModuleUnit],
    model: nn.Module,
    given: torch.dtype | None,
    engine_dtype: torch.dtype,
) -> list[Casts]:
    """Return the casts of units and root parts. ``given`` is the dtype that ``shard`` got, None
    where that is the parameters' own, and ``engine_dtype`` what it is then."""
    computes = [unit.policy.dtype or engine_dtype for unit in units]
    casts = []
    for unit in units:
        if unit.is_root_part:
            # Calls of the model itself come from outside; other parts run inside of it.
            casts.append(Casts(given) if unit.module is model else Casts())
            continue
        policy = unit.policy
        own = computes[unit.index]
        around = computes[unit.inside[-1]] if unit.inside else engine_dtype
        crosses = own != around
        casts.append(
            Casts(
                (own if crosses else policy.dtype or given) if policy.cast_inputs else None,
                policy.output_dtype or (around if crosses else None),
            )
        )
    return casts


def _cast_all(value: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, partial(_cast, dtype=dtype), value)


def _cast(value: Tensor, *, dtype: torch.dtype) -> Tensor:
    if value.is_floating_point() and value.dtype != dtype:
        return value.to(dtype)
    return value


def _require_dtype(value: Any, dtype: torch.dtype) -> None:
    """Raise TrainingError for a dataclass with a tensor that should have been cast."""
    for field in fields(value):
        held = getattr(value, field.name)
        if isinstance(held, Tensor) and held.is_floating_point() and held.dtype != dtype:
            raise TrainingError(
                f"{field.name} of {type(value).__qualname__}, an output of a unit",
                got=f"{held.dtype} in a dataclass that torch's pytree does not know",
                expected=f"{dtype}, to which outputs of this unit are cast",
                do="register the class with torch.utils._pytree.register_dataclass, or let the "
                "unit return tensors",
            )
