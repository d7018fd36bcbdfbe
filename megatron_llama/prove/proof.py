"""Proves a case: runs it and everything that it is compared with, and says what differs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from megatron_llama.errors import ConfigError
from megatron_llama.prove import data_check
from megatron_llama.prove.case import STEPS, Case
from megatron_llama.prove.compare import (
    IN_BF16,
    IN_FP16,
    IN_FP32,
    Row,
    rows_of_changes,
    rows_of_histories,
    rows_of_rates,
    rows_of_updates,
)
from megatron_llama.prove.export_check import rows_of_export
from megatron_llama.prove.locate import Location, first_wrong, locate
from megatron_llama.prove.pool import WorkerPool
from megatron_llama.prove.reference import (
    NotComparedError,
    in_fp32,
    not_in_transformers,
    one_process,
    smooth,
    steady,
    train_transformers,
)
from megatron_llama.prove.resume import rows_of_reshard, rows_of_resume
from megatron_llama.prove.run import Trained
from megatron_llama.prove.runs import RunError, Runs, rates_of, reads_of

CHECKS = ("one process", "transformers", "precision", "resume", "reshard", "export", "data")
"""In the order in which they run."""
THE_RUN = "the run"
"""What a row is about that says that a run ended with an error, or is not what it was asked for."""
SMALL_LOSS_SCALES = (2.0**12, 2.0**6, 1.0)
"""Tried where steps overflow with the loss scale of a case."""


@dataclass(frozen=True)
class CheckResult:
    """What a check has found."""

    name: str
    """One of CHECKS."""
    rows: tuple[Row, ...]
    """Everything that was compared; nothing where it did not run."""
    seconds: float
    not_run: str = ""
    """Why it did not run; empty where it did."""
    partly: str = ""
    """What of it was not compared, and why."""

    @property
    def holds(self) -> bool:
        """Whether every row is within its bound. True for a check that did not run."""
        return all(row.holds for row in self.rows)

    @property
    def worst(self) -> Mapping[str, Row]:
        """By kind of row, the one that is furthest towards its bound, or beyond."""
        found: dict[str, Row] = {}
        for row in self.rows:
            if row.what not in found or used(row) > used(found[row.what]):
                found[row.what] = row
        return found


def used(row: Row) -> float:
    """The share of its bound that a row has used: above 1 where it does not hold."""
    if row.holds:
        return row.got / row.bound if row.bound else 0.0
    return row.got / row.bound if row.bound and row.got > row.bound else math.inf


@dataclass(frozen=True)
class Proof:
    """What was found about a case."""

    case: Case
    checks: tuple[CheckResult, ...]
    """All of CHECKS, in their order."""
    location: Location | None
    """Where the first check that does not hold is wrong; None if all hold."""
    seconds: float

    @property
    def rows(self) -> tuple[Row, ...]:
        """Those of all checks."""
        return tuple(row for check in self.checks for row in check.rows)

    @property
    def holds(self) -> bool:
        """Whether something was compared, and every check that ran holds."""
        return bool(self.rows) and all(check.holds for check in self.checks)


Check = Callable[[Runs, Case, int], Iterator[Row]]
"""Yields what it compares in the first steps of a case; 0: in all. Raises NotComparedError, and
RunError for a run that it cannot compare."""
Say = Callable[[str], None]
"""Told what a proof is doing, in lines."""


def nobody(line: str) -> None:
    """Listen to what a proof is doing, and do nothing."""


def prove_case(
    pool: WorkerPool,
    case: Case,
    folder: Path,
    budget: float,
    *,
    checks: Collection[str] = CHECKS,
    steps: int = STEPS,
    axes: bool = True,
    say: Say = nobody,
) -> Proof:
    """Make ``checks`` of a case in ``budget`` seconds, in ``steps`` steps, and say where the first
    one that does not hold is wrong. A check for which no time is left does not run; one that has
    begun goes on to its end.

    What is written goes into ``folder``. ``axes``: a case that does not hold is run again without
    each of its axes. ``say`` is told when a check begins and what it came to. Raises ConfigError
    for a case that cannot run at all."""
    began = time.monotonic()
    case = steady(case)
    runs = Runs(pool, folder, steps=steps)
    runs.materials(case)
    results: list[CheckResult] = []
    location: Location | None = None

    def time_left(for_runs: int) -> bool:
        return time.monotonic() - began + for_runs * runs.longest < budget

    for name in CHECKS:
        started = time.monotonic()
        if name not in checks:
            results.append(CheckResult(name, (), 0.0, not_run="it was not asked for"))
            continue
        if not time_left(_runs_of(name, runs, case)):
            passed = time.monotonic() - began
            reason = f"no time is left: {passed:.0f} s of {budget:.0f} s have passed"
            results.append(CheckResult(name, (), 0.0, not_run=reason))
            continue
        say(f"{name} ...")
        rows, left_out, error = _compared(name, runs, case)
        if error is not None:
            failed = _failed(name, case, error)
            if any(row.note == failed.note for result in results for row in result.rows):
                left_out = "the run fails, as above"
            else:
                rows.append(failed)
        result = CheckResult(
            name,
            tuple(rows),
            time.monotonic() - started,
            not_run="" if rows else left_out,
            partly=left_out if rows else "",
        )
        results.append(result)
        say(f"{name}: {_came_to(result)}, {result.seconds:.0f} s")
        if location is None and (first := first_wrong(rows)) is not None:
            until = first.step or 0

            def time_for(
                other: Case, *, name: str = name, until: int = until, first: Row = first
            ) -> bool:
                left = axes and time_left(_runs_of(name, runs, other, until))
                if left:
                    say(f"{name}: {first.what} differs; {other.name} ...")
                return left

            again = _again(runs, name, until)
            location = locate(case, rows, again, time_left=time_for)
    return Proof(case, tuple(results), location, time.monotonic() - began)


def _came_to(result: CheckResult) -> str:
    if result.not_run:
        return "not run"
    return "holds" if result.holds else "DIFFERS"


def _compared(
    name: str, runs: Runs, case: Case, until: int = 0
) -> tuple[list[Row], str, RunError | None]:
    """What a check has compared, why something was not, if so, and what is wrong with a run that it
    could not compare."""
    rows: list[Row] = []
    try:
        for row in CHECK_OF[name](runs, case, until):
            rows.append(row)
    except NotComparedError as reason:
        return rows, str(reason), None
    except RunError as error:
        return rows, "", error
    except ConfigError as error:
        return rows, "", RunError(case, f"it is refused: {error}", refused=True)
    return rows, "", None


def _failed(name: str, case: Case, error: RunError) -> Row:
    """A run that did not do what it was asked for. It is named where it is not that of the case."""
    told = error.told if error.case.name == case.name else str(error)
    return Row(name, THE_RUN, math.inf, 0.0, note=told)


def _again(runs: Runs, name: str, until: int) -> Callable[[Case], Sequence[Row] | None]:
    """The check, of another case and no further than to the step that was wrong first."""

    def again(case: Case) -> Sequence[Row] | None:
        rows, _, error = _compared(name, runs, case, until)
        if error is not None:
            return None if error.refused else (*rows, _failed(name, case, error))
        return rows or None

    return again


def _runs_of(name: str, runs: Runs, case: Case, until: int = 0) -> int:
    """How many runs a check has still to make."""
    plain = in_fp32(case)
    twins = (one_process(plain), one_process(plain, fp64=True))
    trained = {
        "one process": (plain, *twins),
        "transformers": twins,
        "precision": (smooth(case), _alone(smooth(case)), one_process(in_fp32(smooth(case)))),
        "resume": (case,),
        "reshard": (plain, *twins),
        "export": (case,),
        "data": (plain,),
    }[name]
    # transformers' training, and the runs that go on.
    others = {"transformers": 1, "resume": 1, "reshard": 2}.get(name, 0)
    return sum(not runs.has(one, until) for one in trained) + others


def _one_process(runs: Runs, case: Case, until: int) -> Iterator[Row]:
    """The case in fp32 against one process, of which fp64 measures the rounding."""
    name = "one process"
    plain = in_fp32(case)
    found = runs.trained(plain, until)
    single = runs.trained(one_process(plain), until)
    exact = runs.trained(one_process(plain, fp64=True), until)
    alone, true = (runs.history(run, until) for run in (single, exact))
    yield from rows_of_histories(name, runs.history(found, until), alone, (alone, true), IN_FP32)
    yield from _rows_of_steps(name, runs, found, until)
    if _is_zenflow(case):
        steps = slice(until or None)
        yield from rows_of_changes(
            name, runs.start(case), *(runs.states(run)[steps] for run in (found, single, exact))
        )


def _rows_of_steps(name: str, runs: Runs, run: Trained, until: int) -> Iterator[Row]:
    """What needs no other run: learning rates, and AdamW's updates."""
    steps = slice(until or None)
    records = run.ranks[0].steps[steps]
    rates = rates_of(run)[steps]
    yield from rows_of_rates(name, [record.lr for record in records], rates)
    if not _is_zenflow(run.case):
        changed = [not record.skipped for record in records]
        optimizer = run.config.optimizer
        states = runs.states(run)[steps]
        yield from rows_of_updates(name, states, runs.start(run.case), optimizer, rates, changed)


