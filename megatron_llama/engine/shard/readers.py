"""The module that reads a parameter outside of its unit's passes: for the error that names it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator

from torch import nn

from megatron_llama.engine.shard.names import clean_name
from megatron_llama.engine.shard.placeholders import ShardedParameterError
from megatron_llama.engine.shard.unit_policies import unwrapped


def outside_of_its_unit(
    name: str, model: nn.Module, unit: nn.Module, unit_name: str, owned: Collection[nn.Module]
) -> ShardedParameterError:
    """Return the error for parameter ``name`` of a unit that does not run, read while the model
    runs. ``owned`` are the modules of the unit.

    Either a module inside of the unit was called from outside of it (DiT calls
    ``transformer_blocks[0].norm1.emb``), or a module around the unit reads its weights itself
    (nn.MultiheadAttention reads those of its ``out_proj``). That module is to be a unit."""
    callers = list(_calling_modules())
    # The last one is the outermost: what it calls inside of itself comes with it.
    called = next((module for module in reversed(callers) if module in owned), None)
    reader = called or next(iter(callers), model)
    names = {module: clean_name(path) for path, module in model.named_modules()}
    where = names.get(reader) or "the model"
    kind = type(unwrapped(reader)).__name__
    unit_kind = type(unwrapped(unit)).__name__
    if called is not None:
        got = f"a call of {where} from outside of its unit, {unit_name}"
        do = f"add {kind} to units, so that {where} is one of its own"
    elif reader is model or reader not in names:
        got = f"a read by the model itself, outside of its unit, {unit_name}"
        do = f"leave {unit_kind} out of units, or let {unit_name} compute this in its forward"
    else:
        got = f"a read by {where}, outside of its unit, {unit_name}"
        do = f"name {kind} in units in place of {unit_kind}"
    return ShardedParameterError(name, got=got, expected="a read by its unit while it runs", do=do)


def _calling_modules() -> Iterator[nn.Module]:
    """Yield the modules whose ``forward`` is under way in this thread, the innermost first."""
    frame = sys._getframe()
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and frame.f_code.co_name not in ("__call__", "_call_impl"):
            yield module
        frame = frame.f_back  # type: ignore[assignment]
