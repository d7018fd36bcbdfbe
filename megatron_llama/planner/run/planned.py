"""The plan of a run's configuration beside what its log has measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import gcd
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_llama.errors import listing
from megatron_llama.planner.calibration import HOST, Calibration, calibration_of
from megatron_llama.planner.candidate import Candidate
from megatron_llama.planner.hardware import gpu_of_device
from megatron_llama.planner.measured import read_config
from megatron_llama.planner.report import PARTS, mfu
from megatron_llama.planner.run.folder import Floats, RunFolder
from megatron_llama.planner.training_job import Machine
from megatron_llama.train.setup.memory import MemoryPlan
from megatron_llama.train.setup.resolve import problems

EXPOSED = ("tensor", "context", "pipeline", "data")
"""Fields of a StepTime that are communication nothing hides."""

STEP = "step"
PEAK = "peak memory of rank 0"
WHOLE = ("model", "parallel", "offload", "zenflow", "lora")
"""Sections of a configuration that decide what a step computes, keeps and sends."""
PARTLY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "training": (
            *("seq_length", "micro_batch_size", "bf16", "fp16", "fp64", "attention_backend"),
            *("deterministic_mode", "compile"),
        ),
        "optimizer": (
            *("optimizer", "exp_avg_dtype", "exp_avg_sq_dtype", "clip_grad", "freeze"),
            "param_group",
        ),
    }
)
"""Other sections, and which of their options do. The batch has its own column in the log."""


def _made_of(start: Mapping[str, Any]) -> tuple[object, ...]:
    """What has to be alike in two starts for their steps to be comparable."""
    config = {name: part for name, part in start["config"].items() if isinstance(part, Mapping)}
    some = [config.get(section, {}).get(name) for section in PARTLY for name in PARTLY[section]]
    return (start["world_size"], start.get("device"), [config.get(name) for name in WHOLE], some)


@dataclass(frozen=True)
class Measured:
    """The typical step of a run, as its log says: medians over the lines with the newest batch
    size, of the newest layout. None where the log has no such number."""

    run: RunFolder

    @cached_property
    def rows(self) -> NDArray[np.bool_]:
        """Which lines are of steps as the newest start makes them: a run may have gone on in
        another layout, and a plan is that of the newest."""
        begin = 0
        starts = self.run.starts
        for before, start in pairwise(starts):
            if _made_of(before.details) != _made_of(start.details):
                begin = start.details["iteration"]
        return self.run.steps["iteration"] > begin

    def column(self, name: str) -> Floats:
        """The values of these lines."""
        return self.run.column(name)[self.rows]

    @cached_property
    def batch(self) -> int | None:
        """Samples of a step."""
        sizes = self.column("global_batch_size")
        known = sizes[np.isfinite(sizes)]
        return int(known[-1]) if len(known) else None

    def median(self, name: str) -> float | None:
        """The median of a column over the steps of the newest batch size; None without a number."""
        found = self.column(name)
        if self.batch is not None:
            found = found[self.column("global_batch_size") == self.batch]
        found = found[np.isfinite(found)]
        return float(np.median(found)) if len(found) else None

    @cached_property
    def data_parallel_bytes(self) -> float | None:
        """The mean of a step: of one line to the next a message may slip over."""
        sent = self.column("data_parallel_bytes")
        weights = np.diff(self.run.steps["iteration"], prepend=0.0)[self.rows]
        own = np.isfinite(sent) & (self.column("global_batch_size") == (self.batch or 0))
        return float(np.average(sent[own], weights=weights[own])) if own.any() else None

    @cached_property
    def peak_memory(self) -> float | None:
        """Bytes of rank 0 at its fullest moment."""
        found = self.column("peak_memory_bytes")
        found = found[np.isfinite(found)]
        return float(found.max()) if len(found) else None


@dataclass(frozen=True)
class ComparedNumber:
    """A line of the table."""

    what: str
    planned: float | None
    measured: float | None
    unit: str
    """``s``, ``bytes``, ``share`` or a plain number's name."""

    @property
    def ratio(self) -> float | None:
        """Measured over planned."""
        if not self.planned or self.measured is None:
            return None
        return self.measured / self.planned


