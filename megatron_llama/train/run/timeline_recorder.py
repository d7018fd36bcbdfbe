"""Some steps of a run as one timeline of all ranks (--record-timeline).

Every rank notes its actions and messages where its ``Recorder`` sees them: on the host by the
clock, on a device by events that are read after the recording. Nothing is sent or waited for in
between. Before the first step and after the last one everything in flight arrives, so that every
message of the recorded steps also ends in them.
"""

from __future__ import annotations

import math
import socket
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_llama.checkpoint.failures import writing
from megatron_llama.config.schema import Config
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.object_collectives import gather_object, raise_on_all_ranks
from megatron_llama.engine.comm.recorder import Note, Recorder
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.metrics.log import MetricLog
from megatron_llama.train.run.timeline_file import (
    AXIS_LANES,
    COMPUTE,
    GATHERS,
    ITERATIONS,
    OTHER,
    REDUCTIONS,
    UPDATES,
    WAITS,
    Recorded,
    Span,
    write_timeline,
)

ROUNDS = 8
"""How often a rank asks for the first rank's time. The question with the fastest answer counts."""
ENGINE_WAITS: Sequence[tuple[str, str]] = (("parameters", GATHERS), ("gradients", REDUCTIONS))
"""The engine's names of the messages that it waits for, and their lanes."""


class _Note:
    """A ``Note`` of the timeline. Times are seconds of the host's clock, or events of a device."""

    def __init__(
        self, kind: str, what: Any, evaluating: bool, clock: Callable[[], Any], ended: list[_Note]
    ) -> None:
        self.kind = kind
        self.what = what
        self.evaluating = evaluating
        self._clock = clock
        self._ended = ended
        self.start = clock()
        self.stop: Any = None

    def end(self) -> None:
        self.stop = self._clock()
        self._ended.append(self)  # which is atomic: notes end in several threads


class Notes:
    """The notes of one rank, from ``begin`` to ``finish``."""

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self._recorder = recorder
        self._device = device
        self._ended = list[_Note]()
        self._clock: Callable[[], Any] = (
            time.perf_counter if devices.is_host(device) else partial(devices.timed_event, device)
        )
        self._zero: tuple[Any, float] = (None, 0.0)
        self._iteration: Note | None = None

    def begin(self) -> None:
        """Take notes from now on. The device must be idle."""
        event = self._clock()
        devices.synchronize(self._device)
        # The device is idle, so this event and this moment of the host's clock are the same.
        self._zero = event, time.perf_counter()
        self._recorder.timeline = self._note

    def _note(self, kind: str, what: Any) -> Note:
        if kind == "wait":
            what = str(what)  # what is waited for may hold tensors, which must not live on here
        elif kind == "message" and what[0] not in AXIS_LANES:
            what = (*what[:3], None)  # a message of the whole world is one number, and no bucket
        return _Note(kind, what, self._recorder.evaluating, self._clock, self._ended)

    def next_iteration(self, iteration: int | None) -> None:
        """End the current iteration, and begin the next one unless it is None."""
        if self._iteration is not None:
            self._iteration.end()
        self._recorder.evaluating = False  # what a step sends before its first action is its own
        self._iteration = None if iteration is None else self._note("iteration", iteration)

    def finish(self) -> None:
        """End the notes. The device must be idle."""
        self._recorder.timeline = None
        self.next_iteration(None)
        devices.synchronize(self._device)

    def spans(self, rank: int, offset: float) -> list[Span]:
        """Return all notes as spans. ``offset`` is added to this host's clock."""
        event, host = self._zero

        def seconds(moment: Any) -> float:
            if devices.is_host(self._device):
                return float(moment) + offset
            return host + float(event.elapsed_time(moment)) / 1e3 + offset

        iterations = sorted(
            (seconds(note.start), note.what) for note in self._ended if note.kind == "iteration"
        )
        starts = [start for start, _ in iterations]
        spans = []
        for note in self._ended:
            lane, name, details = _described(note)
            start = seconds(note.start)
            _, iteration = iterations[max(0, bisect_right(starts, start) - 1)]
            details = {"iteration": iteration, **details}
            if note.evaluating:
                details["evaluation"] = 1
            spans.append(Span(rank, lane, name, start, seconds(note.stop), details))
        return spans


def _described(note: _Note) -> tuple[str, str, dict[str, int | str]]:
    """Return the lane, the name and the details of a note's span."""
    what = note.what
    if note.kind == "action":
        details = {"op": what.op.value, "stage": what.stage, "microbatch": what.microbatch}
        return COMPUTE, f"{what.op.value} {what.microbatch}", details
    if note.kind == "message":
        axis, operation, size, bucket = what
        details = {"axis": axis, "operation": operation, "bytes": size}
        name = str(operation)
        if bucket is not None:
            name = f"{operation} {bucket}"
            details["bucket"] = bucket
        return AXIS_LANES.get(axis, OTHER), name, details
    if note.kind == "wait":
        # "parameters" and "gradients" are words of the engine, anything else ends in its axis.
        lane = dict(ENGINE_WAITS).get(what) or AXIS_LANES.get(what.rpartition(" on ")[2], OTHER)
        return WAITS, what, {"on": lane}
    if note.kind == "update":
        return UPDATES, f"update {what}", {"bucket": what}
    return ITERATIONS, f"iteration {what}", {}


