"""Kills at random moments: when to strike, and what must be left. For the tests of signals and for ``tools/harm``."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

from tests.e2e.product import Layout, Product
from tests.launcher import Run

SHORT_STEPS: Mapping[str, object] = {"save_interval": 2, "micro_batch_size": 4, "seq_length": 8, "num_layers": 2}
"""A run that is saving most of the time."""


@dataclass(frozen=True)
class Kill:
    """One kill of a run."""

    codes: tuple[int, ...]
    """Exit status by rank."""
    before: int
    """The iteration of the newest checkpoint before the run began."""
    after: int
    in_a_save: bool
    """The ranks were struck while a checkpoint was being written."""


def kill_at_random(product: Product, layout: Layout, folder: Path, chance: random.Random, *, at_a_save: bool, **options: object) -> Kill:
    """Start or go on with a run, and strike all its ranks: ``at_a_save`` when the folder of a save is there, else after some steps; some
    milliseconds later by chance."""
    started, lines, wanted = time.time_ns(), logged_lines(folder), chance.randrange(4)
    before = newest_iteration(folder)
    run: Run = product.start(layout, save=folder, load=folder, **options)
    run.until(lambda: is_saving(folder, started) if at_a_save else logged_lines(folder) - lines >= wanted)
    spin(chance.uniform(0.0, 0.003 if at_a_save else 0.05))
    run.signal(Signals.SIGKILL)
    codes = run.wait().codes
    return Kill(codes, before, newest_iteration(folder), is_saving(folder, started))


def newest_iteration(folder: Path) -> int:
    """The iteration that the tracker names; 0 without one."""
    tracker = folder / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def logged_lines(folder: Path) -> int:
    """Complete lines of the run's log."""
    log = folder / "log.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def is_saving(folder: Path, since: int) -> bool:
    """Whether there is a folder in which a save after that time was or is at work."""
    try:
        return any(path.stat().st_mtime_ns > since for path in folder.glob("iter_*.incomplete"))
    except FileNotFoundError:  # it got its name in this moment
        return False


def spin(seconds: float) -> None:
    """Wait more exactly than the scheduler lets a process sleep."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
