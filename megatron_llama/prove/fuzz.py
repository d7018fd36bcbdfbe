"""Proves configurations that are drawn from a seed, and makes those that fail small.

Cases are independent of each other, so 300 cases of one seed may be replaced by 50 cases of each of
six seeds."""

from __future__ import annotations

import json
import shlex
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from megatron_llama.config.parse import flag
from megatron_llama.config.schema import MODEL_SIZES
from megatron_llama.errors import ConfigError, DataError, UserError, counted
from megatron_llama.prove.case import Case
from megatron_llama.prove.draw import AXES, axis_sizes, draw
from megatron_llama.prove.given import EXAMPLES, SECTIONS
from megatron_llama.prove.pool import WorkerPool
from megatron_llama.prove.proof import CHECKS, THE_RUN, Proof, prove_case
from megatron_llama.prove.shrink import shrink
from megatron_llama.train.api.common.options import read_options

Verdict = Literal["refused", "equal", "failed"]
AXIS_NAMES = (*AXES, "dp")
SIZES = (*MODEL_SIZES, "vocab_size", "seq_length", *AXES.values())
"""Options that are made smaller instead of left out."""
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
MOST_RUNS = 40
"""Most runs for making one case small."""


@dataclass(frozen=True)
class Finding:
    """The result of judging a case."""

    verdict: Verdict
    reason: str = ""
    """The error of a refusal, or the comparison that does not hold."""
    kind: str = ""
    """Kind of the failure. Two cases of one kind probably fail for the same reason."""


@dataclass(frozen=True)
class Outcome:
    """A drawn case and its result."""

    case: Case
    finding: Finding
    smallest: Case | None
    """The smallest case that fails in the same way; None if it was not searched for."""
    seconds: float
    """Time for judging the case."""


@dataclass(frozen=True)
class Report:
    """The results of all cases."""

    seed: int
    outcomes: tuple[Outcome, ...]

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of cases by verdict."""
        return Counter(outcome.finding.verdict for outcome in self.outcomes)

    @property
    def holds(self) -> bool:
        """Whether no case failed."""
        return self.counts.get("failed", 0) == 0


Judge = Callable[[Case], Finding]
"""Runs a case and returns the result. A UserError means refused, any other exception failed."""


def fuzz(
    judge: Judge,
    seed: int,
    count: int,
    *,
    say: Callable[[str], None] = print,
    runs: int = MOST_RUNS,
) -> Report:
    """Draw ``count`` cases from ``seed`` and judge each. A case that fails is made small in at most
    ``runs`` runs. ``say`` gets the commands that run it alone, as drawn and small.

    After Control-C the results so far are said. Raises KeyboardInterrupt then."""
    outcomes: list[Outcome] = []
    say(f"{counted(count, 'configuration')} from seed {seed}")
    try:
        for case in draw(seed, count):
            began = time.monotonic()
            finding = judged(judge, case)
            outcomes.append(Outcome(case, finding, None, time.monotonic() - began))
            for line in _lines(outcomes[-1], len(outcomes), count):
                say(line)
            if finding.verdict == "failed":
                small = smallest(case, judge, finding.kind, runs=runs)
                outcomes[-1] = replace(outcomes[-1], smallest=small)
                say("      the smallest that fails so:")
                say(f"      {command_line(small)}")
    except KeyboardInterrupt:
        say(f"interrupted; {_told(Report(seed, tuple(outcomes)))}")
        raise
    report = Report(seed, tuple(outcomes))
    say(_told(report))
    return report


def _told(report: Report) -> str:
    counts = ", ".join(f"{report.counts.get(verdict, 0)} {verdict}" for verdict in VERDICTS)
    drawn = counted(len(report.outcomes), "configuration")
    return f"{drawn} drawn from seed {report.seed}: {counts}"


def judged(judge: Judge, case: Case) -> Finding:
    """Return the result of a case. A UserError is a refusal; any other error is a failure."""
    try:
        return judge(case)
    except UserError as error:
        return Finding("refused", str(error))
    except Exception as error:
        return Finding("failed", traceback.format_exc(), type(error).__name__)


def smallest(case: Case, judge: Judge, kind: str, *, runs: int = MOST_RUNS) -> Case:
    """Return the smallest case found that fails for the same reason. Options are left out, many at
    once and then one by one; axes and sizes are made smaller. At most ``runs`` simpler cases are
    judged, without counting those that are refused, as they cost no run."""
    left = runs

    def fails(simpler: Case) -> bool:
        nonlocal left
        if left == 0:
            return False
        finding = judged(judge, simpler)
        left -= finding.verdict != "refused"
        return finding.verdict == "failed" and finding.kind == kind

    before = None
    while case != before:
        before = case
        case = _with_fewer_options(case, fails)
        for simplify in (_untuned, *map(_fewer_ranks, AXIS_NAMES), *map(_smaller, SMALLER)):
            case = next(filter(fails, simplify(case)), case)
    return case


def _with_fewer_options(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Return the case without as many options as possible: all, halves, quarters, ... at once."""
    names = [name for name in case.options if name not in SIZES]
    size = len(names)
    while size:
        first = 0
        while first < len(names):
            left_out = names[first : first + size]
            options = {name: value for name, value in case.options.items() if name not in left_out}
            simpler = replace(case, options=options)
            if fails(simpler):
                case = simpler
                names = [name for name in names if name not in left_out]
            else:
                first += size
        size //= 2
    return case


Simplify = Callable[[Case], Iterator[Case]]
"""Yields cases that are simpler in one respect, the simplest first."""