def _is_zenflow(case: Case) -> bool:
    return case.options.get("optimizer_offload") == "zenflow"


def _transformers(runs: Runs, case: Case, until: int) -> Iterator[Row]:
    """One process against transformers, in fp32."""
    plain = in_fp32(case)
    single = runs.trained(one_process(plain), until)
    reason = not_in_transformers(case, single.config)
    if reason:
        raise NotComparedError(reason)
    exact = runs.trained(one_process(plain, fp64=True), until)
    alone, true = (runs.history(run, until) for run in (single, exact))
    steps = slice(until or None)
    batches = [record.batches for record in single.ranks[0].steps[steps]]
    model = runs.materials(case).model
    theirs = train_transformers(model, single.config, batches, rates_of(single)[steps])
    yield from rows_of_histories("transformers", theirs, alone, (alone, true), IN_FP32)


def _precision(runs: Runs, case: Case, until: int) -> Iterator[Row]:
    """The case in its own precision against one process in fp32, of which one process in that
    precision measures the rounding."""
    if not any(case.options.get(name) for name in ("bf16", "fp16", "grad_reduce_in_bf16")):
        raise NotComparedError("everything is in fp32")
    name = "precision"
    case = smooth(case)
    found = runs.trained(case, until)
    single = runs.trained(_alone(case), until)
    here, there = (_skipped_steps(run, until) for run in (found, single))
    note = "" if here == there else f"steps {here or 'none'}, and {there or 'none'} in one process"
    yield Row(name, "skipped steps", float(here != there), 0.0, note=note)
    yield from _rows_of_steps(name, runs, found, until)
    if here or there:
        # A step that overflows has no gradient, and fp32 is a step ahead from there on.
        case, single = _without_overflow(runs, case, until)
        found = runs.trained(case, until)
        yield from _rows_of_steps(name, runs, found, until)
    full = runs.trained(one_process(in_fp32(case)), until)
    alone, true = (runs.history(run, until) for run in (single, full))
    in_bf16 = case.options.get("bf16") or case.options.get("grad_reduce_in_bf16")
    allowed = IN_BF16 if in_bf16 else IN_FP16
    mine = runs.history(found, until)
    yield from rows_of_histories(name, mine, true, (alone, true), allowed)
    if here or there:
        steps = ", ".join(map(str, sorted({*here, *there})))
        scale = found.config.training.initial_loss_scale
        raise NotComparedError(
            f"gradients of the loss scale that is asked for: steps {steps} overflow and have none; "
            f"--initial-loss-scale {scale:g} was compared instead"
        )


