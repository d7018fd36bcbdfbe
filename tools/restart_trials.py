"""Kill ranks of a run at random moments and see that it begins again in its job:

    python -m tools.restart_trials --trials 100

A trial is a small run with ``--max-restarts-in-place`` on processes of this machine, and one or two
kills (SIGKILL): of the process that trains, whose place another one takes, or of a whole rank with
its keeper, as when a machine is lost. Layout, victims and moments are drawn from --seed and the
trial's number. When the run has ended, three things are compared:

- its curve and its last state, bit for bit with those of runs that nobody has killed: the same
  layout to the checkpoint from which it went on, then another run from that checkpoint with the dp
  that was left;
- the checkpoint from which it went on with the newest complete one before the kill;
- the processes that are left with none.

The time to go on is from the kill to the first step that is logged behind it. Exit status 1 if
anything is not as it must be.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from signal import SIGKILL
from statistics import median
from types import MappingProxyType

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, and no other

from megatron_llama.data.corpus import python_documentation
from megatron_llama.launch.processes import parent_of, process_of
from tests.e2e.killing import SHORT_STEPS, newest_iteration, spin
from tests.e2e.product import DP2, DP2_PARAMS, PP2, TP2, Product, exact_curve, state, steps, words
from tests.launcher import Launcher, Run

ITERS = 24
RESTARTS = 4
PROCESSES = 4
GONE_SECONDS = 10.0
"""Seconds after which no process of a run may be left."""
OPTIONS: Mapping[str, object] = MappingProxyType(
    {
        **SHORT_STEPS,
        "save_interval": 3,
        "micro_batch_size": 1,
        "global_batch_size": 12,
        "train_iters": ITERS,
        "lr_decay_iters": ITERS,
    }
)
LAYOUTS: Mapping[str, tuple[int, Mapping[str, object]]] = MappingProxyType(
    {
        "dp4": (1, DP2.options),
        "dp4 params": (1, DP2_PARAMS.options),
        "dp4 async": (1, {**DP2.options, "async_save": True}),
        "tp2 dp2": (2, TP2.options),
        "pp2 dp2": (2, PP2.options),
    }
)
"""Processes of one copy of the model, and options."""
_TOLD = re.compile(
    r"restart (\d+) of \d+ in place: (.*); dp (\d+) -> (\d+), .*; goes on from iteration (\d+)"
)


@dataclass(frozen=True)
class Segment:
    """A part of a run: from an iteration on, with so many data-parallel ranks."""

    iteration: int
    dp: int


@dataclass(frozen=True)
class Kill:
    """A kill, and what was there at that moment."""

    rank: int
    loses_rank: bool
    """Whether the keeper was killed, and with it all of its rank."""
    newest: int
    """The iteration of the newest complete checkpoint."""
    seconds: float = 0.0
    """To the next logged step; 0: nobody has looked, or there was none."""

    def __str__(self) -> str:
        return f"{'rank' if self.loses_rank else 'process of rank'} {self.rank}"


@dataclass(frozen=True)
class Outcome:
    """What became of a trial."""

    name: str
    told: tuple[str, ...]
    seconds: tuple[float, ...]
    """From each kill to the next logged step."""
    problems: tuple[str, ...]


class Trials:
    """Trials in one folder, and the runs with which they are compared."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._launcher = launcher
        self._folder = folder
        self._product = Product(launcher, folder / "docs", ())
        self._references = 0
        self._known: dict[tuple[str, tuple[Segment, ...]], Path] = {}

    def prepare(self) -> None:
        """Write the dataset."""
        paragraphs = (part for topic in python_documentation() for part in topic.split("\n\n"))
        lines = islice((part for part in paragraphs if len(part) > 80), 600)
        text = self._folder / "docs.txt"
        text.write_text("\n".join(line.replace("\n", " ") for line in lines))
        made = ["--output-prefix", self._folder / "docs", "--append-eod", "--workers", 1]
        tokenizer = ["--train-tokenizer", "--vocab-size", 512]
        self._launcher.run(["preprocess", "--input", text, *made, *tokenizer]).ok()

    def trial(self, seed: str) -> Outcome:
        """Do one trial."""
        chance = random.Random(seed)
        name = chance.choice([*LAYOUTS])
        folder = self._folder / "trial"
        shutil.rmtree(folder, ignore_errors=True)
        run = self._start(name, folder, PROCESSES, max_restarts_in_place=RESTARTS)
        kills = self._kill(run, folder, chance)
        ended = run.wait(timeout=300.0)
        what = tuple(map(str, kills))
        lost = {kill.rank for kill in kills if kill.loses_rank}
        if any(code for rank, code in enumerate(ended.codes) if rank not in lost):
            return Outcome(name, what, (), (f"exit {ended.codes}: {ended.err[-1500:]}",))
        told = sorted(_TOLD.findall("".join(ended.outs)), key=lambda found: int(found[0]))
        problems = []
        # A kill while ranks begin again, or of a spare, is no reason for one more restart.
        if len(told) > len(kills) or (kills and not told):
            problems.append(f"{len(kills)} kills and {len(told)} restarts")
        for kill, found in zip(kills, told, strict=False):
            if int(found[4]) < kill.newest:
                problems.append(f"went on from {found[4]} with a checkpoint of {kill.newest}")
        chain = [Segment(0, PROCESSES // LAYOUTS[name][0])]
        chain += [Segment(int(found[4]), int(found[3])) for found in told]
        problems += differences(folder, self._reference(name, tuple(simplified(chain))))
        problems += [f"left: {' '.join(map(str, left))}"] if (left := left_processes()) else []
        seconds = tuple(kill.seconds for kill in kills if kill.seconds)
        return Outcome(name, what, seconds, tuple(problems))

    def _kill(self, run: Run, folder: Path, chance: random.Random) -> list[Kill]:
        """Strike once or twice, the second time perhaps while ranks begin again."""
        count = chance.choice([1, 1, 2])
        hasty = count == 2 and chance.random() < 0.4
        kills: list[Kill] = []
        for number in range(count):
            if number and hasty:
                time.sleep(chance.uniform(0.0, 8.0))
            else:
                self._until_logged(
                    run, folder, chance.randrange(4, 7) if number else chance.randrange(12)
                )
            spin(chance.uniform(0.0, 0.2))
            lost = {kill.rank for kill in kills if kill.loses_rank}
            alive = [rank for rank in range(PROCESSES) if rank not in lost]
            # At most half of the ranks may be lost, or no copy of the model is left. The first one
            # holds the store.
            loses_rank = len(lost) < PROCESSES // 2 and chance.random() < 0.5
            rank = chance.choice([each for each in alive if each or not loses_rank])
            trains = training_process(run.pids[rank], holds_store=rank == 0)
            victim = run.pids[rank] if loses_rank else trains
            if victim is None or run.over():
                break  # it had no process in this moment
            kill = Kill(rank, loses_rank, newest_iteration(folder))
            begin = time.monotonic()
            os.kill(victim, SIGKILL)
            kills.append(kill)
            if number == count - 1 or not hasty:
                self._until_told(run, number + 1 - (number and hasty))
                self._until_it_goes_on(run, folder)
                # A run that has ended meanwhile was killed behind its last step.
                seconds = 0.0 if run.over() else time.monotonic() - begin
                kills[-1] = replace(kill, seconds=seconds)
        return kills

    def _start(self, name: str, folder: Path, processes: int, **more: object) -> Run:
        options = {**OPTIONS, **LAYOUTS[name][1], **more}
        command = self._product.command(save=folder, load="auto", **options)
        return self._launcher.start(command, processes)

    def _until_logged(self, run: Run, folder: Path, count: int) -> None:
        """Wait for steps; 0: until the ranks have met and some process trains."""
        if count:
            run.until(lambda: len(steps(folder)) >= count or run.over())
        else:
            run.until(lambda: bool(training_process(run.pids[1], holds_store=False)) or run.over())

    def _until_told(self, run: Run, restarts: int) -> None:
        def count() -> int:
            return sum(len(_TOLD.findall(run.text(rank))) for rank in range(PROCESSES))

        run.until(lambda: count() >= restarts or run.over())

    def _until_it_goes_on(self, run: Run, folder: Path) -> None:
        # The log goes back to the checkpoint, so it may be shorter before it grows.
        least = len(steps(folder))

        def grows() -> bool:
            nonlocal least
            now = len(steps(folder))
            least = min(least, now)
            return now > least or run.over()

        run.until(grows)

    def _reference(self, name: str, chain: tuple[Segment, ...]) -> Path:
        """Return the folder of a run that does what a chain of segments says, without a kill."""
        known = self._known.get((name, chain))
        if known is not None:
            return known
        self._references += 1
        folder = self._folder / f"reference-{self._references}"
        unit, _ = LAYOUTS[name]
        if len(chain) > 1 and chain[-1].iteration:
            before = self._reference(name, chain[:-1])
            checkpoint = f"iter_{chain[-1].iteration:07d}"
            shutil.copytree(before / checkpoint, folder / checkpoint)
            shutil.copy(before / "log.jsonl", folder)
            tracker = folder / "latest_checkpointed_iteration.txt"
            tracker.write_text(str(chain[-1].iteration))
        self._start(name, folder, chain[-1].dp * unit).wait(timeout=300.0).ok()
        self._known[name, chain] = folder
        return folder


def simplified(chain: Sequence[Segment]) -> list[Segment]:
    """Return the segments that shape the curve. A restart with the same dp only repeats steps, and
    a segment has left nothing if the next one begins where it began."""
    kept: list[Segment] = []
    for segment in chain:
        while kept and kept[-1].iteration == segment.iteration:
            kept.pop()
        if not kept or kept[-1].dp != segment.dp:
            kept.append(segment)
    return kept


def training_process(keeper: int, *, holds_store: bool) -> int | None:
    """Return the process that trains for a keeper; None if there is none in this moment.
    ``holds_store``: the keeper has started another one before, which holds the job's store."""
    children = [
        child
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and parent_of(int(entry.name)) == keeper
        for child in [process_of(int(entry.name))]
        if child is not None and child.state
    ]
    children.sort(key=lambda child: (child.start, child.pid))
    return next((child.pid for child in children[holds_store:]), None)


def differences(folder: Path, reference: Path) -> list[str]:
    """Return what is different in two finished runs."""
    problems = []
    ours, theirs = exact_curve(folder), exact_curve(reference)
    if ours != theirs:
        first = next((a for a, b in zip(ours, theirs, strict=False) if a != b), "its length")
        problems.append(f"the curve is another than that of {reference.name}: {first}")
    last = f"iter_{ITERS:07d}"
    found, expected = state(folder / last), state(reference / last)
    changed = [key for key in expected if key not in found or not found[key].equal(expected[key])]
    if changed or found.keys() != expected.keys():
        problems.append(f"{len(changed)} tensors are others than in {reference.name}")
    return problems


def left_processes() -> list[int]:
    """Return the processes that a run has left, after a while: orphans become this one's."""
    deadline = time.monotonic() + GONE_SECONDS
    while True:
        while True:
            try:
                ended, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if ended == 0:
                break
        children = [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdecimal() and parent_of(int(entry.name)) == os.getpid()
        ]
        left = sorted(children)[1:]  # the first one is the launcher's server
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def main(argv: list[str] | None = None) -> int:
    """Run the trials, print a line for each and a summary, and return 1 if any is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.restart_trials",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--seed", type=int, help="by default drawn, and printed")
    parser.add_argument("--seconds", type=float, default=7200.0, help="begin no trial after that")
    parser.add_argument("--output", type=Path, help="keep the runs here")
    given = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(1_000_000) if given.seed is None else given.seed
    print(f"seed {seed}: {' '.join(words({'first': given.first, 'trials': given.trials}))}")
    become_reaper()
    folder = given.output or Path(tempfile.mkdtemp(prefix="restarts-"))
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    outcomes: list[Outcome] = []
    with Launcher(folder) as launcher:
        trials = Trials(launcher, folder)
        trials.prepare()
        for number in range(given.first, given.first + given.trials):
            if time.monotonic() - begin > given.seconds:
                break
            outcome = trials.trial(f"{seed}/{number}")
            outcomes.append(outcome)
            times = " ".join(f"{seconds:.1f} s" for seconds in outcome.seconds)
            verdict = "; ".join(outcome.problems) or "equal"
            print(
                f"{number} {outcome.name}: {', '.join(outcome.told)}: {times}: {verdict}",
                flush=True,
            )
    if given.output is None:
        shutil.rmtree(folder)
    bad = [outcome for outcome in outcomes if outcome.problems]
    waits = [seconds for outcome in outcomes for seconds in outcome.seconds]
    print(
        f"{len(outcomes)} trials, {len(waits)} kills that were followed, {len(bad)} wrong; "
        f"to go on {median(waits):.1f} s (median), {max(waits):.1f} s (most)"
        if waits
        else f"{len(outcomes)} trials, {len(bad)} wrong"
    )
    return 1 if bad else 0


def become_reaper() -> None:
    """Have the kernel give this process what its runs leave behind."""
    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1)


if __name__ == "__main__":
    sys.exit(main())
