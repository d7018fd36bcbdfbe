"""Proves that the passes of blocks can be captured as graphs (--cuda-graph-scope block).

The recorded device has no graphs: a capture runs a pass and keeps the list of what it did, a replay
runs the pass again. A device would repeat the list as it is. So both must be the same list, on the
same memory, and nothing may be in it that a device cannot repeat.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import zip_longest
from typing import Any
from unittest.mock import patch

from torch import Tensor

from megatron_llama.engine.comm import device as devices
from megatron_llama.train.run import block_graphs
from megatron_llama.train.setup.checks.graphs import graph_problems
from tools.stream_check.events import Access, Alloc, Event, Free, Line, Memory, Signal, Site, Wait
from tools.stream_check.layouts import Layout, model_layouts, train
from tools.stream_check.order import Race, check, place
from tools.stream_check.rank import recorded
from tools.stream_check.recording import Recording, Stream


@dataclass(frozen=True)
class Problem:
    """Something that a graph cannot be, or must not do."""

    kind: str
    site: Site
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}, {place(self.site)}"


SYNC = "the host waits inside of a graph"
HOST = "a graph uses memory of the host"
OUTSIDE = "a graph waits for work that is not in it"
UNJOINED = "a graph ends before work of another stream in it"
ESCAPES = "memory of a graph outlives it"
READ = "memory of a graph is used outside of it"
OTHER = "a replay is not what was captured"
IN_USE = "a replay overwrites memory that is in use"

Place = tuple[str, int] | int
"""A buffer of a graph: the graph's name and the number of the allocation. Any other one: its
number."""


@dataclass(frozen=True)
class _Act:
    """One line of a graph's list: an access, or memory that begins to exist."""

    what: str
    line: str
    where: Place
    begin: int
    end: int
    writes: bool
    site: Site = field(compare=False)

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        return f"`{self.what}` {verb} {_named(self.where)}[{self.begin}:{self.end}] on {self.line}"


class _Graph:
    """One captured pass."""

    def __init__(
        self, graphs: RecordedGraphs, name: str, work: Callable[[], Any], pool: int
    ) -> None:
        self._graphs = graphs
        self._work = work
        self.name = name
        self.pool = pool
        self.owner = graphs.owner
        self.in_use = False
        """Whether the backward pass has not read yet what the last replay has kept."""
        self.kept = 0
        """Bytes that it has made and not given back."""
        self.peak = 0
        """Most bytes of its own at once."""
        self.acts, self.result = self._run(captures=True)

    def _run(self, *, captures: bool) -> tuple[list[_Act], Any]:
        graphs = self._graphs
        recording = graphs.recording
        with recording.noting(captures=captures) as events:
            result = self._work()
        own = recording.stream.line
        if not captures:
            graphs.inside.update(map(id, events))
        memories = {
            event.buffer: event.memory for event in events if isinstance(event, Alloc)
        } | recording.memories()
        if captures:
            graphs.problems.extend(_uncapturable(events, own, memories))
            self.kept, self.peak = _kept_and_peak(events)
        made = [event.buffer for event in events if isinstance(event, Alloc)]
        for number, buffer in enumerate(made):
            graphs.places[buffer] = self.name, number
        return [_act(event, own, graphs.places) for event in events if _is_act(event)], result

    def replay(self) -> None:
        """Run the pass again, and compare."""
        graphs = self._graphs
        graphs.replays += 1
        later = graphs.of_pool(self.pool)[graphs.of_pool(self.pool).index(self) :]
        for other in later:
            if other.in_use:
                first = self.acts[0].site
                text = f"{self.name}, while no backward pass has read what {other.name} kept"
                graphs.problems.append(Problem(IN_USE, first, text))
        acts, result = self._run(captures=False)
        for captured, replayed in zip_longest(self.acts, acts):
            if captured != replayed:
                site = (replayed or captured).site
                text = f"{self.name}: captured {captured}, now {replayed}"
                graphs.problems.append(Problem(OTHER, site, text))
                break
        if isinstance(result, Tensor):
            with graphs.recording.noting(captures=False) as events:
                self.result.copy_(result)
            graphs.inside.update(map(id, events))
        self.in_use = self.pool != graphs.backward_pool
        if not self.in_use:
            for other in graphs.graphs:
                other.in_use &= other.owner is not self.owner