def clock_offset(axis: Axis, clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
    """Return the offset from this rank's clock to the first rank's, and its largest error, in
    seconds. Collective.

    It is measured by question and answer over the host's backend (Cristian, 1989): the answer was
    given between the moments at which this rank asked and heard, and is taken as from their
    middle."""
    answer = torch.zeros((), dtype=torch.float64)
    if axis.rank == 0:
        for peer in range(1, axis.size):
            for _ in range(ROUNDS):
                dist.recv(answer, group=axis.group, group_src=peer)
                dist.send(answer.fill_(clock()), group=axis.group, group_dst=peer)
        return 0.0, 0.0
    best = (math.inf, 0.0)
    for _ in range(ROUNDS):
        asked = clock()
        dist.send(answer, group=axis.group, group_dst=0)
        dist.recv(answer, group=axis.group, group_src=0)
        heard = clock()
        best = min(best, ((heard - asked) / 2, float(answer) - (asked + heard) / 2))
    error, offset = best
    return offset, error


class TimelineRecorder:
    """Records the steps after ``profile_step_start`` up to and including ``profile_step_end``, on
    all ranks, if --record-timeline is given."""

    def __init__(
        self, config: Config, mesh: Mesh, log: MetricLog, settle: Callable[[], None]
    ) -> None:
        """``settle`` waits until nothing of the optimizer is in flight."""
        self._config = config
        self._mesh = mesh
        self._log = log
        self._settle = settle
        path = config.log.record_timeline
        self._file = Path(path) if path is not None else None
        self._notes: Notes | None = None
        self._iterations: list[int] = []
        self._offset = 0.0
        self._error = 0.0

    def touch(self) -> None:
        """Make the file, if one is wanted: an unwritable one is an error before the first step, not
        after the last. Collective. Raises CheckpointError on every rank."""
        if self._file is None:
            return
        with raise_on_all_ranks(self._mesh.world), writing(self._file):
            if self._mesh.rank == 0:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.touch()

    def before(self, iteration: int) -> None:
        """Begin, go on with or end the recording before the step that follows ``iteration`` steps.
        Collective where it begins or ends."""
        if self._file is None:
            return
        if iteration == self._config.log.profile_step_start:
            self._settle()
            devices.synchronize(self._mesh.device)
            self._notes = Notes(self._mesh.recorder, self._mesh.device)
            self._iterations = []
            self._offset, self._error = clock_offset(self._mesh.world)
            self._notes.begin()
        elif iteration >= self._config.log.profile_step_end:
            self.stop(write=True)
        if self._notes is not None:
            self._iterations.append(iteration + 1)
            self._notes.next_iteration(iteration + 1)

    def stop(self, *, write: bool) -> None:
        """End the recording, if there is one, and write its file if asked, which is collective.
        Raises CheckpointError, on every rank, if the file cannot be written."""
        notes = self._notes
        self._notes = None
        if notes is None:
            return
        if not write:
            # After an error the device may never be idle again.
            self._mesh.recorder.timeline = None
            return
        self._settle()
        notes.finish()
        assert self._file is not None
        mesh = self._mesh
        axes = {
            "pp": (mesh.pp.rank, mesh.pp.size),
            "dp": (mesh.data_rank, mesh.data_size),
            "cp": (mesh.cp.rank, mesh.cp.size),
            "tp": (mesh.tp.rank, mesh.tp.size),
        }
        label = " ".join(f"{name} {rank}" for name, (rank, size) in axes.items() if size > 1)
        spans = notes.spans(mesh.rank, self._offset)
        ranks = gather_object((spans, socket.gethostname(), self._error, label), mesh.world)
        with raise_on_all_ranks(mesh.world), writing(self._file):
            if ranks is not None:
                write_timeline(self._file, _recorded(self._config, mesh.device, ranks))
        first = self._iterations[0]
        last = self._iterations[-1]
        self._log.say(f" timeline of iterations {first} to {last}: {self._file}")


def _recorded(
    config: Config, device: torch.device, ranks: Sequence[tuple[list[Span], str, float, str]]
) -> Recorded:
    every = [span for spans, *_ in ranks for span in spans]
    zero = min((span.begin for span in every), default=0.0)
    errors = sorted((error for _, _, error, _ in ranks), reverse=True)
    return Recorded(
        config=asdict(config),
        ranks=len(ranks),
        per_node=max(Counter(host for _, host, _, _ in ranks).values()),
        device=devices.name(device),
        host=devices.is_host(device),
        memory=devices.memory_bytes(device),
        clock_error=math.fsum(errors[:2]),  # both clocks of a pair may be wrong
        labels=tuple(label for *_, label in ranks),
        spans=tuple(replace(span, begin=span.begin - zero, end=span.end - zero) for span in every),
    )
