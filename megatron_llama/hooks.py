"""What the rooms hang into the trainer and into the command line.

Each room of ``ROOMS`` has a file ``hooks.py``, which says what the room offers: as text
(``room.module:name``), so that it costs nothing to read. It is read when something is asked for,
and what it names is imported when it is used. So no room imports one that stands behind it, and a
run loads none that it does not need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megatron_llama.registry import imported

ROOMS = ("train", "planner", "converter", "tune", "prove")
"""The rooms with a file ``hooks.py``."""


@dataclass(frozen=True)
class Command:
    """Where a command is found. Its module is imported only if the command runs, so that --help
    does not wait for torch."""

    module: str
    function: str
    sections: str
    """The sections of its options, as ``module:attribute``."""
    summary: str
    positional: tuple[str, ...] = ()
    """Options whose values may follow the command in this order, without their names."""
    words: str = "[--config FILE.yaml] [--option value ...]"
    """What follows the command on its line of usage."""

    logs_notes: bool = False
    """The log of its run has the notes of its options; of other commands they are complaints."""

    rest: str = ""
    """An option of several values that takes all words before the first flag."""

    listed: int = 1000
    """Commands stand in --help in the order of these numbers."""

    def options(self) -> tuple[type[Any], ...]:
        """The sections of its options."""
        sections = imported(self.sections)
        return sections if isinstance(sections, tuple) else (sections,)


@dataclass(frozen=True)
class Format:
    """A format of model folders that another program writes."""

    opened: str
    """Opens a folder: an ``OpenFolder`` of ``checkpoint/model_folders/formats.py``."""
    files: str
    """Returns the files from which the weights of a folder are read: of its path."""
    kind: str = ""
    """Says which of several formats with the same files a folder has: of its path."""
    run: str = ""
    """Opens the run that a folder holds beside the weights, if it holds one: of its path, a
    ``SavedRun`` of ``checkpoint/model_folders/formats.py`` or None."""
    shown: str = ""
    """Prints what a folder holds, for ``inspect``: of its path."""
    verified: str = ""
    """Raises CheckpointError for a folder that is damaged, else prints what was read: of its
    path."""


@dataclass(frozen=True)
class Layouts:
    """Who chooses the layout of a run with --auto-parallel."""

    chosen: str
    """A function of the options, the configuration, the number of processes, their devices, and
    what the run loads."""


def commands() -> Mapping[str, Command]:
    """Return the commands of all rooms by their names, in the order of --help."""
    offered = {name: each for room in _offered("COMMANDS") for name, each in room.items()}
    return dict(sorted(offered.items(), key=lambda item: item[1].listed))


def formats() -> Mapping[str, Format]:
    """Return the formats of other programs by their names."""
    return {name: each for room in _offered("FORMATS") for name, each in room.items()}


def layouts() -> Layouts:
    """Return the functions that choose a layout, of the room that offers some."""
    (offered,) = _offered("LAYOUTS")
    assert isinstance(offered, Layouts)
    return offered


def _offered(name: str) -> list[Any]:
    """What the rooms offer under a name, in their order."""
    rooms = (import_module(f"{__package__}.{room}.hooks") for room in ROOMS)
    return [vars(room)[name] for room in rooms if name in vars(room)]