class RecordedGraphs:
    """What stands for a device's graphs, and what is wrong with them."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.problems: list[Problem] = []
        self.graphs: list[_Graph] = []
        self.replays = 0
        self.places: dict[int, Place] = {}
        """The buffers of graphs, by their numbers."""
        self.inside: set[int] = set()
        """The identities of events inside of graphs."""
        self.backward_pool = -1
        """The pool that was asked for first."""
        self.owner: object = None
        """The pass of a block and a microbatch that is being captured, forward or backward."""
        self._pools = 0

    def pool(self) -> int:
        """Return the name of a new pool."""
        self._pools += 1
        if self.backward_pool < 0:
            self.backward_pool = self._pools
        return self._pools

    def of_pool(self, pool: int) -> list[_Graph]:
        """Return the graphs of a pool, in the order of their captures."""
        return [graph for graph in self.graphs if graph.pool == pool]

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools. A pool holds what its graphs keep, and what one needs beside it."""
        total = 0
        for pool in {graph.pool for graph in self.graphs}:
            kept = most = 0
            for graph in self.of_pool(pool):
                most = max(most, kept + graph.peak)
                kept += graph.kept
            total += most
        return total

    def capture(
        self, work: Callable[[], Any], pool: int, stream: Stream
    ) -> tuple[Any, Callable[[], None]]:
        """Stand for ``devices.capture``."""
        with devices.on_stream(stream):  # type: ignore[arg-type]
            begin = len(self.recording.events)
            graph = _Graph(self, f"graph {len(self.graphs)} of pool {pool}", work, pool)
        self.graphs.append(graph)
        if pool == self.backward_pool:
            events = self.recording.events[begin:]
            freed = {event.buffer for event in events if isinstance(event, Free)}
            for event in events:
                if isinstance(event, Alloc) and event.nbytes and event.buffer not in freed:
                    text = f"{event.nbytes} bytes of {graph.name}, whose pool others use"
                    self.problems.append(Problem(ESCAPES, event.site, text))
        return graph.result, graph.replay

    def finish(self, events: Sequence[Event]) -> None:
        """Look for memory of graphs that something else uses."""
        results = {
            self.recording.storage(graph.result).number
            for graph in self.graphs
            if isinstance(graph.result, Tensor)
        }
        for event in events:
            if not isinstance(event, Access) or id(event) in self.inside:
                continue
            if event.buffer in self.places and event.buffer not in results:
                name = _named(self.places[event.buffer])
                self.problems.append(Problem(READ, event.site, f"{event.operator} of {name}"))


@contextmanager
def captured(recording: Recording) -> Iterator[RecordedGraphs]:
    """A section in which graphs can be captured on the recorded device."""
    graphs = RecordedGraphs(recording)

    def of_owner(method: Callable[..., None]) -> Callable[..., None]:
        def call(owner: object, *arguments: Any) -> None:
            graphs.owner = owner
            method(owner, *arguments)

        return call

    passes = block_graphs._Pass
    with (
        patch.object(passes, "__init__", of_owner(passes.__init__)),
        patch.object(passes, "capture_backward", of_owner(passes.capture_backward)),
        patch.object(devices, "capture", graphs.capture),
        patch.object(devices, "graph_pool", graphs.pool),
    ):
        yield graphs


