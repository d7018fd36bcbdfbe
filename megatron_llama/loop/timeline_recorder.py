"""Some steps of a run as one timeline of all ranks (--record-timeline).

Every rank notes its actions and messages where its recorder sees them: on the host by the clock, on
a device by events that are read when the recording is over. Nothing is sent or waited for in
between. Before the first step and behind the last everything in flight arrives, so that every
message that is issued in the recorded steps ends in them.
"""

from __future__ import annotations

import math
import socket
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_llama.checkpoint.failures import writing
from megatron_llama.config.schema import Config
from megatron_llama.distributed import device as devices
from megatron_llama.distributed.comm.object_collectives import gather_object, raise_on_all_ranks
from megatron_llama.distributed.mesh import Axis, Mesh
from megatron_llama.distributed.recorder import Note, Recorder
from megatron_llama.metrics.log import MetricLog
from megatron_llama.plans.schedule import Action
from megatron_llama.plans.timeline_file import (
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
"""Questions that a rank asks for the first rank's time; the one that is answered fastest counts."""
ENGINE_WAITS: Sequence[tuple[str, str]] = (("parameters", GATHERS), ("gradients", REDUCTIONS))
"""What the engine calls the messages that it waits for, and their lanes."""


@dataclass(frozen=True)
class _Noted:
    """As it was noted: plain values, so that nothing is kept alive."""

    kind: str
    what: Any
    begin: Any
    end: Any
    """Seconds of the host's clock, or events of a device."""
    evaluating: bool


class _Noting:
    """Under way; see Note."""

    def __init__(
        self, kind: str, what: Any, evaluating: bool, clock: Callable[[], Any], found: list[_Noted]
    ) -> None:
        self._begun = (kind, what)
        self._evaluating = evaluating
        self._clock = clock
        self._found = found
        self._begin = clock()

    def end(self) -> None:
        """See Note. From any thread."""
        self._found.append(_Noted(*self._begun, self._begin, self._clock(), self._evaluating))


class Notes:
    """What one rank notes, between ``begin`` and ``spans``."""

    def __init__(self, recorder: Recorder, device: torch.device) -> None:
        self._recorder = recorder
        self._device = device
        self._found = list[_Noted]()
        self._clock: Callable[[], Any] = (
            time.perf_counter if devices.is_host(device) else partial(devices.timed_event, device)
        )
        self._zero: tuple[Any, float] = (None, 0.0)
        self._iteration: Note | None = None

    def begin(self) -> None:
        """From now on the recorder's notes come here. The device must be idle."""
        first = self._clock()
        devices.synchronize(self._device)
        self._zero = first, time.perf_counter()
        self._recorder.timeline = self._note

    def _note(self, kind: str, what: Any) -> Note:
        if kind == "wait":  # what is waited for may hold tensors
            what = str(what)
        elif (
            kind == "message" and what[0] not in AXIS_LANES
        ):  # of the whole world: one number, and no bucket
            what = (*what[:3], None)
        return _Noting(kind, what, self._recorder.evaluating, self._clock, self._found)

    def next_iteration(self, iteration: int | None) -> None:
        """One iteration is over, the next begins, if there is one."""
        if self._iteration is not None:
            self._iteration.end()
        self._recorder.evaluating = False  # what a step sends before its first action is its own
        self._iteration = None if iteration is None else self._note("iteration", iteration)

    def finish(self) -> None:
        """Note no more. The device is idle."""
        self._recorder.timeline = None
        self.next_iteration(None)
        devices.synchronize(self._device)

    def _seconds(self, moment: Any) -> float:
        """On this host's clock."""
        event, host = self._zero
        return (
            float(moment)
            if devices.is_host(self._device)
            else host + event.elapsed_time(moment) / 1e3
        )

    def spans(self, rank: int, offset: float) -> list[Span]:
        """Everything noted. ``offset``: what to add to this host's clock."""
        timed = [
            (one, self._seconds(one.begin) + offset, self._seconds(one.end) + offset)
            for one in self._found
        ]
        starts = sorted((begin, one.what) for one, begin, _ in timed if one.kind == "iteration")
        firsts = [begin for begin, _ in starts]
        spans = []
        for one, begin, end in timed:
            place = max(0, bisect_right(firsts, begin) - 1)
            details = {"iteration": starts[place][1], **_details(one)}
            spans.append(Span(rank, _lane(one), _name(one), begin, end, details))
        return spans


def _lane(noted: _Noted) -> str:
    if noted.kind == "message":
        return AXIS_LANES.get(noted.what[0], OTHER)
    return {"iteration": ITERATIONS, "action": COMPUTE, "wait": WAITS, "update": UPDATES}[
        noted.kind
    ]


def _name(noted: _Noted) -> str:
    what = noted.what
    if isinstance(what, Action):
        return f"{what.op.value} {what.microbatch}"
    if noted.kind == "message":
        _, operation, _, bucket = what
        return str(operation) if bucket is None else f"{operation} {bucket}"
    return str(what) if noted.kind == "wait" else f"{noted.kind} {what}"


def _details(noted: _Noted) -> Mapping[str, int | str]:
    what = noted.what
    found = dict[str, int | str]()
    if isinstance(what, Action):
        found = {"op": what.op.value, "stage": what.stage, "microbatch": what.microbatch}
    elif noted.kind == "message":
        axis, operation, size, bucket = what
        found = {
            "axis": axis,
            "operation": operation,
            "bytes": size,
            **({} if bucket is None else {"bucket": bucket}),
        }
    elif noted.kind == "wait":
        found = {
            "on": dict(ENGINE_WAITS).get(what) or AXIS_LANES.get(what.rpartition(" on ")[2], OTHER)
        }
    elif noted.kind == "update":
        found = {"bucket": what}
    return found | ({"evaluation": 1} if noted.evaluating else {})


def clock_offset(axis: Axis, clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
    """What to add to this rank's clock to have the first rank's, and by how much that may be wrong,
    in seconds. Collective.

    By question and answer over the host's backend (Cristian, 1989): the answer was given somewhere
    between the two moments at which this rank asked and heard, taken as their middle."""
    answer = torch.zeros((), dtype=torch.float64)
    if axis.rank == 0:
        for peer in range(1, axis.size):
            for _ in range(ROUNDS):
                dist.recv(answer, group=axis.group, group_src=peer)
                dist.send(answer.fill_(clock()), group=axis.group, group_dst=peer)
        return 0.0, 0.0
    return min(_asked(axis, clock, answer) for _ in range(ROUNDS))[::-1]


def _asked(axis: Axis, clock: Callable[[], float], answer: torch.Tensor) -> tuple[float, float]:
    """(error, offset) of one question."""
    asked = clock()
    dist.send(answer, group=axis.group, group_dst=0)
    dist.recv(answer, group=axis.group, group_src=0)
    heard = clock()
    return (heard - asked) / 2, float(answer) - (asked + heard) / 2


class Recording:
    """Records the steps behind ``profile_step_start`` up to and with ``profile_step_end``, on all
    ranks, where --record-timeline asks."""

    def __init__(
        self, config: Config, mesh: Mesh, log: MetricLog, settle: Callable[[], None]
    ) -> None:
        """``settle``: waits until nothing of the optimizer is in flight. Raises CheckpointError, on
        every rank, if the file's folder cannot be made."""
        self._config = config
        self._mesh = mesh
        self._log = log
        self._settle = settle
        self._file = (
            Path(config.log.record_timeline) if config.log.record_timeline is not None else None
        )
        self._notes: Notes | None = None
        self._iterations: list[int] = []
        self._offset = self._error = 0.0
        if self._file is not None:
            with raise_on_all_ranks(mesh.world), writing(self._file):
                if mesh.rank == 0:
                    self._file.parent.mkdir(parents=True, exist_ok=True)
                    self._file.touch()

    def before(self, iteration: int) -> None:
        """The step after so many is about to begin. Collective at either end of the recording."""
        options = self._config.log
        if self._file is None:
            return
        if iteration == options.profile_step_start:
            self._start()
        elif iteration >= options.profile_step_end:
            self.stop(write=True)
        if self._notes is not None:
            self._iterations.append(iteration + 1)
            self._notes.next_iteration(iteration + 1)

    def _start(self) -> None:
        self._settle()
        devices.synchronize(self._mesh.device)
        self._notes = Notes(self._mesh.recorder, self._mesh.device)
        self._iterations = []
        self._offset, self._error = clock_offset(self._mesh.world)
        self._notes.begin()

    def stop(self, *, write: bool) -> None:
        """End a recording that is under way. Collective if it is to be written. Raises
        CheckpointError, on every rank, if it cannot be."""
        notes = self._notes
        self._notes = None
        if notes is None:
            return
        if write:
            self._settle()
        notes.finish()
        if write:
            self._write(notes)

    def _write(self, notes: Notes) -> None:
        assert self._file is not None
        mesh = self._mesh
        first = self._iterations[0]
        last = self._iterations[-1]
        spans = notes.spans(mesh.rank, self._offset)
        host = socket.gethostname()
        everybody = gather_object((spans, host, self._error, _place(mesh)), mesh.world)
        with raise_on_all_ranks(mesh.world), writing(self._file):
            if everybody is not None:
                write_timeline(self._file, _recorded(self._config, mesh.device, everybody))
        self._log.say(f" timeline of iterations {first} to {last}: {self._file}")


def _recorded(
    config: Config, device: torch.device, everybody: Sequence[tuple[list[Span], str, float, str]]
) -> Recorded:
    zero = min((span.begin for spans, *_ in everybody for span in spans), default=0.0)
    errors = sorted((error for _, _, error, _ in everybody), reverse=True)
    return Recorded(
        config=asdict(config),
        ranks=len(everybody),
        per_node=max(Counter(host for _, host, _, _ in everybody).values()),
        device=devices.name(device),
        host=devices.is_host(device),
        memory=devices.memory_bytes(device),
        clock_error=math.fsum(errors[:2]),
        labels=tuple(label for *_, label in everybody),
        spans=tuple(_shifted(everybody, zero)),
    )


def _shifted(
    everybody: Sequence[tuple[list[Span], str, float, str]], zero: float
) -> Iterator[Span]:
    for spans, *_ in everybody:
        for span in spans:
            yield Span(
                span.rank, span.lane, span.name, span.begin - zero, span.end - zero, span.details
            )


def _place(mesh: Mesh) -> str:
    places = (
        ("pp", mesh.pp.rank, mesh.pp.size),
        ("dp", mesh.data_rank, mesh.data_size),
        ("cp", mesh.cp.rank, mesh.cp.size),
    )
    return " ".join(
        f"{name} {rank}"
        for name, rank, size in (*places, ("tp", mesh.tp.rank, mesh.tp.size))
        if size > 1
    )
