"""NCCL's rules for messages, kept by threads over gloo, so that an order that would hang on GPUs hangs on a host, and is named.

- A communicator runs one operation at a time, to its end, in the order in which its rank issued them.
- It is made at its first use, where the caller waits until all its ranks have come: a group's for collectives and batches, one of two
  ranks for each pair that sends without a batch (``ProcessGroupNCCL::pointToPoint``, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).
- Messages have no tags: the k-th operation of one rank is met by the k-th of the others. One that does not fit would hang on NCCL.
- A send ends when its receive runs.
- Issuing never waits after the first use. ``wait`` makes the caller wait, where on a GPU its stream would: the host is the stream here.

``installed`` puts it in the place of torch.distributed in the modules that send tensors of the device, which take the ways that they take
on a GPU: communicators of their own for gathers, collectives of the backend, everything issued by the thread that computes
(``build_optimizer(inline=True)``). Values of the host stay on gloo, as on a GPU."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron_llama.engine import build as engine_build
from megatron_llama.engine.comm import collectives, exchange, groups, p2p
from megatron_llama.engine.comm import device as devices
from megatron_llama.launch import mesh as meshes
from megatron_llama.pipeline import build as pipeline_build
from torch import Tensor

HEADER = 160
"""Bytes in which an operation says what it is."""
FIRST, SAYS, DATA = range(3)
"""Tags of gloo's messages underneath."""


class HangError(AssertionError):
    """NCCL would wait for ever. The message says for what this rank does."""


