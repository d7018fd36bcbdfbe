"""Proves a case: trains it and all runs that it is compared with, and reports the differences."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch

from megatron_llama.errors import ConfigError
from megatron_llama.model.plan.fp8 import TENSORWISE
from megatron_llama.prove import data_check
from megatron_llama.prove.case import STEPS, Case
from megatron_llama.prove.compare import (
    IN_BF16,
    IN_FP8,
    IN_FP16,
    IN_FP32,
    IN_TENSORWISE,
    History,
    Row,
    distance,
    relative,
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
"""Names of checks in the order in which they run."""
THE_RUN = "the run"
"""``what`` of a row for a run that ended with an error or did not do what it was asked for."""
SMALL_LOSS_SCALES = (2.0**12, 2.0**6, 1.0)
"""Loss scales that are tried if steps overflow with that of the case."""


@dataclass(frozen=True)
class CheckResult:
    """The result of a check."""

    name: str
    """One of CHECKS."""
    rows: tuple[Row, ...]
    """All comparisons; empty if the check did not run."""
    seconds: float
    not_run: str = ""
    """Reason why the check did not run; empty if it did."""
    partly: str = ""
    """The part that was not compared, and the reason."""

    @property
    def holds(self) -> bool:
        """Whether every row is within its bound. True for a check that did not run."""
        return all(row.holds for row in self.rows)

    @property
    def worst(self) -> Mapping[str, Row]:
        """Row of each kind that is nearest to its bound, or furthest beyond."""
        worst: dict[str, Row] = {}
        for row in self.rows:
            if row.what not in worst or used(row) > used(worst[row.what]):
                worst[row.what] = row
        return worst


def used(row: Row) -> float:
    """Return the share of its bound that a row has used: above 1 if it does not hold."""
    if row.holds:
        return row.got / row.bound if row.bound else 0.0
    return row.got / row.bound if row.bound and row.got > row.bound else math.inf


@dataclass(frozen=True)
class Proof:
    """The results of all checks of a case."""

    case: Case
    checks: tuple[CheckResult, ...]
    """Results of CHECKS, in their order."""
    location: Location | None
    """Location of the error in the first check that does not hold; None if all hold."""
    seconds: float

    @property
    def rows(self) -> tuple[Row, ...]:
        """Rows of all checks."""
        return tuple(row for check in self.checks for row in check.rows)

    @property
    def holds(self) -> bool:
        """Whether something was compared, and every check that ran holds."""
        return bool(self.rows) and all(check.holds for check in self.checks)


Check = Callable[[Runs, Case, int], Iterator[Row]]
"""Yields the comparisons of the first steps of a case, or of all steps for 0. Raises
NotComparedError, and RunError for a run that it cannot compare."""
Say = Callable[[str], None]
"""Receives lines on the progress of a proof."""


def nobody(line: str) -> None:
    """Ignore a line on the progress of a proof."""


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
    """Make ``checks`` of a case in ``budget`` seconds, in ``steps`` steps, and locate the error of
    the first check that does not hold. A check does not run if no time is left for it; a check
    that has begun goes on to its end.

    All files are written into ``folder``. With ``axes`` a case that does not hold is run again
    without each of its axes. ``say`` gets a line at the beginning and end of each check. Raises
    ConfigError for a case that cannot run at all."""
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
    """Return the rows of a check, the reason why something was not compared, if so, and the error
    of a run that it could not compare."""
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
    """Return the row of a failed run. Its note names the run if it is not that of the case."""
    told = error.told if error.case.name == case.name else str(error)
    return Row(name, THE_RUN, math.inf, 0.0, note=told)


def _again(runs: Runs, name: str, until: int) -> Callable[[Case], Sequence[Row] | None]:
    """Return a function that makes the check for another case, up to the first wrong step."""

    def again(case: Case) -> Sequence[Row] | None:
        rows, _, error = _compared(name, runs, case, until)
        if error is not None:
            return None if error.refused else (*rows, _failed(name, case, error))
        return rows or None

    return again


def _runs_of(name: str, runs: Runs, case: Case, until: int = 0) -> int:
    """Return the number of runs that a check still has to make."""
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
    # The training with transformers, and the resumed runs.
    more = {"transformers": 1, "resume": 1, "reshard": 2}.get(name, 0)
    return sum(not runs.has(run, until) for run in trained) + more


def _one_process(runs: Runs, case: Case, until: int) -> Iterator[Row]:
    """Yield the case in fp32 against one process. The same run in fp64 measures the rounding."""
    name = "one process"
    plain = in_fp32(case)
    run = runs.trained(plain, until)
    single = runs.trained(one_process(plain), until)
    exact = runs.trained(one_process(plain, fp64=True), until)
    alone, true = (runs.history(each_run, until) for each_run in (single, exact))
    yield from rows_of_histories(name, runs.history(run, until), alone, (alone, true), IN_FP32)
    yield from _rows_of_steps(name, runs, run, until)
    if _is_zenflow(case):
        steps = slice(until or None)
        yield from rows_of_changes(
            name,
            runs.start(case),
            *(runs.states(each_run)[steps] for each_run in (run, single, exact)),
        )


def _rows_of_steps(name: str, runs: Runs, run: Trained, until: int) -> Iterator[Row]:
    """Yield the comparisons that need no other run: learning rates, and AdamW's updates."""
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
    """Yield one process against transformers, in fp32."""
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
    """Yield the case in its own precision against one process in fp32. One process in the case's
    precision measures the rounding."""
    in_fp8 = case.options.get("fp8", "none") != "none"
    if not any(case.options.get(name) for name in ("bf16", "fp16", "grad_reduce_in_bf16")):
        raise NotComparedError("everything is in fp32")
    name = "precision"
    case = smooth(case)
    mine = runs.trained(case, until)
    single = runs.trained(_alone(case), until)
    here, there = (_skipped_steps(run, until) for run in (mine, single))
    note = "" if here == there else f"steps {here or 'none'}, and {there or 'none'} in one process"
    yield Row(name, "skipped steps", float(here != there), 0.0, note=note)
    yield from _rows_of_steps(name, runs, mine, until)
    if here or there:
        # A step that overflows makes no update, so fp32 would be one step ahead from there on.
        case, single = _without_overflow(runs, case, until)
        mine = runs.trained(case, until)
        yield from _rows_of_steps(name, runs, mine, until)
    full = runs.trained(one_process(in_fp32(case)), until)
    alone, true = (runs.history(run, until) for run in (single, full))
    in_bf16 = case.options.get("bf16") or case.options.get("grad_reduce_in_bf16")
    history = runs.history(mine, until)
    if in_fp8:
        # Its codes are those of one process, so this is what it has to equal: far nearer than fp32.
        allowed = IN_TENSORWISE if case.options["fp8"] == TENSORWISE else IN_FP8
        yield from rows_of_histories(name, history, alone, (alone, true), allowed)
        raise NotComparedError(_words_on_fp8(alone, true))
    allowed = IN_BF16 if in_bf16 else IN_FP16
    yield from rows_of_histories(name, history, true, (alone, true), allowed)
    if here or there:
        steps = ", ".join(map(str, sorted({*here, *there})))
        scale = mine.config.training.initial_loss_scale
        raise NotComparedError(
            f"gradients of the loss scale that is asked for: steps {steps} overflow and have none; "
            f"--initial-loss-scale {scale:g} was compared instead"
        )