def _uncapturable(
    events: Sequence[Event], own: Line, memories: Mapping[int, Memory]
) -> Iterator[Problem]:
    """Yield what a device cannot capture of these events, whose stream is ``own``."""
    signals: dict[int, tuple[Line, Access | None]] = {}
    """The line of each point, and the last work on it that no wait has joined."""
    forked: set[Line] = set()
    unjoined: dict[Line, Access] = {}
    for event in events:
        if isinstance(event, Signal):
            signals[event.token] = event.line, unjoined.get(event.line)
        elif isinstance(event, Wait) and event.line.is_thread:
            yield Problem(SYNC, event.site, "nothing runs while a pass is captured")
        elif isinstance(event, Wait):
            point = signals.get(event.token) if event.token is not None else None
            if point is None:
                yield Problem(OUTSIDE, event.site, f"{event.line.name} waits")
                continue
            source, work = point
            if event.line != own:
                forked |= {event.line} if source == own or source in forked else set()
            elif work is not None and unjoined.get(source) is work:
                del unjoined[source]
        elif isinstance(event, Access):
            if event.line.is_thread:
                yield Problem(HOST, event.site, f"the host does `{event.operator}` itself")
            elif memories.get(event.buffer, Memory.DEVICE) is not Memory.DEVICE:
                yield Problem(HOST, event.site, f"`{event.operator}`")
            elif event.line != own:
                if event.line not in forked:
                    yield Problem(OUTSIDE, event.site, f"{event.line.name} does {event.operator}")
                unjoined[event.line] = event
    for line, access in unjoined.items():
        yield Problem(UNJOINED, access.site, f"{access.operator} on {line.name}")


def _kept_and_peak(events: Sequence[Event]) -> tuple[int, int]:
    live: dict[int, int] = {}
    peak = 0
    for event in events:
        if isinstance(event, Alloc):
            live[event.buffer] = event.nbytes
            peak = max(peak, sum(live.values()))
        elif isinstance(event, Free):
            live.pop(event.buffer, None)
    return sum(live.values()), peak


def _is_act(event: Event) -> bool:
    return isinstance(event, Access) or (isinstance(event, Alloc) and event.nbytes > 0)


def _act(event: Event, own: Line, places: Mapping[int, Place]) -> _Act:
    assert isinstance(event, Access | Alloc)
    where = places.get(event.buffer, event.buffer)
    line = "its stream" if event.line == own else event.line.name
    if isinstance(event, Alloc):
        return _Act("new memory", line, where, 0, event.nbytes, True, event.site)
    # Messages are counted, and backward passes run inside of others: neither is part of the list.
    what = re.sub(r" in \w+$| \d+(?= on )", "", event.operator)
    return _Act(what, line, where, event.begin, event.end, event.writes, event.site)


def _named(where: Place) -> str:
    return f"memory {where[1]} of {where[0]}" if isinstance(where, tuple) else f"buffer {where}"


@dataclass(frozen=True)
class GraphResult:
    """What one layout with graphs shows."""

    layout: str
    graphs: int
    replays: int
    pool_bytes: int
    """Memory of the graphs' pools, if the allocator leaves no gaps."""
    problems: tuple[Problem, ...]
    races: tuple[Race, ...]
    seconds: float

    @property
    def is_sound(self) -> bool:
        """Whether something was captured and replayed, and nothing is wrong."""
        return self.replays > self.graphs > 0 and not self.problems and not self.races


@cache
def graph_layouts() -> Mapping[str, Layout]:
    """Return the layouts whose options allow graphs, with graphs, by their names."""
    return {
        name: found for name, given in model_layouts().items() if (found := _with_graphs(given))
    }


def _with_graphs(layout: Layout) -> Layout | None:
    training = replace(layout.config.training, cuda_graph_scope="block")
    config = replace(layout.config, training=training)
    refused = any(graph_problems(config)) or layout.documents
    if refused or "timeline" in layout.between or layout.end == "reduced":
        return None
    # The first step has no graphs, and a place that is taken again shows only in a third.
    return replace(layout, config=config, steps=max(4, layout.steps))


def graph_result_of(name: str) -> GraphResult:
    """Record one layout with graphs and check it."""
    return measured_graphs(name, graph_layouts()[name])


def measured_graphs(name: str, layout: Layout) -> GraphResult:
    """Record a layout with graphs and check it: the graphs, and the order of streams around
    them."""
    begin = time.perf_counter()
    seen: list[RecordedGraphs] = []

    def run(recording: Recording) -> None:
        with captured(recording) as graphs:
            train(layout, recording)
            graphs.finish(recording.events)
            seen.append(graphs)

    events = recorded(run, layout.rank, layout.world_size, None)
    [graphs] = seen
    problems = tuple(dict.fromkeys(graphs.problems))
    races = check(events).races
    return GraphResult(
        name,
        len(graphs.graphs),
        graphs.replays,
        graphs.pool_bytes,
        problems,
        races,
        time.perf_counter() - begin,
    )
