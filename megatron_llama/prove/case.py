"""A configuration that is small enough for this machine, with notes on the user's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STEPS = 6
"""Steps of every run, unless its case says otherwise."""


NOT_HERE = "left out"
"""Value of ``Note.here`` for an option that no case has."""


@dataclass(frozen=True)
class Note:
    """The value of a case instead of an option's own."""

    option: str
    """Flag of the option, or the name of a structure (``layers per stage``)."""
    yours: str
    here: str
    """Value of the case, or NOT_HERE."""
    why: str
    """Reason why this value shows the same as the user's, or what it does not show. Empty if the
    value was kept and takes effect."""

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
    """``as given``, or the axes that are run."""
    options: Mapping[str, object]
    """Options of ``pretrain`` or ``sft``, by the names of their fields. They have no data, no
    tokenizer, no folder to load from or save to, and no number of steps: a run adds these."""
    world_size: int
    sft: bool = False
    """Whether the options are those of ``sft``."""
    notes: tuple[Note, ...] = ()
    """Notes on options that were scaled, left out, and kept."""
