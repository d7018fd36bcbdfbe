"""The plan of a run's configuration next to the measurements in its log."""

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

from megatron_llama.errors import ConfigError, listing
from megatron_llama.planner.calibration import HOST, Calibration, calibration_of
from megatron_llama.planner.candidate import Candidate
from megatron_llama.planner.hardware import gpu_of_device
from megatron_llama.planner.measured import read_config
from megatron_llama.planner.report import mfu, parts_of
from megatron_llama.planner.run.folder import Floats, RunFolder
from megatron_llama.planner.training_job import Machine
from megatron_llama.train.setup.description import describe_config
from megatron_llama.train.setup.memory import MemoryPlan
from megatron_llama.train.setup.resolve import problems

EXPOSED = ("tensor", "context", "pipeline", "data", "expert")
"""Fields of a StepTime that are exposed communication."""

STEP = "step"
PEAK = "peak memory of rank 0"
WHOLE = ("model", "parallel", "offload", "zenflow", "lora")
"""Sections of a configuration that decide the computation, memory and messages of a step."""
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
"""Options of other sections that do so as well. The batch has its own column in the log."""


def _made_of(start: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the values that must be equal in two starts for their steps to be comparable."""
    config = {
        name: section for name, section in start["config"].items() if isinstance(section, Mapping)
    }
    partial = [config.get(section, {}).get(name) for section in PARTLY for name in PARTLY[section]]
    return (start["world_size"], start.get("device"), [config.get(name) for name in WHOLE], partial)


@dataclass(frozen=True)
class Measured:
    """The typical step of a run by its log: medians over the lines of the newest layout with the
    newest batch size. None if the log has no such number."""

    run: RunFolder

    @cached_property
    def rows(self) -> NDArray[np.bool_]:
        """Mask of the lines with the newest layout: a run may have changed its layout, and the
        plan is of the newest one."""
        begin = 0
        starts = self.run.starts
        for before, start in pairwise(starts):
            if _made_of(before.details) != _made_of(start.details):
                begin = start.details["iteration"]
        return self.run.steps["iteration"] > begin

    def column(self, name: str) -> Floats:
        """Return the values of a column in these lines."""
        return self.run.column(name)[self.rows]

    @cached_property
    def batch(self) -> int | None:
        """Samples of the newest step; None if the log does not have them."""
        sizes = self.column("global_batch_size")
        known = sizes[np.isfinite(sizes)]
        return int(known[-1]) if len(known) else None

    def median(self, name: str) -> float | None:
        """Return a column's median over steps of the newest batch size; None without a number."""
        values = self.column(name)
        if self.batch is not None:
            values = values[self.column("global_batch_size") == self.batch]
        values = values[np.isfinite(values)]
        return float(np.median(values)) if len(values) else None

    @cached_property
    def data_parallel_bytes(self) -> float | None:
        """Mean bytes of a step. A mean, since a message may be counted in the next line."""
        sent = self.column("data_parallel_bytes")
        weights = np.diff(self.run.steps["iteration"], prepend=0.0)[self.rows]
        own = np.isfinite(sent) & (self.column("global_batch_size") == (self.batch or 0))
        return float(np.average(sent[own], weights=weights[own])) if own.any() else None

    @cached_property
    def peak_memory(self) -> float | None:
        """Peak bytes of rank 0."""
        values = self.column("peak_memory_bytes")
        values = values[np.isfinite(values)]
        return float(values.max()) if len(values) else None


@dataclass(frozen=True)
class ComparedNumber:
    """A row of the table."""

    what: str
    planned: float | None
    measured: float | None
    unit: str
    """``s``, ``bytes``, ``share`` or the name of a plain number."""

    @property
    def ratio(self) -> float | None:
        """Measured over planned."""
        if not self.planned or self.measured is None:
            return None
        return self.measured / self.planned


@dataclass(frozen=True)
class Planned:
    """The plan of a run's newest start, made with the present version."""

    run: RunFolder
    config: Any
    calibration: Calibration
    machine: Machine
    known: bool
    """Whether the planner knows the device. If not, there is no plan of times."""
    is_host: bool
    described: Mapping[str, str]
    """Description of the run by subject."""

    @cached_property
    def candidate(self) -> Candidate:
        """The configuration on the machine."""
        return Candidate(self.config, self.machine, self.calibration.fit)

    @cached_property
    def plan(self) -> MemoryPlan:
        """Memory and traffic of the configuration."""
        return MemoryPlan(self.config, self.machine.gpus)

    @cached_property
    def memory(self) -> Mapping[str, int]:
        """Bytes of rank 0 by component, at the fullest moment."""
        parts = self.candidate.memory(0)
        return {**parts, "receive buffers": self.plan.host_buffers(0)} if self.is_host else parts

    @cached_property
    def data_parallel_bytes(self) -> float:
        """Bytes that rank 0 sends over the data-parallel axes in a step. A collective counts with
        the bytes of the whole bucket."""
        traffic = self.plan.traffic(0)
        parts = [traffic] if traffic.experts is None else [traffic, traffic.experts]
        return sum(
            part.gather_bytes + part.reduction_bytes + part.replica_bytes + part.matrix_bytes
            for part in parts
        )

    @cached_property
    def step_parts(self) -> Mapping[str, float]:
        """Seconds of a step by purpose."""
        step = self.candidate.step_time
        return {words: getattr(step, name) for name, words in parts_of([self.candidate])}

    def compared(self) -> Iterator[ComparedNumber]:
        """Yield the rows of the table."""
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
        """Yield notes for readers of the table."""
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
    *(RecursionError, ConfigError),
)
"""Errors that a configuration from a file can raise, since its values were not checked."""


def planned(run: RunFolder, coefficients: str | None) -> Planned | str:
    """Return the plan of the newest start, or the reason why there is none. ``coefficients`` is a
    file of ``plan calibrate``. Raises ConfigError if that file cannot be used."""
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
        asked = read_config(start["config"], "events.jsonl config")
        batch = Measured(run).batch or asked.training.global_batch_size
        training = replace(asked.training, global_batch_size=batch, rampup_batch_size=())
        config = replace(asked, training=training)
        refused = problems(config, world_size)
        if refused:
            return listing("This version would refuse the configuration:", refused)
        node = int(start.get("processes_per_machine") or 0) or calibration.gpu.node
        node = gcd(world_size, node) or 1
        domain = calibration.gpu.domain if calibration.gpu.domain > calibration.gpu.node else node
        machine = Machine(calibration.gpu, world_size, node, domain, calibration.gpu.nic)
        described = describe_config(asked, world_size)
        plan = Planned(run, config, calibration, machine, known, is_host, described)
        list(plan.compared())
    except _UNUSABLE as error:
        return f"There is no plan: {error}"
    return plan