def _words_on_fp8(alone: History, true: History) -> str:
    """Return what is not held against a bound: how far one process in FP8 is from fp32."""
    names = sorted(true.gradients[0])
    first, exact = (
        torch.cat([run.gradients[0][name].flatten() for name in names]) for run in (alone, true)
    )
    losses = max(map(relative, alone.losses, true.losses))
    return (
        f"FP8 against fp32: one process differs by up to {losses:.1e} in loss, and by "
        f"{distance(first, exact):.1e} in the first step's whole gradient"
    )


def _alone(case: Case) -> Case:
    """Return the case in its own precision in one process. In fp16 it keeps its microbatches: a
    larger one has larger weight gradients, which overflow with a smaller loss scale. In FP8 with
    one scale a tensor it does too, since each of their tensors has a scale."""
    single = one_process(case)
    if not case.options.get("fp16") and case.options.get("fp8") != TENSORWISE:
        return single
    size = case.options.get("micro_batch_size", 1)
    return replace(single, options={**single.options, "micro_batch_size": size})


def _without_overflow(runs: Runs, case: Case, until: int) -> tuple[Case, Trained]:
    """Return the case with a loss scale with which one process skips no step, and that run. Raises
    NotComparedError if there is none."""
    for scale in SMALL_LOSS_SCALES:
        options = {"initial_loss_scale": scale, "min_loss_scale": 1.0, "loss_scale_window": 1000}
        smaller = replace(
            case, name=f"{case.name}, loss scale {scale:g}", options={**case.options, **options}
        )
        single = runs.trained(_alone(smaller), until)
        if not _skipped_steps(single, until):
            return smaller, single
    raise NotComparedError(f"steps overflow even with --initial-loss-scale {scale:g}")


def _skipped_steps(run: Trained, until: int) -> tuple[int, ...]:
    """Return the steps that did not change the weights."""
    return tuple(step.iteration for step in run.ranks[0].steps[: until or None] if step.skipped)


def _data(runs: Runs, case: Case, until: int) -> Iterator[Row]:
    """Yield the samples that the ranks have read against those that were written."""
    run = runs.trained(in_fp32(case), until)
    materials = runs.materials(case)
    yield from data_check.rows_of_data(reads_of(run), run.config, materials, case)


def _export(runs: Runs, case: Case, until: int) -> Iterator[Row]:
    """Yield the export of a whole run against its last checkpoint."""
    run = runs.trained(case)
    if run.export is None:
        if run.iterations[-1] == run.config.training.train_iters:
            raise RunError(run.case, "it has come to its end and exported nothing")
        raise NotComparedError("the run exports at its end, which is further than it was run")
    yield from rows_of_export(run, runs.materials(case))


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
