"""Traces of some steps of a run, for chrome://tracing and ui.perfetto.dev: those of torch's
profiler on some ranks (--profile), and a timeline of all ranks (--record-timeline)."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatron_llama.checkpoint.failures import writing
from megatron_llama.config.schema import Config
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.object_collectives import raise_on_all_ranks
from megatron_llama.engine.mesh import Mesh
from megatron_llama.metrics.log import MetricLog
from megatron_llama.train.run.callbacks import Part, Run
from megatron_llama.train.run.timeline_recorder import TimelineRecorder


class Profiling(Part):
    """Traces the steps after ``profile_step_start`` up to and including ``profile_step_end``, on
    the ranks of ``profile_ranks``.

    Each of these writes ``rank-R.trace.json.gz``, and on a GPU ``rank-R.memory.pickle`` for
    pytorch.org/memory_viz. The timeline has the same steps."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        log: MetricLog,
        settle: Callable[[], None],
        restart_clock: Callable[[], None],
    ) -> None:
        """``settle`` waits until nothing of the optimizer is in flight. ``restart_clock`` leaves
        the time of beginning and writing out of the log's averages."""
        self._options = config.log
        self._mesh = mesh
        self._log = log
        self._folder = Path(config.log.profile_dir)
        self._here = mesh.rank in config.log.profile_ranks
        self._profiler: Any = None
        self._timeline = TimelineRecorder(config, mesh, log, settle)
        self._restart_clock = restart_clock

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A run that ends inside the traced steps writes the trace so far.
        if self._profiler is not None and error is None:
            self._stop()
        elif self._profiler is not None:
            # Stopping waits for the device, and the device for ranks that may be gone. So it comes
            # after the user has seen the error, and this rank has left the others. An interpreter
            # that ends with an active profiler crashes.
            atexit.register(self._profiler.stop)
        self._timeline.stop(write=error is None)

    def after_start(self, run: Run) -> None:
        self._timeline.touch()

    def before_step(self, run: Run) -> None:
        self.before(run.iteration)

    def before(self, iteration: int) -> None:
        """Begin or end the trace before the step that follows ``iteration`` steps. Raises
        CheckpointError, on every rank, if the folder cannot be made or the timeline cannot be
        written."""
        if self._options.profile and iteration == self._options.profile_step_start:
            with raise_on_all_ranks(self._mesh.world), writing(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
            if self._here:
                self._start()
        elif self._profiler is not None and iteration >= self._options.profile_step_end:
            self._stop()
        self._timeline.before(iteration)
        asked = self._options.profile or self._options.record_timeline is not None
        if asked and iteration in (
            self._options.profile_step_start,
            self._options.profile_step_end,
        ):
            self._restart_clock()

    def _start(self) -> None:
        from torch.profiler import profile

        devices.synchronize(self._mesh.device)
        devices.record_memory(self._mesh.device, on=True)
        self._profiler = profile(profile_memory=True, record_shapes=True)
        self._profiler.start()

    def _stop(self) -> None:
        profiler = self._profiler
        self._profiler = None
        devices.synchronize(self._mesh.device)
        profiler.stop()
        name = self._folder / f"rank-{self._mesh.rank}"
        with writing(self._folder):
            profiler.export_chrome_trace(f"{name}.trace.json.gz")
            devices.write_memory(self._mesh.device, f"{name}.memory.pickle")
        first = self._options.profile_step_start + 1
        last = self._mesh.recorder.iteration
        self._log.say(f" traced iterations {first} to {last}: {self._folder}")
        devices.record_memory(self._mesh.device, on=False)