def _untuned(case: Case) -> Iterator[Case]:
    if case.sft:
        options = {n: value for n, value in case.options.items() if n not in EXAMPLES}
        yield replace(case, options=options, sft=False)


def _fewer_ranks(axis: str) -> Simplify:
    def simpler(case: Case) -> Iterator[Case]:
        ranks = axis_sizes(case)[axis]
        for fewer in (n for n in range(1, ranks) if ranks % n == 0):
            options = {**case.options, **({AXES[axis]: fewer} if axis in AXES else {})}
            yield replace(case, options=options, world_size=case.world_size * fewer // ranks)

    return simpler


def _smaller(name: str) -> Simplify:
    def simpler(case: Case) -> Iterator[Case]:
        for value in SMALLER[name]:
            if value < int(str(case.options.get(name, 0))):
                yield replace(case, options={**case.options, name: value})

    return simpler


SMALLER: Mapping[str, Sequence[int]] = MappingProxyType(
    {
        "num_hidden_layers": (1, 2, 3, 4, 6, 8, 12),
        "num_attention_heads": (2, 4),
        "num_key_value_heads": (1, 2),
        "hidden_size": (32,),
        "intermediate_size": (64,),
        "head_dim": (8,),
        "seq_length": (16,),
        "micro_batch_size": (1,),
        "global_batch_size": (1, 2, 4),
        "vocab_size": (300,),
    }
)
"""Values of sizes that are tried instead of larger values."""


def command_line(case: Case) -> str:
    """Return the command that proves the case alone."""
    words = ["--world-size", str(case.world_size)]
    for name, value in given_options(case).items():
        words += _words(name, value)
    return f"python -m megatron_llama prove {shlex.join(words)}"


def given_options(case: Case) -> Mapping[str, object]:
    """Return the options of a case. An option of ``sft`` says that it is a run of ``sft``."""
    named = not case.sft or case.options.keys() & EXAMPLES
    return case.options if named else {**case.options, "loss_on": "assistant"}


def _words(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [flag(name) if value else flag(f"no_{name}")]
    if isinstance(value, Mapping):
        return [flag(name), json.dumps(value)]
    if isinstance(value, tuple | list):
        return [flag(name), *map(str, value)]
    return [flag(name), str(value)]


def _lines(outcome: Outcome, number: int, count: int) -> Iterator[str]:
    """Yield lines on a case."""
    case = outcome.case
    axes = " ".join(f"{axis}{size}" for axis, size in axis_sizes(case).items() if size > 1)
    kind = f"{'sft ' * case.sft}{case.options.get('model_type', 'llama')}"
    said = f"{number:4} of {count}  {outcome.finding.verdict:8} {kind} {axes or 'one process'}"
    yield f"{said}, {len(case.options)} options ({outcome.seconds:.1f} s)"
    for line in outcome.finding.reason.splitlines():
        yield f"      {line}"
    if outcome.finding.verdict == "failed":
        yield f"      {command_line(case)}"


RANKS = 8
"""Most processes of a case."""
FAST = ("one process", "precision", "data")
"""Checks of every case."""
EVERY = 8
"""One of this many cases has all checks."""
FUZZ_STEPS = 3
"""Steps of a case. In the third, second moments have a past and the learning rate has changed."""
REFUSALS = (ConfigError.__name__, DataError.__name__)
"""Errors for options or data with which no run can begin."""


class Prover:
    """Judges cases as the command ``prove`` does. The files of a case are removed after it."""

    def __init__(
        self, pool: WorkerPool, folder: Path, budget: float, *, steps: int = FUZZ_STEPS
    ) -> None:
        """``budget`` is the seconds for each case."""
        self._pool = pool
        self._folder = folder
        self._budget = budget
        self._steps = steps

    def __call__(self, case: Case) -> Finding:
        parsed = read_options(None, given_options(case), SECTIONS)
        # Simpler cases have the name of the failed case, and therefore its checks.
        checks = FAST if zlib.crc32(case.name.encode()) % EVERY else CHECKS
        for small in shrink(parsed, case.world_size, RANKS):
            with tempfile.TemporaryDirectory(dir=self._folder) as folder:
                proof = prove_case(
                    self._pool,
                    small,
                    Path(folder),
                    self._budget,
                    checks=checks,
                    steps=self._steps,
                    axes=False,
                )
            if not proof.holds:
                return finding_of(proof)
        return Finding("equal")


def finding_of(proof: Proof) -> Finding:
    """Return the result of a proof that does not hold, by its first check that does not."""
    if not proof.rows:
        why = next(check.not_run for check in proof.checks)
        return Finding("failed", f"nothing was compared: {why}", "nothing was compared")
    wrong = next(check for check in proof.checks if not check.holds)
    row = next(row for row in wrong.rows if not row.holds)
    if row.what == THE_RUN:
        # The note has a rank's error: `rank 0: megatron_llama.errors.DataError: ...`
        error = row.note.partition(": ")[2].partition(":")[0].rpartition(".")[2]
        # After one run was trained, in any layout, a later error is a failure, not a refusal.
        begins = row is proof.rows[0]
        verdict: Verdict = "refused" if begins and error in REFUSALS else "failed"
        return Finding(verdict, f"{row.check}: the run ends: {row.note}", f"{row.check}: {error}")
    where = " ".join(filter(None, [row.tensor, f"in step {row.step}" if row.step else ""]))
    count = sum(not other_row.holds for other_row in wrong.rows)
    reason = (
        f"{row.check}: {row.what} {where}: got {row.got:.3g}, bound {row.bound:.3g} "
        f"({count} of {len(wrong.rows)} rows do not hold) {row.note}"
    )
    return Finding("failed", reason, f"{row.check}: {row.what}")
