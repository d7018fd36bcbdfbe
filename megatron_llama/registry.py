"""Choices of a run, imported when they are chosen.

A registry names the choices as text (``room.module:name``), so that a run loads only the update
rule, tracker or file format that its options ask for. It is asked while a run is built: an import
in the middle of a step would stall the step, and an import in a thread or a signal handler could
wait for one that waits for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeVar

Chosen = TypeVar("Chosen")


def imported(place: str) -> Any:
    """Import and return the object of ``room.module:name``."""
    module, _, name = place.partition(":")
    return getattr(import_module(f"{__package__}.{module}"), name)


class Registry(Mapping[str, Chosen]):
    """Functions, classes or values of one kind by name; a look-up imports the one it names."""

    def __init__(self, places: Mapping[str, str]) -> None:
        """``places`` says where each is, as ``room.module:name``."""
        self.places = MappingProxyType(dict(places))

    def __getitem__(self, name: str) -> Chosen:
        chosen: Chosen = imported(self.places[name])
        return chosen

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, name: object) -> bool:
        # The method of Mapping would import the value.
        return name in self.places