@dataclass
class Work:
    """An operation that was issued."""

    name: str
    communicator: Communicator
    perform: Callable[[], None]
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end. Raises HangError."""
        # Longer than the operation itself, which knows better what it waits for.
        if not self.done.wait(2 * self.communicator.seconds):
            raise HangError(f"rank {self.communicator.me} waits for {self}, which has not begun")
        if self.error is not None:
            raise HangError(str(self.error)) from self.error
        return True

    def __str__(self) -> str:
        return f"{self.name} on {self.communicator.name}"


class Communicator:
    """Of some ranks of a gloo group: a thread runs what is issued."""

    def __init__(self, group: Any, ranks: Sequence[int], seconds: float, operation: str) -> None:
        """``ranks``: positions in the group. Waits until all of them have come."""
        self.group, self.ranks, self.seconds = group, tuple(ranks), seconds
        everyone = dist.get_process_group_ranks(group)
        self.me, self.rank = dist.get_rank(), dist.get_group_rank(group, dist.get_rank())
        self.name = f"{group.group_desc} of ranks {', '.join(str(everyone[rank]) for rank in self.ranks)}"
        self._works = queue.SimpleQueue[Work | None]()
        self._compare(FIRST, "first use", f"the first use of {self.name}, in {operation}")
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def issue(self, name: str, perform: Callable[[], None]) -> Work:
        """Have an operation run after those that were issued before."""
        work = Work(name, self, perform)
        self._works.put(work)
        return work

    def close(self) -> None:
        self._works.put(None)
        self._thread.join()

    def _run(self) -> None:
        stuck: BaseException | None = None  # what comes after an operation that never ends waits for it too
        while (work := self._works.get()) is not None:
            try:
                if stuck is None:
                    self._compare(SAYS, _fitting(work.name), str(work))
                    work.perform()
            except RuntimeError as error:
                stuck = HangError(f"rank {self.me} waits for {work}: {error}")
            except HangError as error:
                stuck = error
            work.error = stuck
            work.done.set()

    def _compare(self, tag: int, said: str, where: str) -> None:
        """Wait until all ranks are here, and see that they are here for the same."""
        mine = torch.zeros(HEADER, dtype=torch.uint8)
        text = said.encode()[:HEADER]
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        theirs = {rank: torch.zeros_like(mine) for rank in self.ranks if rank != self.rank}
        # All ranks of the communicator exchange their words directly, whether it is a whole group or a pair.
        works = [self.group.recv([heard], rank, tag) for rank, heard in theirs.items()]
        works += [self.group.send([mine], rank, tag) for rank in theirs]
        try:
            for work in works:
                work.wait(timedelta(seconds=self.seconds))
        except RuntimeError as error:
            raise HangError(f"rank {self.me} waits for {where}") from error
        for rank, heard in theirs.items():
            if not torch.equal(heard, mine):
                other = bytes(heard.tolist()).rstrip(b"\0").decode()
                peer = dist.get_process_group_ranks(self.group)[rank]
                raise HangError(f"rank {self.me} waits for {where}, while rank {peer} is in an operation that fits {other}")

    def all_values(self, own: Tensor) -> list[Tensor]:
        """The tensor of every rank, for operations that run in the thread."""
        values = [own if rank == self.rank else torch.empty_like(own) for rank in range(len(self.ranks))]
        works = [self.group.recv([value], rank, DATA) for rank, value in enumerate(values) if rank != self.rank]
        works += [self.group.send([own], rank, DATA) for rank in self.ranks if rank != self.rank]
        for work in works:
            work.wait(timedelta(seconds=self.seconds))
        return values


def _fitting(name: str) -> str:
    """What both ends of an operation call it: a send and its receive are one message."""
    return name.removeprefix("send ").removeprefix("receive ")


REDUCED = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.MIN: torch.minimum}


class Transport:
    """Takes the place of ``torch.distributed``."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: after so many a rank that waits says for what. Collective."""
        self._seconds = seconds
        self._made: dict[tuple[Any, tuple[int, ...]], Communicator] = {}
        # Values of the host use the group of all ranks at the same time, as gloo does beside NCCL.
        self._world = dist.new_group(group_desc="world") if dist.is_initialized() else None

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def close(self) -> None:
        for communicator in self._made.values():
            communicator.close()

    def _communicator(self, group: Any, ranks: Sequence[int] | None, operation: str) -> Communicator:
        own = self._world if group is dist.group.WORLD else group
        key = own, tuple(range(own.size())) if ranks is None else tuple(sorted(ranks))
        if key not in self._made:
            self._made[key] = Communicator(*key, self._seconds, operation)
        return self._made[key]

    def _collective(self, name: str, group: Any, async_op: bool, perform: Callable[[Communicator], None]) -> Work | None:
        communicator = self._communicator(group, None, name)
        work = communicator.issue(name, lambda: perform(communicator))
        return work if async_op or not work.wait() else None

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, *, group: Any, async_op: bool = False) -> Work | None:
        def perform(communicator: Communicator) -> None:
            first, *others = communicator.all_values(tensor.clone())
            for other in others:
                first = REDUCED[op](first, other)
            tensor.copy_(first)

        return self._collective(f"all_reduce of {_kind(tensor)}", group, async_op, perform)

    def all_gather_single(self, full: Tensor, shard: Tensor, *, group: Any, async_op: bool = False) -> Work | None:
        def perform(communicator: Communicator) -> None:
            full.copy_(torch.cat([value.flatten() for value in communicator.all_values(shard.clone())]).view_as(full))

        return self._collective(f"all_gather to {_kind(full)}", group, async_op, perform)

    def reduce_scatter_single(self, shard: Tensor, full: Tensor, *, group: Any, async_op: bool = False) -> Work | None:
        def perform(communicator: Communicator) -> None:
            parts = [value.flatten().chunk(len(communicator.ranks))[communicator.rank] for value in communicator.all_values(full.clone())]
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            shard.copy_(total.view_as(shard))

        return self._collective(f"reduce_scatter of {_kind(full)}", group, async_op, perform)

    def all_to_all_single(
        self, received: Tensor, sent: Tensor, incoming: Any = None, outgoing: Any = None, *, group: Any, async_op: bool = False
    ) -> Work | None:
        def perform(communicator: Communicator) -> None:
            me, sizes = communicator.rank, (len(communicator.ranks),) * 2
            theirs, ours = (
                whole.chunk(size) if parts is None else whole.split(parts)
                for whole, parts, size in zip((received, sent), (incoming, outgoing), sizes, strict=True)
            )
            theirs[me].copy_(ours[me])
            # Of nothing neither end of a link says anything, as in NCCL.
            works = [communicator.group.recv([part], rank, DATA) for rank, part in enumerate(theirs) if rank != me and part.numel()]
            works += [communicator.group.send([part], rank, DATA) for rank, part in enumerate(ours) if rank != me and part.numel()]
            for work in works:
                work.wait(timedelta(seconds=self._seconds))

        # Ranks have sizes of their own where parts differ.
        kind = _kind(sent) if outgoing is None else f"parts in {sent.dtype}"
        return self._collective(f"all_to_all of {kind}", group, async_op, perform)

    def isend(self, tensor: Tensor, *, group: Any, group_dst: int) -> Work:
        name = f"send message of {_kind(tensor)} from {group.rank()} to {group_dst}"
        communicator = self._communicator(group, (group.rank(), group_dst), name)
        seconds = timedelta(seconds=self._seconds)
        return communicator.issue(name, lambda: group.send([tensor], group_dst, DATA).wait(seconds))

    def irecv(self, tensor: Tensor, *, group: Any, group_src: int) -> Work:
        name = f"receive message of {_kind(tensor)} from {group_src} to {group.rank()}"
        communicator = self._communicator(group, (group.rank(), group_src), name)
        seconds = timedelta(seconds=self._seconds)
        return communicator.issue(name, lambda: group.recv([tensor], group_src, DATA).wait(seconds))

    def P2POp(self, op: Any, tensor: Tensor, *, group: Any, group_peer: int) -> tuple[bool, Tensor, Any, int]:
        return op == self.isend, tensor, group, group_peer

    def batch_isend_irecv(self, batch: list[tuple[bool, Tensor, Any, int]]) -> list[Work]:
        group, seconds = batch[0][2], timedelta(seconds=self._seconds)

        def perform(communicator: Communicator) -> None:
            works = [(group.send if sends else group.recv)([tensor], peer, DATA) for sends, tensor, _, peer in batch]
            for work in works:
                work.wait(seconds)

        # Each pair of ranks has sizes of its own: gloo refuses a message that does not fit.
        work = self._collective("messages to neighbours", group, True, perform)
        assert work is not None
        return [work]


def _kind(tensor: Tensor) -> str:
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"


@contextmanager
def installed(seconds: float = 60.0) -> Iterator[Transport]:
    """A section in which tensors of the device travel by NCCL's rules. Collective."""
    transport = Transport(seconds)
    with ExitStack() as patches:
        for module in (meshes, groups, collectives, exchange, p2p):
            patches.enter_context(mock.patch.object(module, "dist", transport))
        for module in (collectives, exchange):
            for name in ("all_gather_single", "reduce_scatter_single"):
                patches.enter_context(mock.patch.object(module, name, getattr(transport, name)))
        for module in (collectives, exchange, engine_build, pipeline_build):
            patches.enter_context(mock.patch.object(module, "carried_by_gloo", lambda axis, device: False))
        patches.enter_context(mock.patch.object(devices, "one_connection_per_peer", lambda device: False))
        yield transport
        transport.close()
