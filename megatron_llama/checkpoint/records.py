"""Stand-ins for the classes that an index of torch and Megatron names. They keep the arguments and
state that the pickle gives them, and do nothing: no code of torch runs, and no attribute is set."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


class Record:
    """Stands for an object of a class of torch or Megatron."""

    __slots__ = ("args", "state")

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Record:
        record = object.__new__(cls)
        record.args = args
        record.state = None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, field: str) -> Any:
        """Return a field of the object, None without it."""
        return self.state.get(field) if isinstance(self.state, dict) else None


def make_records(*names: str) -> Mapping[str, type[Record]]:
    """Return a class for each name."""
    return MappingProxyType({name: type(name, (Record,), {"__slots__": ()}) for name in names})
