"""The part ``kills``: SIGKILL at random moments, and disks that are full; then the run goes on.

A case is a round: one layout, some kills, the rest of the run, and a comparison with the run that
nobody has interrupted.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tests.e2e.killing import SHORT_STEPS, kill_at_random, newest_iteration
from tests.e2e.product import (
    CP2_RING,
    DP2,
    DP2_PARAMS,
    HYBRID,
    PP2,
    TP2,
    TP2_PP2,
    ZB_V,
    Layout,
    Product,
    exact_curve,
    state,
)
from tests.launcher import Launcher
from tools.harm.judging import Journal, Result, Verdict, emptied
from tools.harm.materials import Workshop

PART = "kills"
KILLS = 5
"""Kills of a round."""
STEPS = 8 * KILLS
GONE = 10.0
"""Seconds after which no process of a killed run may be left."""
DISK = 3_000_000
"""Bytes of a full disk: two checkpoints of the small model and its logs, not three."""
ASYNC: Mapping[str, object] = MappingProxyType({"async_save": True, "save_retain": 3})
LAYOUTS: Mapping[str, tuple[Layout, Mapping[str, object]]] = MappingProxyType(
    {
        "dp2": (DP2, {}),
        "dp2 async": (DP2, ASYNC),
        "dp2 params": (DP2_PARAMS, {}),
        "tp2": (TP2, {}),
        "pp2 async": (PP2, ASYNC),
        "pp2 zb-v": (ZB_V, {}),
        "cp2 ring": (CP2_RING, {}),
        "tp2 pp2": (TP2_PP2, {}),
        "tp2 pp2 async": (TP2_PP2, ASYNC),
        "dp4 hybrid": (HYBRID, {}),
    }
)
FULL = " on a full disk"


@dataclass(frozen=True)
class _Ended:
    verdict: Verdict
    details: str


class Killer:
    """Runs of a launcher, and the runs that nobody interrupts."""

    def __init__(self, launcher: Launcher, shop: Workshop, scratch: Path, seed: int) -> None:
        tokenizer = shop.make("dataset")[0].parent / "tokenizer"
        self._product = Product(launcher, shop.make("dataset")[0] / "d", ())
        self._tokenizer = tokenizer
        self._launcher = launcher
        self._straight_runs = shop.root.parent / "straight"
        self._folder = scratch
        self._seed = seed

    def result(self, name: str, case: int) -> Result:
        """The verdict on a round."""
        begin = time.monotonic()
        chance = random.Random(f"{self._seed}/{name}/{case}")
        layout, saving = LAYOUTS[name.removesuffix(FULL)]
        options = self._options(layout, saving)
        try:
            straight = self._straight(name.removesuffix(FULL), layout, options)
            folder = emptied(self._folder) / "run"
            if name.endswith(FULL):
                ended = self._on_full_disk(layout, folder, options)
            else:
                ended = self._killed(layout, folder, chance, options)
            ended = ended or self._compared(folder, straight)
        except AssertionError as error:
            words = str(error)
            broken = "Traceback" in words
            ended = _Ended("traceback" if broken else "silent", words[-400:])
        seconds = round(time.monotonic() - begin, 3)
        harm = "a disk of 3 MB" if name.endswith(FULL) else f"{KILLS} kills"
        return Result(PART, name, case, harm, ended.verdict, ended.details, seconds, 0)

    def _options(self, layout: Layout, saving: Mapping[str, object]) -> dict[str, object]:
        options = {**SHORT_STEPS, **saving, "train_iters": STEPS, "lr_decay_iters": STEPS}
        if layout is HYBRID:
            options["micro_batch_size"] = 2
        if layout is ZB_V:
            options["num_layers"] = 4
        return {**options, "tokenizer_model": self._tokenizer}

    def _straight(self, name: str, layout: Layout, options: dict[str, object]) -> Path:
        folder = self._straight_runs / name.replace(" ", "-")
        done = folder.with_suffix(".whole")
        if not done.exists():
            emptied(folder)
            self._product.start(layout, save=folder, **options).wait(timeout=600.0).ok()
            done.touch()
        return folder

    def _killed(
        self, layout: Layout, folder: Path, chance: random.Random, options: dict[str, object]
    ) -> _Ended | None:
        for number in range(KILLS):
            kill = kill_at_random(
                self._product, layout, folder, chance, at_a_save=number % 2 == 0, **options
            )
            if kill.after < kill.before:
                return _Ended("silent", f"iteration {kill.before} is lost: {kill.after} is newest")
            left = self._left_behind(folder)
            if left:
                return _Ended("silent", f"processes are left behind {GONE:.0f} s later: {left}")
        self._product.start(layout, save=folder, load=folder, **options).wait(timeout=600.0).ok()
        return None

    def _on_full_disk(
        self, layout: Layout, folder: Path, options: dict[str, object]
    ) -> _Ended | None:
        """Fill a small disk with the checkpoints of a run, and go on when there is room."""
        with small_disk(self._folder / "disk", DISK) as disk:
            run = disk / "run"
            words = {**options, "save": run, "load": run}
            words.pop("save_retain", None)
            ended = self._product.start(layout, **words).wait(timeout=600.0)
            if "Traceback" in ended.err:
                return _Ended("traceback", ended.err[-400:])
            if 0 in ended.codes:
                return _Ended("silent", f"a full disk ends with {ended.codes}")
            if not newest_iteration(run):
                return _Ended("silent", "no checkpoint is left")
            subprocess.run(["mount", "-o", f"remount,size={200 * DISK}", disk], check=True)
            again = {**options, "save": run, "load": run}
            self._product.start(layout, **again).wait(timeout=600.0).ok()
            shutil.copytree(run, folder, symlinks=True)
        return None

    def _compared(self, folder: Path, straight: Path) -> _Ended:
        if exact_curve(folder) != exact_curve(straight):
            return _Ended("silent", "the curve is another than that of the run without kills")
        last = f"iter_{STEPS:07d}"
        ours, theirs = state(folder / last), state(straight / last)
        different = [n for n in theirs if n not in ours or not ours[n].equal(theirs[n])]
        if different or ours.keys() != theirs.keys():
            return _Ended(
                "silent", f"{len(different)} tensors are others, the first {different[:1]}"
            )
        half = sorted(path.name for path in folder.rglob("*") if "incomplete" in path.name)
        if half:
            return _Ended("silent", f"half files are left: {half}")
        return _Ended("equal", "")

    def _left_behind(self, folder: Path) -> list[int]:
        """Processes that still have a file of the run open, after a while."""
        deadline = time.monotonic() + GONE
        while users := processes_in(folder):
            if time.monotonic() > deadline:
                for process in users:
                    os.kill(process, signal.SIGKILL)
                return users
            time.sleep(0.1)
        return []


def processes_in(folder: Path) -> list[int]:
    """Return the processes of others that have a file in a folder open or name it when started."""
    users = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or int(process.name) == os.getpid():
            continue
        try:
            opened = [os.readlink(link) for link in (process / "fd").iterdir()]
        except OSError:  # it has ended
            continue
        if any(name.startswith(f"{folder}/") for name in opened):
            users.append(int(process.name))
    return users


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of so many bytes. Raises PermissionError where none can be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(done.stderr.strip())
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def strike(
    count: int, shop: Workshop, journal: Journal, seed: int, deadline: float
) -> Iterator[Result | str]:
    """Yield the rounds that the journal lacks, until there are ``count`` kills."""
    output = shop.root.parent
    names = [*LAYOUTS, *(name + FULL for name in ("dp2", "pp2 async"))]
    rounds = -(-count // KILLS)
    with Launcher(emptied(output / "launched")) as launcher:
        killer = Killer(launcher, shop, output / "scratch-kills", seed)
        for number in range(rounds):
            name, case = names[number % len(names)], number // len(names)
            if (PART, name, case) in journal:
                continue
            if time.monotonic() > deadline:
                return
            try:
                result = killer.result(name, case)
            except PermissionError as error:
                yield f"{name}: not tried: {error}"
                continue
            journal.add(result)
            yield result
