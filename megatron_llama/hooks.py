"""Extensions of the engine, the trainer and the command line by the rooms.

Each room of ``ROOMS`` has a file ``hooks.py``. It names the room's offers as text
(``room.module:name``), which is cheap to read. The file is read when something is asked for, and an
offer is imported when it is used. So no room imports one that stands behind it, and a run loads
none that it does not need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megatron_llama.registry import imported

ROOMS = ("model", "train", "planner", "converter", "tune", "prove")
"""The rooms with a file ``hooks.py``."""


@dataclass(frozen=True)
class Command:
    """The place of a command. Its module is imported only if the command runs, so that --help does
    not wait for torch."""

    module: str
    function: str
    sections: str
    """The sections of its options, as ``module:attribute``."""
    summary: str
    positional: tuple[str, ...] = ()
    """Options whose values may follow the command in this order, without their names."""
    words: str = "[--config FILE.yaml] [--option value ...]"
    """The words behind the command on its line of usage."""

    logs_notes: bool = False
    """Whether the log of its run has the notes of its options. Other commands print them as
    complaints."""

    rest: str = ""
    """An option of several values that takes all words before the first flag."""

    listed: int = 1000
    """The place of the command in --help, which is sorted by these numbers."""

    def options(self) -> tuple[type[Any], ...]:
        """Return the sections of its options."""
        sections = imported(self.sections)
        return sections if isinstance(sections, tuple) else (sections,)


@dataclass(frozen=True)
class Format:
    """A format of model folders that another program writes."""

    opened: str
    """The opener of a folder: an ``OpenFolder`` of ``checkpoint/model_folders/formats.py``."""
    files: str
    """A function from a folder's path to the files from which its weights are read."""
    kind: str = ""
    """A function from a folder's path to its format, where several have the same files."""
    run: str = ""
    """A function from a folder's path to the run that it holds beside the weights: a ``SavedRun``
    of ``checkpoint/model_folders/formats.py``, or None if it holds none."""
    shown: str = ""
    """A function of a folder's path that prints its content, for ``inspect``."""
    verified: str = ""
    """A function of a folder's path that prints what it has read. It raises CheckpointError for a
    damaged folder."""


@dataclass(frozen=True)
class Layouts:
    """The choice of the layout of a run with --auto-parallel."""

    chosen: str
    """A function of the options, the configuration, the number of processes, their devices, and the
    weights that the run loads."""


def commands() -> Mapping[str, Command]:
    """Return the commands of all rooms by their names, in the order of --help."""
    offered = {name: command for room in _offered("COMMANDS") for name, command in room.items()}
    return dict(sorted(offered.items(), key=lambda item: item[1].listed))


def formats() -> Mapping[str, Format]:
    """Return the formats of other programs by their names."""
    return {name: entry for room in _offered("FORMATS") for name, entry in room.items()}


def layouts() -> Layouts:
    """Return the functions that choose a layout, from the room that offers them."""
    (offered,) = _offered("LAYOUTS")
    assert isinstance(offered, Layouts)
    return offered


def fp8_recipes() -> Mapping[str, Callable[[], Any]]:
    """Return the functions that make a ``Recipe`` of ``engine/shard/fp8.py``, by its name."""
    (offered,) = _offered("FP8_RECIPES")
    recipes: Mapping[str, Callable[[], Any]] = offered
    return recipes


def _offered(name: str) -> list[Any]:
    """Return the offers of the rooms under a name, in the order of the rooms."""
    rooms = (import_module(f"{__package__}.{room}.hooks") for room in ROOMS)
    return [vars(room)[name] for room in rooms if name in vars(room)]
