"""A module as it was before ``shard``, for a ``shard`` that fails."""

from __future__ import annotations

from typing import Any

from torch import nn

_TABLES = (
    *("_parameters", "_buffers"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"),
)
"""The tables of a module that ``shard`` changes in place."""


class Snapshot:
    """The classes, attributes, parameters and buffers of a module and of all below it.

    It holds references and copies no values: what ``shard`` changes are objects, and not their
    memory."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            (module, type(module), dict(vars(module)), _tables(module))
            for module in model.modules()
        ]

    def restore(self) -> None:
        """Make the module what it was."""
        for module, kind, attributes, tables in self._modules:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
            for name, entries in tables.items():
                table = vars(module)[name]
                table.clear()
                table.update(entries)
            if kind.__setattr__ is not nn.Module.__setattr__:
                # Such a module has further references to its parameters, as nn.LSTM has.
                for leaf, parameter in tables["_parameters"].items():
                    setattr(module, leaf, parameter)


def _tables(module: nn.Module) -> dict[str, dict[str, Any]]:
    # Modules of TorchScript have tables of another kind, and refuse to be changed.
    tables = {name: vars(module).get(name) for name in _TABLES}
    return {name: dict(table) for name, table in tables.items() if isinstance(table, dict)}