@dataclass(frozen=True)
class Planned:
    """The plan of the newest start of a run, made now, with this version."""

    run: RunFolder
    config: Any
    calibration: Calibration
    machine: Machine
    known: bool
    """Whether the planner knows the device; else there is no plan of times."""
    is_host: bool

    @cached_property
    def candidate(self) -> Candidate:
        """The configuration on the machine."""
        return Candidate(self.config, self.machine, self.calibration.fit)

    @cached_property
    def plan(self) -> MemoryPlan:
        """Its plans."""
        return MemoryPlan(self.config, self.machine.gpus)

    @cached_property
    def memory(self) -> Mapping[str, int]:
        """Bytes of rank 0 by component, at the fullest moment."""
        parts = self.candidate.memory(0)
        return {**parts, "receive buffers": self.plan.host_buffers(0)} if self.is_host else parts

    @cached_property
    def data_parallel_bytes(self) -> float:
        """What rank 0 sends over the data-parallel axes in a step; of a collective the bytes of the
        whole bucket."""
        traffic = self.plan.traffic(0)
        return (
            traffic.gather_bytes
            + traffic.reduction_bytes
            + traffic.replica_bytes
            + traffic.matrix_bytes
        )

    @cached_property
    def step_parts(self) -> Mapping[str, float]:
        """Seconds of a step by what they are spent on."""
        step = self.candidate.step_time
        return {words: getattr(step, name) for name, words in PARTS}

    def compared(self) -> Iterator[ComparedNumber]:
        """Yield the table."""
        measured = Measured(self.run)
        milliseconds = measured.median("elapsed_ms")
        exposed = measured.median("exposed_comm_ms")
        step = self.candidate.step_time if self.known else None
        yield ComparedNumber(
            STEP,
            step.seconds if step is not None else None,
            milliseconds / 1e3 if milliseconds is not None else None,
            "s",
        )
        yield ComparedNumber(
            "exposed communication of a step",
            sum(getattr(step, name) for name in EXPOSED) if step is not None else None,
            exposed / 1e3 if exposed is not None else None,
            "s",
        )
        yield ComparedNumber(
            "tokens/s per process",
            self.candidate.speed if self.known else None,
            measured.median("tokens_per_second_per_gpu"),
            "tokens/s",
        )
        yield ComparedNumber(
            "MFU",
            mfu(self.candidate) if self.known and not self.is_host else None,
            measured.median("mfu"),
            "share",
        )
        yield ComparedNumber(PEAK, float(sum(self.memory.values())), measured.peak_memory, "bytes")
        yield ComparedNumber(
            "data-parallel messages of rank 0, a step",
            self.data_parallel_bytes,
            measured.data_parallel_bytes,
            "bytes",
        )

    def notes(self) -> Iterator[str]:
        """Yield what has to be known to read the table."""
        if not self.known:
            device = self.run.starts[-1].details.get("device")
            yield (
                f"The planner does not know {device}, so there is no plan of times: measure it "
                "with plan calibrate, and give --coefficients FILE."
            )
        for note in self.calibration.notes if self.known else ():
            yield f"{note[:1].upper()}{note[1:]}."
        if self.is_host:
            yield (
                "On a CPU the measured peak is the whole process, with Python and torch; planned "
                "are its tensors."
            )
        before = self.run.starts[-1].details.get("versions", {}).get("megatron_llama")
        yield (
            "Measured are medians, the peak, and of messages the mean, in the newest layout. "
            f"The run's version was {before}, the plan is made now."
        )


_UNUSABLE = (
    *(TypeError, ValueError, AttributeError, ArithmeticError, LookupError, AssertionError),
    RecursionError,
)
"""Errors of a configuration from a file, with values that no check of options has seen."""


def planned(run: RunFolder, coefficients: str | None) -> Planned | str:
    """Return the plan of the newest start, or why there is none. ``coefficients`` is a file of
    ``plan calibrate``. Raises ConfigError if it cannot be used."""
    calibration = None if coefficients is None else calibration_of(None, coefficients)
    if not run.starts:
        return "The run was made by a version that did not write what a plan needs (events.jsonl)."
    start = run.starts[-1].details
    world_size = start["world_size"]
    is_host = bool(start.get("device_is_host"))
    gpu = gpu_of_device(str(start.get("device")), int(start.get("device_memory") or 0))
    known = calibration is not None or is_host or gpu is not None
    if calibration is None:
        calibration = HOST if is_host or gpu is None else calibration_of(gpu.name, None)
    try:
        config = read_config(start["config"], "events.jsonl config")
        batch = Measured(run).batch or config.training.global_batch_size
        training = replace(config.training, global_batch_size=batch, rampup_batch_size=())
        config = replace(config, training=training)
        found = problems(config, world_size)
        if found:
            return listing("This version would refuse the configuration:", found)
        node = int(start.get("processes_per_machine") or 0) or calibration.gpu.node
        node = gcd(world_size, node) or 1
        domain = calibration.gpu.domain if calibration.gpu.domain > calibration.gpu.node else node
        machine = Machine(calibration.gpu, world_size, node, domain, calibration.gpu.nic)
        plan = Planned(run, config, calibration, machine, known, is_host)
        list(plan.compared())
    except _UNUSABLE as error:
        return f"There is no plan: {error}"
    return plan
