"""Exchanges over gloo: direct point-to-point transfers, which send the minimum and need no thread
of their own.

Every rank sends each part of its buffer straight to the part's owner, in chunks, with all receives
posted before any send: gloo tells a sender that it may go by a message that would queue behind data
of the other direction. Sums are taken in rank order, so that no value depends on where buffers,
parts or chunks end. Everything is cut into views once; a step only issues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.plan.buckets import ALIGN, MAX_PIECES, align_up

UNPLANNED = 21_000
"""The index of exchanges that are made for one use, above those of all planned ones. Several of a
communicator may be under way: gloo matches messages of one tag in the order of their issue."""
_NEVER_SENT = (1 << 31) - 1
"""A tag above those of all exchanges."""


def end_connections(group: dist.ProcessGroup) -> None:
    """End the connections of a group at once, if it has any over gloo. Waits for messages fail:
    here with RuntimeError, and on the other ranks as if this process had ended. Later messages
    fail, too.

    Letting go of the group would not do: a thread that waits for a message keeps its connection.
    And gloo reads nothing more from a connection on which a message comes whose receive was dropped
    (``Pair::prepareRead``), so the thread might wait for a message that is there, and the sender
    for this rank. torch's ``abort`` does nothing to gloo (2.11 to 2.13)."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # a group of a device alone
        return
    if backend.name() != "gloo":
        return
    # A receive that times out ends all connections of its context (``UnboundBuffer::waitRecv``).
    # There is a context for each network interface, and the tag says which one is meant. They
    # receive from any rank, because these send nothing: a peer may be stopped, or gone.
    contexts = len(backend.options._devices)  # type: ignore[attr-defined]
    for number in range(contexts):
        with suppress(RuntimeError):
            nothing = torch.empty(1)
            group.recv_anysource([nothing], _NEVER_SENT - number).wait(timedelta(milliseconds=1))


def _first_tag(index: int, phase: int) -> int:
    """Return the first of the tags of one exchange of a communicator: phase 0 and 1 are those of
    reductions and transfers, 2 that of the gather with the same index."""
    return (3 * index + phase) * MAX_PIECES


@dataclass(frozen=True)
class _Message:
    """One chunk of a part, with its peer and its tag."""

    view: Tensor
    peer: int
    tag: int


