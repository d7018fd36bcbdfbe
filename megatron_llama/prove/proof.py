"""Proves a case: runs it and everything that it is compared with, and says what differs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from megatron_llama.errors import ConfigError
from megatron_llama.prove import data_check
from megatron_llama.prove.case import STEPS, Case
from megatron_llama.prove.compare import (
    IN_BF16,
    IN_BF16_REDUCED,
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
from megatron_llama.prove.pool import PRINTED_LAST, WorkerError, WorkerPool
from megatron_llama.prove.reference import (
    NotComparedError,
    in_fp32,
    not_in_transformers,
    one_process,
    steady,
    train_transformers,
)
from megatron_llama.prove.resume import rows_of_reshard, rows_of_resume
from megatron_llama.prove.run import Trained
from megatron_llama.prove.runs import Runs, rates_of, reads_of

CHECKS = ("one process", "transformers", "precision", "resume", "reshard", "export", "data")
"""In the order in which they run."""
THE_RUN = "the run"
"""What a row is about that says that a run ended with an error."""


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
"""Yields what it compares in the first steps of a case; 0: in all. Raises NotComparedError,
WorkerError, and ConfigError for a case that cannot run."""


def prove_case(
    pool: WorkerPool,
    case: Case,
    folder: Path,
    budget: float,
    *,
    checks: Collection[str] = CHECKS,
    steps: int = STEPS,
    axes: bool = True,
) -> Proof:
    """Make ``checks`` of a case in ``budget`` seconds, in ``steps`` steps, and say where the first
    one that does not hold is wrong. A check for which no time is left does not run; one that has
    begun goes on to its end.

    What is written goes into ``folder``. ``axes``: a case that does not hold is run again without
    each of its axes. Raises ConfigError for a case that cannot run at all."""
    began = time.monotonic()
    case = steady(case)
    runs = Runs(pool, folder, steps=steps)
    runs.materials(case)
    results: list[CheckResult] = []
    location: Location | None = None

    def time_left(for_runs: int = 1) -> bool:
        return time.monotonic() - began + for_runs * runs.longest < budget

    for name in CHECKS:
        started = time.monotonic()
        if name not in checks:
            results.append(CheckResult(name, (), 0.0, not_run="it was not asked for"))
            continue
        if not time_left(RUNS_OF[name]):
            passed = time.monotonic() - began
            reason = f"no time is left: {passed:.0f} s of {budget:.0f} s have passed"
            results.append(CheckResult(name, (), 0.0, not_run=reason))
            continue
        rows: list[Row] = []
        left_out = ""
        try:
            for row in CHECK_OF[name](runs, case, 0):
                rows.append(row)
        except NotComparedError as reason:
            left_out = str(reason)
        except WorkerError as error:
            told = _told(error).partition(": ")[2]
            if any(row.note.endswith(told) for result in results for row in result.rows):
                left_out = "the run ends with an error, as above"
            else:
                rows.append(Row(name, THE_RUN, math.inf, 0.0, note=_told(error)))
        results.append(
            CheckResult(
                name,
                tuple(rows),
                time.monotonic() - started,
                not_run="" if rows else left_out,
                partly=left_out if rows else "",
            )
        )
        if location is None and (first := first_wrong(rows)) is not None:
            again = _again(runs, name, first)
            location = locate(case, rows, again, time_left=lambda: axes and time_left())
    return Proof(case, tuple(results), location, time.monotonic() - began)


def _again(runs: Runs, name: str, first: Row) -> Callable[[Case], tuple[Row, ...] | None]:
    """The check, of another case and no further than to the step that was wrong first."""

    def again(case: Case) -> tuple[Row, ...] | None:
        try:
            return tuple(CHECK_OF[name](runs, case, first.step or 0))
        except (NotComparedError, ConfigError):
            return None
        except WorkerError as error:
            if any("ConfigError" in text for text in error.errors.values()):
                return None
            return (Row(name, THE_RUN, math.inf, 0.0, note=_told(error)),)

    return again


def _told(error: WorkerError) -> str:
    """The last line of what the first rank that failed has raised."""
    rank, text = next(iter(error.errors.items()))
    raised = text.partition(PRINTED_LAST)[0]
    lines = [line for line in raised.splitlines() if line.strip()]
    return f"rank {rank}: {lines[-1].strip()}" if lines else f"rank {rank}"


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
    found = runs.trained(case, until)
    single = runs.trained(one_process(case), until)
    full = runs.trained(one_process(in_fp32(case)), until)
    alone, true = (runs.history(run, until) for run in (single, full))
    allowed = IN_BF16 if case.options.get("bf16") else IN_FP16
    if case.options.get("grad_reduce_in_bf16"):
        allowed = IN_BF16_REDUCED
    here, there = (_skipped_steps(run, until) for run in (found, single))
    note = "" if here == there else f"steps {here or 'none'}, and {there or 'none'} in one process"
    yield Row("precision", "skipped steps", float(here != there), 0.0, note=note)
    # A step that overflows has no gradient, and fp32 is a step ahead from there on.
    if not here and not there:
        rows = rows_of_histories(
            "precision", runs.history(found, until), true, (alone, true), allowed
        )
        # B of an addition begins at 0. The gradient of A in the second step is made of Adam's first
        # steps of B: full ones, also of elements whose gradients were rounding.
        yield from (row for row in rows if not (_is_lora_a(row) and (row.step or 0) > 1))
    yield from _rows_of_steps("precision", runs, found, until)


def _is_lora_a(row: Row) -> bool:
    return row.tensor is not None and row.tensor.endswith(".lora_A.weight")


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
RUNS_OF: Mapping[str, int] = MappingProxyType(
    {
        **{"one process": 3, "transformers": 1, "precision": 2, "resume": 2, "reshard": 3},
        **{"export": 1, "data": 0},
    }
)
"""Runs for which there has to be time."""
