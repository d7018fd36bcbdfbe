"""The other ranks, as far as a failure of one of them concerns them.

In a planned step ranks do not ask what the others do, so a rank that cannot go on would keep them
waiting until the timeout. It leaves the reason in the job's store and ends its communicators. With
gloo that ends its connections, and so nearly all waits of the peers; they raise the reason, and end
theirs. A wait for a message of which a part has gone over the connection does not end with it
(``Pair::signalException`` leaves it out), and on a device a wait ends with the rank's own
communicator only: so a thread looks into the store once a second. If it finds a reason, the
engine's threads are not waited for any more.

The same thread looks after ranks that wait long. It asks all ranks for their positions, and leaves
where one of them can never come (``positions.py``). Others may be slow: then it says on stderr who
is where, and the wait goes on.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from types import TracebackType
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.exchange import gather
from megatron_llama.engine.comm.object_collectives import AGREEMENT
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.shard.data_mesh import close_data_mesh
from megatron_llama.engine.shard.positions import (
    NOTHING,
    Counts,
    Meeting,
    Position,
    differs,
    in_words,
    never_comes,
)
from megatron_llama.errors import TrainingError

LOOK_SECONDS = 1.0
"""How often a rank looks whether another one has left."""
WAIT_SECONDS = 5.0
"""How long a rank waits before it asks where the others are."""
NUMBERS = 3
"""How many numbers a rank says in a meeting."""
WARNING_FACTOR = 6.0
"""How many times longer it waits for the next warning than for the one before."""
_REASON = "reason"
_ASKED = "asked"
"""How often a rank that waits has asked."""


def _closed(rank: int) -> str:
    return f"closed/{rank}"


def _at(rank: int) -> str:
    return f"at/{rank}"


class OrderError(TrainingError, RuntimeError):
    """The model has used its weights in another order than before, or than on another rank; or
    another rank cannot go on."""


Compare = Callable[[Sequence[tuple[int, ...]]], OrderError | None]
"""Returns the error for what the ranks have said in a meeting, in rank order; None: it is right."""


class _Last:
    """What outlives an engine that was let go."""

    def __init__(self) -> None:
        self.meeting = Meeting()


class Peers:
    """The other ranks of an engine."""

    def __init__(self, mesh: Mesh) -> None:
        self.axis = mesh.world
        self._mesh = mesh
        self._store: Store | None = None
        self.left: str | None = None
        """Why the ranks have left each other."""
        self.end_waits: WeakMethod[Callable[[BaseException], None]] | None = None
        """Fails what the engine's threads wait for."""
        self.counts: WeakMethod[Callable[[], Counts]] | None = None
        """Returns what this rank has done."""
        self.position: WeakMethod[Callable[[], Position]] | None = None
        """Returns where this rank is."""
        self._last = _Last()
        self._compare: Compare | None = None
        """What compares what the ranks say in the meeting under way; None: there is none."""
        # Made once, as all that a step needs.
        self._numbers = torch.zeros(self.axis.size, NUMBERS, dtype=torch.int64)
        self._own_numbers = self._numbers[self.axis.rank]
        self._exchange = gather(self._numbers.view(-1), self._own_numbers, self.axis, index=0)
        self._asked = 0
        """How often ranks had asked when this one answered last."""
        self._looks_for: Meeting | None = None
        """The meeting for which this rank, among those that wait, looks where the others are."""
        self._next_warning = 0.0
        """The seconds of a wait after which the next warning comes."""
        self._stopped = threading.Event()
        self._looking: threading.Thread | None = None
        if self.axis.group is not None:
            store = dist.distributed_c10d._get_default_store()
            self._store = PrefixStore(f"megatron_llama/{self.axis.group.group_name}", store)
            # The thread must not keep the communicators of an engine that was never closed.
            watched = weakref.ref(self)
            self._looking = devices.start_thread(
                _look, self._store, watched, self._stopped, name="peers"
            )
            # An engine that nobody holds any more is gone like one that was closed.
            self._ending = weakref.finalize(
                self, _let_go, self._store, self.axis.rank, self._stopped, self._last
            )

    @property
    def meeting(self) -> Meeting:
        """The last meeting to which this rank has come. Replaced as a whole: a thread reads it."""
        return self._last.meeting

    def leave(self, reason: str) -> None:
        """Tell the others why this rank does not go on. The first reason of all counts."""
        if self.left is not None:
            return
        # Before the communicators end: what then comes out of a stream is not to be used, and
        # whoever reads it sees this.
        self.left = reason
        if self._store is not None:
            self._store.compare_set(_REASON, "", reason)
            close_data_mesh(self._mesh, abort=True)
            end_waits = self.end_waits() if self.end_waits is not None else None
            if end_waits is not None:
                end_waits(OrderError(reason))

    def explain(self, error: RuntimeError) -> RuntimeError:
        """Return the error to raise for one that a wait has raised: the reason of the rank that has
        left, if one has."""
        if isinstance(error, OrderError) or self._store is None:
            return error
        reason = self._reason(self._store)
        if reason is None:
            return error
        self.leave(reason)
        return OrderError(reason)

    def explained(self) -> AbstractContextManager[None]:
        """A section in which the end of a wait becomes the reason of the rank that has left."""
        return _Explained(self)

    # Meetings

    def meet(self, numbers: Sequence[int], compare: Compare, *, discards: bool = False) -> None:
        """Say to all ranks what this one is about to do, and wait until all have. Raises the error
        of ``compare``. Collective."""
        self.begin_meeting(numbers, compare, discards=discards)
        self._end_meeting()

    def begin_meeting(
        self, numbers: Sequence[int], compare: Compare, *, discards: bool = False
    ) -> None:
        """Say what this rank is about to do, and go on: the next meeting waits for this one."""
        if self.axis.size == 1:
            return
        self._end_meeting()
        counts = self._counts()
        with self.explained():
            for place, number in enumerate(numbers):
                self._own_numbers[place] = number
            # Before anything is sent: peers that have heard of it have come further.
            self._last.meeting = Meeting(
                self.meeting.number + 1,
                at=counts,
                before=counts.since(self.meeting.at),
                said=(numbers[0], numbers[1]),
                discards=discards,
            )
            self._exchange.start()
        self._compare = compare

    def _end_meeting(self) -> None:
        compare = self._compare
        if compare is None:
            return
        self._last.meeting = replace(self.meeting, waits=True)
        with self.explained(), self.axis.recorder.waiting(AGREEMENT):
            self._exchange.wait()
        self._last.meeting = replace(self.meeting, waits=False)
        self._compare = None
        error = compare([tuple(said) for said in self._numbers.tolist()])
        if error is not None:
            raise error

    def _counts(self) -> Counts:
        counts = self.counts() if self.counts is not None else None
        return NOTHING if counts is None else counts()

    # What the thread does

    def look_around(self, store: Store) -> None:
        """Say where this rank is if another one asks, and ask if this one waits long."""
        position = self._position()
        if position is None:
            return
        seconds = self.waited()
        waits = seconds >= WAIT_SECONDS
        asked = store.add(_ASKED, int(waits))
        if asked != self._asked:
            self._asked = asked
            store.set(_at(self.axis.rank), position.text())
        if waits:
            self._look_for_others(store, position, seconds)

    def waited(self) -> float:
        """Return the seconds for which a computing thread has waited for a message."""
        waits = tuple(self.axis.recorder.waits.values())
        since = [wait.since for wait in waits if wait.computes]
        return time.perf_counter() - min(since) if since else 0.0

    def _position(self) -> Position | None:
        position = self.position() if self.position is not None else None
        return None if position is None else position()

    def _look_for_others(self, store: Store, own: Position, seconds: float) -> None:
        meeting = self.meeting
        if meeting != self._looks_for:
            # One of those that wait: each would read the positions of all.
            if store.add(f"looks/{meeting.number}/{meeting.waits}", 1) > 1:
                return
            self._looks_for = meeting
            # Two looks: the others have answered by then.
            self._next_warning = WAIT_SECONDS + 2 * LOOK_SECONDS
        others: dict[int, Position] = {}
        for rank in range(self.axis.size):
            key = next((key for key in (_closed(rank), _at(rank)) if store.check([key])), None)
            if rank != self.axis.rank and key is not None:
                others[rank] = Position.read(store.get(key).decode())
        words = {rank: others[rank].words for rank in others} | {self.axis.rank: own.words}
        gone = [
            rank
            for rank, other in others.items()
            if never_comes(meeting, other) or differs(meeting, other)
        ]
        if gone:
            named = dict.fromkeys((self.axis.rank, *gone))
            self.leave(str(_apart({rank: words[rank] for rank in sorted(named)})))
        elif seconds >= self._next_warning:
            self._next_warning = seconds * WARNING_FACTOR
            silent = set(range(self.axis.size)) - words.keys()
            words |= dict.fromkeys(silent, "no answer")
            print(
                f"megatron_llama: rank {self.axis.rank} has waited for other ranks for "
                f"{seconds:.0f} s, and goes on waiting: "
                f"{in_words({rank: words[rank] for rank in sorted(words)})}",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """Look no longer, and say that this rank has come to its end."""
        position = self._position()
        self._stopped.set()
        if self._looking is not None:
            # A thread that is inside of the store's client when the interpreter ends aborts the
            # process. No longer than this: the store's host may have been stopped.
            self._looking.join(LOOK_SECONDS)
        if self._store is not None and self.left is None and position is not None:
            words = f"engine.close(), or the end of its process, after {position.words}"
            closed = replace(position, closed=True, waits=False, words=words)
            with suppress(DistError):  # the store went with the process that had it
                self._store.set(_closed(self.axis.rank), closed.text())
            self._ending.detach()

    def _reason(self, store: Store) -> str | None:
        """Return why the ranks have left each other; None if no rank has left."""
        try:
            if store.check([_REASON]):
                return store.get(_REASON).decode()
            # A rank that closes its engine leaves in peace, unless another rank still needs it.
            closed = [rank for rank in range(self.axis.size) if store.check([_closed(rank)])]
            if not closed:
                return None
            other = Position.read(store.get(_closed(closed[0])).decode())
        except DistError:  # the store went with the process that had it
            return None
        own = self._position()
        words = {closed[0]: other.words}
        if own is not None and closed[0] != self.axis.rank:
            words[self.axis.rank] = own.words
        return str(_apart(dict(sorted(words.items()))))


class _Explained(AbstractContextManager[None]):
    """``Peers.explained``. No generator: a linear layer enters half a dozen in a step, at 0.5
    microseconds each instead of 1.2."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        peers = self._peers
        if isinstance(error, RuntimeError):
            explained = peers.explain(error)
            if explained is not error:
                raise explained from error
        # On a device the host hears nothing of a wait that has ended before its message came: only
        # a stream has waited, and what it computes next reads memory that was not filled.
        elif error is None and peers.left is not None:
            raise OrderError(peers.left)


def _let_go(store: Store, rank: int, stopped: threading.Event, last: _Last) -> None:
    """An engine has gone without ``close``: say so."""
    stopped.set()
    words = "an engine that was let go without engine.close(), or the end of its process"
    meeting = last.meeting
    position = Position(meeting.number, meeting.said, NOTHING, 0, False, words, closed=True)
    with suppress(DistError):  # the store went with the process that had it
        store.set(_closed(rank), position.text())


def _apart(words_by_rank: Mapping[int, str]) -> OrderError:
    """Return the error for ranks that wait for each other and cannot meet."""
    return OrderError(
        "the ranks",
        got=f"different ways ({in_words(words_by_rank)})",
        expected="as many steps and passes on all ranks, and everything collective on all of them",
        do="give every rank the same number of batches, of evaluation too; call state_dict(), "
        "gathered() and the model on all ranks, not under `if rank == 0`; after an error that one "
        "rank catches let all ranks call engine.discard(), or let the error end the program",
    )


def _look(store: Store, watched: weakref.ref[Peers], stopped: threading.Event) -> None:
    """Leave as soon as another rank has told a reason, and look after ranks that wait long."""
    while not stopped.wait(LOOK_SECONDS):
        try:
            reason = store.get(_REASON).decode() if store.check([_REASON]) else None
        except DistError:
            return
        peers = watched()
        if peers is None:
            return
        if reason is not None:
            peers.leave(reason)
            return
        try:
            peers.look_around(store)
        except DistError:
            return
        del peers