def _alone(case: Case) -> Case:
    """The case in its own precision in one process. In fp16 it keeps its microbatches: the weight
    gradients of a larger one are larger, and overflow with a smaller loss scale."""
    single = one_process(case)
    if not case.options.get("fp16"):
        return single
    size = case.options.get("micro_batch_size", 1)
    return replace(single, options={**single.options, "micro_batch_size": size})


def _without_overflow(runs: Runs, case: Case, until: int) -> tuple[Case, Trained]:
    """The case with a loss scale of which one process skips no step, and the run of one process.
    Raises NotComparedError if there is none."""
    for scale in SMALL_LOSS_SCALES:
        options = {"initial_loss_scale": scale, "min_loss_scale": 1.0, "loss_scale_window": 1000}
        other = replace(
            case, name=f"{case.name}, loss scale {scale:g}", options={**case.options, **options}
        )
        single = runs.trained(_alone(other), until)
        if not _skipped_steps(single, until):
            return other, single
    raise NotComparedError(f"steps overflow even with --initial-loss-scale {scale:g}")


def _skipped_steps(run: Trained, until: int) -> tuple[int, ...]:
    """The steps that have left the weights as they were."""
    return tuple(step.iteration for step in run.ranks[0].steps[: until or None] if step.skipped)


def _data(runs: Runs, case: Case, until: int) -> Iterator[Row]:
    """What the ranks have read against what was written."""
    found = runs.trained(in_fp32(case), until)
    materials = runs.materials(case)
    yield from data_check.rows_of_data(reads_of(found), found.config, materials, case)


def _export(runs: Runs, case: Case, until: int) -> Iterator[Row]:
    """What a whole run has exported against its last checkpoint."""
    found = runs.trained(case)
    if found.export is None:
        if found.iterations[-1] == found.config.training.train_iters:
            raise RunError(found.case, "it has come to its end and exported nothing")
        raise NotComparedError("the run exports at its end, which is further than it was run")
    yield from rows_of_export(found, runs.materials(case))


CHECK_OF: Mapping[str, Check] = MappingProxyType(
    {
        "one process": _one_process,
        "transformers": _transformers,
        "precision": _precision,
        "resume": rows_of_resume,
        "reshard": rows_of_reshard,
        "export": _export,
        "data": _data,
    }
)
