"""What the rooms hang into the trainer and into the command line.

Each room of ``ROOMS`` has a file ``hooks.py``, which says what the room offers: as text
(``room.module:name``), so that it costs nothing to read. It is read when something is asked for,
and what it names is imported when it is used. So no room imports one that stands behind it, and a
run loads none that it does not need."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

ROOMS = ("commands", "planner", "tune", "prove")
"""The rooms with a file ``hooks.py``."""


@dataclass(frozen=True)
class Layouts:
    """Functions that choose the layout of a run with --auto-parallel."""

    chosen: str
    """Of a run whose processes a launcher has started."""
    imagined: str
    """Of a dry run, in one process."""


def imported(place: str) -> Any:
    """Import what ``room.module:name`` names."""
    module, _, name = place.partition(":")
    return getattr(import_module(f"{__package__}.{module}"), name)


def layouts() -> Layouts:
    """Return the functions that choose a layout, of the room that offers some."""
    (found,) = _offered("LAYOUTS")
    return found


def _offered(name: str) -> list[Any]:
    """What the rooms offer under a name, in their order."""
    rooms = (import_module(f"{__package__}.{room}.hooks") for room in ROOMS)
    return [vars(room)[name] for room in rooms if name in vars(room)]
