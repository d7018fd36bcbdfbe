"""When the cold columns of ZenFlow are updated, and when columns are chosen anew. Integers only.

    window      the steps whose cold gradients become one update; it closes after ``interval``
                steps, or when they ask for it
    inline      the update of a window is in the weights when its last step ends
    beside      it is computed while the next window fills, and in the weights when that one closes

Until columns have been chosen for the first time every step is a window of its own, with an inline
update: nothing is hot yet.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """The intervals of a run, in steps."""

    interval: int
    """Steps of a window; with ``asks`` at most so many."""
    asks: bool
    """Whether a window may close earlier, because of what its gradients amount to."""
    overlap: bool
    """Whether updates are computed beside the next window."""
    rounds: int
    """Steps before columns are chosen for the first time, at least one."""
    choice: int
    """Steps from one choice of columns to the next; 0: never again."""


@dataclass(frozen=True)
class Step:
    """What one step does."""

    closes: bool
    """Its window ends with it."""
    inline: bool
    """What is pending is in the weights when it ends."""
    chooses: bool
    """Columns are chosen behind it."""


@dataclass
class Windows:
    """Where a run is between its windows. A window that is settled early counts as closed."""

    pace: Pace
    done: int = 0
    """Steps so far."""
    last_choice: int | None = None
    """Steps that were done when columns were last chosen; None: they have not been."""
    opened: int = 0
    """Steps that were done when the window opened."""

    def next(self, *, asked: bool = False) -> Step:
        """The step that follows. ``asked``: its window should close with it, if it may."""
        pace = self.pace
        done = self.done + 1
        if self.last_choice is None:
            return Step(closes=True, inline=True, chooses=done >= max(1, pace.rounds))
        closes = done - self.opened >= pace.interval or (pace.asks and asked)
        chooses = closes and pace.choice > 0 and done - self.last_choice >= pace.choice
        return Step(closes, closes and (chooses or not pace.overlap), chooses)

    def end(self, step: Step) -> None:
        """That step has been taken."""
        self.done += 1
        if step.closes:
            self.opened = self.done

    def chose(self) -> None:
        """Columns have been chosen behind the last step."""
        self.last_choice = self.done

    def settled(self) -> None:
        """Everything pending has been applied."""
        self.opened = self.done

    def check(self, oldest: int | None, done: int, what: str) -> None:
        """After ``done`` steps. ``oldest``: steps that were done before the oldest gradient that is
        not in the weights yet. RuntimeError if that is two intervals ago: the promise of this
        method is broken."""
        if oldest is not None and done - oldest >= 2 * self.pace.interval:
            late = done - oldest
            raise RuntimeError(
                f"{what}: gradients of {late} steps ago are not in the weights, at most {2 * self.pace.interval - 1} may be"
            )
