"""What is run: a configuration, small enough for this machine, and what became of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STEPS = 6
"""Steps of every run, unless it says otherwise."""


NOT_HERE = "left out"
"""What stands here for an option that no case has."""


@dataclass(frozen=True)
class Note:
    """What is run instead of what an option says."""

    option: str
    """Its flag, or the name of a structure (``layers per stage``)."""
    yours: str
    here: str
    """The value of the case, or NOT_HERE."""
    why: str
    """Why the value here shows what the user's would show, or what it does not show. Empty where
    the value was kept and takes effect."""

    @property
    def is_left_out(self) -> bool:
        """Whether no case has the option."""
        return self.here == NOT_HERE

    @property
    def is_scaled(self) -> bool:
        """Whether the case has another value."""
        return self.yours != self.here and not self.is_left_out


@dataclass(frozen=True)
class Case:
    """A configuration that is small enough to run on this machine."""

    name: str
    """``as given``, or which of its axes are run."""
    options: Mapping[str, object]
    """Options of ``pretrain``, or of ``sft``, by the names of their fields. They name no data, no
    tokenizer, no folder to load from or to save in, and no number of steps: a run adds these."""
    world_size: int
    sft: bool = False
    """Whether the options are those of ``sft``."""
    notes: tuple[Note, ...] = ()
    """What was scaled, left out, and kept."""