def _messages(
    parts: Sequence[tuple[int, Tensor]], first_tag: int, chunk_bytes: int
) -> list[_Message]:
    """Cut the parts of (peer, part) into chunks, numbered by tags. Raises ValueError where a part
    has more chunks than an exchange has tags, which ``chunk_problem`` prevents."""
    messages = []
    for peer, tensor in parts:
        chunk = max(1, chunk_bytes // tensor.element_size())
        if tensor.numel() > chunk * MAX_PIECES:
            raise ValueError(
                f"a part of {tensor.numel()} elements makes more than {MAX_PIECES} chunks "
                f"of {chunk_bytes} bytes"
            )
        messages += [
            _Message(view, peer, first_tag + i)
            for i, view in enumerate(torch.split(tensor, chunk))
            if view.numel()
        ]
    return messages


def _peers(axis: Axis) -> list[int]:
    """Return the other ranks, beginning with the next one, so that not all ranks send to the same
    one first."""
    return [(axis.rank + step) % axis.size for step in range(1, axis.size)]


class _Transfers:
    """The messages that one exchange sends and receives."""

    def __init__(self, axis: Axis, outgoing: list[_Message], incoming: list[_Message]) -> None:
        assert axis.communicator is not None
        self._group: dist.ProcessGroup | None = axis.communicator
        self._outgoing = outgoing
        self._incoming = incoming
        self._receives: list[dist.Work] | None = None
        self._sends: list[dist.Work] = []
        self._error: RuntimeError | None = None
        axis.recorder.transfers.add(self)

    def post_receives(self) -> None:
        """Post the receives, unless they are posted already."""
        if self._receives is None:
            self._receives = self._post(self._connected().recv, self._incoming)

    def start(self) -> None:
        """Post the receives, then the sends."""
        self.post_receives()
        self._sends = self._post(self._connected().send, self._outgoing)

    def _connected(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("a message of an engine that has left its peers")
        return self._group

    def wait_received(self) -> None:
        """Wait until everything is received. Raises the backend's RuntimeError, also one that came
        when the messages were posted."""
        if self._error is not None:
            raise self._error
        assert self._receives is not None, "waited for before it was started"
        for work in self._receives:
            work.wait()
        self._receives = None

    def wait_sent(self) -> None:
        """Wait until the sent tensors may be overwritten."""
        for work in self._sends:
            work.wait()
        self._sends.clear()

    def disconnect(self) -> None:
        """Let go of the group and of its messages. Later messages fail."""
        self._group = None
        self._receives = None
        self._sends = []

    def _post(
        self, post: Callable[[list[Tensor], int, int], dist.Work], messages: Sequence[_Message]
    ) -> list[dist.Work]:
        works = []
        try:
            for message in messages:
                works.append(post([message.view], message.peer, message.tag))
        except RuntimeError as error:
            # A peer that is known to be gone fails here, and a peer that goes later in the wait.
            # Callers should get both errors in one place, the wait.
            self._error = error
        return works


class Gather:
    """``exchange.gather`` over gloo. The own part is in its place in ``full`` when it starts."""

    def __init__(self, full: Tensor, axis: Axis, index: int, chunk_bytes: int) -> None:
        parts = full.chunk(axis.size)
        peers = _peers(axis)
        tag = _first_tag(index, 2)
        outgoing = _messages([(peer, parts[axis.rank]) for peer in peers], tag, chunk_bytes)
        incoming = _messages([(peer, parts[peer]) for peer in reversed(peers)], tag, chunk_bytes)
        self._transfers = _Transfers(axis, outgoing, incoming)

    def start(self) -> None:
        self._transfers.start()

    def wait(self) -> None:
        self._transfers.wait_received()
        self._transfers.wait_sent()


class Transfer:
    """``exchange.transfer`` over gloo."""

    def __init__(
        self,
        outgoing: Sequence[tuple[int, Tensor]],
        incoming: Sequence[tuple[int, Tensor]],
        axis: Axis,
        index: int,
        phase: int,
        chunk_bytes: int,
    ) -> None:
        tag = _first_tag(index, phase)
        self._transfers = _Transfers(
            axis,
            _messages_by_peer(outgoing, tag, chunk_bytes),
            _messages_by_peer(incoming, tag, chunk_bytes),
        )

    def start(self) -> None:
        self._transfers.start()

    def wait(self) -> None:
        self._transfers.wait_received()
        self._transfers.wait_sent()


def _messages_by_peer(
    parts: Sequence[tuple[int, Tensor]], first_tag: int, chunk_bytes: int
) -> list[_Message]:
    """Cut the parts into chunks, whose tags go on from one part to the next one with the same peer.
    Raises ValueError where a peer has more chunks than an exchange has tags."""
    messages = []
    used = dict[int, int]()
    for peer, tensor in parts:
        chunks = _messages([(peer, tensor)], first_tag + used.get(peer, 0), chunk_bytes)
        used[peer] = used.get(peer, 0) + len(chunks)
        if used[peer] > MAX_PIECES:
            raise ValueError(f"{used[peer]} chunks for one peer, of at most {MAX_PIECES}")
        messages += chunks
    return messages


@dataclass(frozen=True)
class ReceivedParts:
    """A receive buffer of reductions. One reduction at a time uses it."""

    received: Tensor
    wide: Tensor
    """Room for one part in the dtype of the sum, where that is not the dtype of the wire; else
    empty."""

    @staticmethod
    def allocate(
        axis: Axis, largest: int, wire: torch.dtype, wide: torch.dtype, count: int
    ) -> list[ReceivedParts]:
        """Make ``count`` buffers for reductions of at most ``largest`` elements."""
        size = -(-largest // axis.size)
        sizes = (axis.size - 1) * size, size * (wire != wide)
        return [
            ReceivedParts(torch.empty(sizes[0], dtype=wire), torch.empty(sizes[1], dtype=wide))
            for _ in range(count)
        ]


def _add_in_rank_order(out: Tensor, parts: Sequence[Tensor], rank: int, wide: Tensor) -> None:
    """Write ``part 0 + part 1 + ...`` to ``out``. The own part, number ``rank``, may be ``out`` and
    is only read; the others are overwritten. ``wide`` has room for a part in the dtype of ``out``,
    where the parts have another one."""
    if parts[0].dtype != out.dtype:
        out.copy_(parts[0])
        for addend in parts[1:]:
            out.add_(wide.copy_(addend))  # add_ alone would allocate the wide copy
        return
    total = parts[0]
    for number, addend in enumerate(parts[1:], start=1):
        # ``out`` may be the own part, so the sum must not be there before the own part is in it.
        # Until then it is in part 0, which was received.
        total = torch.add(total, addend, out=out if number >= rank else parts[0])


class ReduceScatter:
    """``Reductions.scatter`` over gloo. ``full`` [n] has the dtype of the wire, and ``shard``
    [n / size] that of the sum."""

    def __init__(
        self,
        full: Tensor,
        shard: Tensor,
        axis: Axis,
        received: ReceivedParts,
        index: int,
        chunk_bytes: int,
    ) -> None:
        own = full.chunk(axis.size)
        peers = _peers(axis)
        size = shard.numel()
        others = [rank for rank in range(axis.size) if rank != axis.rank]
        addends = {axis.rank: own[axis.rank]} | {
            peer: received.received[i * size : (i + 1) * size] for i, peer in enumerate(others)
        }
        tag = _first_tag(index, 0)
        outgoing = _messages([(peer, own[peer]) for peer in peers], tag, chunk_bytes)
        incoming = _messages([(peer, addends[peer]) for peer in reversed(peers)], tag, chunk_bytes)
        self._transfers = _Transfers(axis, outgoing, incoming)
        self._shard = shard
        self._addends = [addends[rank] for rank in range(axis.size)]
        self._rank = axis.rank
        self._wide = received.wide[:size]

    def start(self) -> None:
        self._transfers.start()

    def wait(self) -> None:
        self._transfers.wait_received()
        _add_in_rank_order(self._shard, self._addends, self._rank, self._wide)
        self._transfers.wait_sent()


class AllReduce:
    """``exchange.all_reduce_exchange`` over gloo: a reduce-scatter, then a gather of the sums.
    ``tensor`` has the wire's dtype, ``wide`` is the dtype of the sum."""

    def __init__(
        self, tensor: Tensor, wide: torch.dtype, axis: Axis, index: int, chunk_bytes: int
    ) -> None:
        size = align_up(-(-tensor.numel() // axis.size), ALIGN)
        cuts = [min(tensor.numel(), rank * size) for rank in range(axis.size + 1)]
        parts = [tensor[cuts[rank] : cuts[rank + 1]] for rank in range(axis.size)]
        own = parts[axis.rank]
        peers = _peers(axis)
        addends = [own if rank == axis.rank else torch.empty_like(own) for rank in range(axis.size)]
        tag = _first_tag(index, 0)
        sums_tag = _first_tag(index, 1)
        self._parts = _Transfers(
            axis,
            _messages([(peer, parts[peer]) for peer in peers], tag, chunk_bytes),
            _messages([(peer, addends[peer]) for peer in reversed(peers)], tag, chunk_bytes),
        )
        self._sums = _Transfers(
            axis,
            _messages([(peer, own) for peer in peers], sums_tag, chunk_bytes),
            _messages([(peer, parts[peer]) for peer in reversed(peers)], sums_tag, chunk_bytes),
        )
        self._own = own
        self._addends = addends
        self._rank = axis.rank
        same = own.dtype == wide
        self._total = own if same else torch.empty_like(own, dtype=wide)
        self._wide = own if same else torch.empty_like(own, dtype=wide)

    def start(self) -> None:
        # These receives overwrite the tensors that the first phase sends. They may be posted now: a
        # peer sends a sum only after it has received all of its parts, ours too.
        self._sums.post_receives()
        self._parts.start()

    def wait(self) -> None:
        self._parts.wait_received()
        _add_in_rank_order(self._total, self._addends, self._rank, self._wide)
        if self._total is not self._own:
            self._own.copy_(self._total)
        self._sums.start()
        self._sums.wait_received()
        self._parts.wait_sent()
        self._sums.wait_sent()
