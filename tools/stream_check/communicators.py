"""Process groups that send nothing and note what NCCL would do.

A collective runs on the stream of its communicator, after what the current stream has been given;
``wait`` makes the current stream wait for it. With ``async_op=False`` it runs on the current stream
itself (torch since 2.8). A message between two ranks outside of a batch has a communicator for the
pair, and so a stream. Every tensor lives until its ``Work`` is waited for. What a peer would send
is the rank's own values, or zeros. Tensors of the host travel over gloo, whose ``wait`` blocks the
host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.shard import data_mesh as data_meshes
from megatron_llama.engine.shard import peers
from megatron_llama.launch import mesh as meshes
from tools.stream_check.events import Line, Memory
from tools.stream_check.recording import Recording, RecordingError

BACKEND = "recording"
UNSENT = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})
"""Types that ProcessGroupNCCL refuses."""
WORLD = "world"
"""The only group that has gloo besides NCCL."""


class RecordedWork:
    """A message under way."""

    def __init__(
        self, recording: Recording, token: int, tensors: Sequence[Tensor], *, blocks: bool
    ) -> None:
        self._recording = recording
        self._token = token
        # torch's watch keeps the tensors of a message that nobody waits for until it has ended.
        recording.messages[token] = tensors
        self._blocks = blocks

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait, or over gloo the host."""
        recording = self._recording
        if not recording.skips():
            recording.wait(recording.thread if self._blocks else recording.stream.line, self._token)
        self._recording.messages.pop(self._token, None)
        return True

    def is_completed(self) -> bool:
        """Return True, as if it had been waited for."""
        self.wait()
        return True


_ProcessGroup: Any = dist.ProcessGroup
"""Untyped, because torch's overloads have a form with and one without options."""


class RecordedGroup(_ProcessGroup):  # type: ignore[misc]
    """The group of one rank."""

    def __init__(self, recording: Recording, name: str, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._recording = recording
        self._name = name
        self._group_name = ""
        self._lines: dict[str, Line] = {}
        self._count = 0
        self.options = SimpleNamespace(_timeout=timedelta(minutes=30))
        self.pair_of_batch: str | None = None
        """The communicator of messages inside of a batch; None: there is none."""

    @property
    def group_name(self) -> str:
        """What ``torch.distributed`` calls it. torch's own class forgets that without backends."""
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def name(self) -> str:
        return BACKEND

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> RecordedGroup:
        return self

    def _line(self, key: str) -> Line:
        if key not in self._lines:
            self._lines[key] = self._recording.line(key, is_thread=False)
        return self._lines[key]

    def _do(
        self,
        operation: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        perform: Callable[[], object],
        *,
        is_async: bool = True,
        pair: str = "",
    ) -> RecordedWork:
        recording = self._recording
        tensors = [*reads, *writes]
        over_gloo = recording.memory(tensors[0]) is not Memory.DEVICE
        if over_gloo and self._name != WORLD:
            raise RecordingError(
                f"{operation} of the host's memory on {self._name} at {recording.site()}: "
                "on a device an axis has NCCL alone"
            )
        unknown = {tensor.dtype for tensor in tensors} & UNSENT
        if unknown and not over_gloo:
            raise RecordingError(f"{operation} of {unknown} on {self._name}: NCCL has no such type")
        issuer = recording.thread if over_gloo else recording.stream.line
        kind = "gloo" if over_gloo else "communicator"
        line = self._line(f"{kind} {self._name}{pair}") if is_async or over_gloo else issuer
        text = f"{operation} {self._count} on {self._name}"
        self._count += 1
        if line != issuer:
            recording.wait(line, recording.signal(issuer))
        for tensor in reads:
            recording.access(line, text, tensor, writes=False)
        for tensor in writes:
            recording.access(line, text, tensor, writes=True)
        with recording.unseen():
            perform()
        return RecordedWork(recording, recording.signal(line), tensors, blocks=over_gloo)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> RecordedWork:
        return self._do(
            "all_reduce", tensors, tensors, lambda: None, is_async=getattr(opts, "asyncOp", True)
        )

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> RecordedWork:
        return self._do(
            "broadcast", tensors, tensors, lambda: None, is_async=getattr(opts, "asyncOp", True)
        )

    def _allgather_base(self, full: Tensor, shard: Tensor, opts: Any = None) -> RecordedWork:
        def perform() -> None:
            own = shard.clone().view(-1)
            for part in full.view(-1).chunk(self.size()):
                part.copy_(own)

        return self._do(
            "all_gather", [shard], [full], perform, is_async=getattr(opts, "asyncOp", True)
        )

    def all_gather_single(self, full: Tensor, shard: Tensor, opts: Any = None) -> RecordedWork:
        return self._allgather_base(full, shard, opts)

    def allgather(
        self, full: list[list[Tensor]], shards: list[Tensor], opts: Any = None
    ) -> RecordedWork:
        def perform() -> None:
            for part in full[0]:
                part.copy_(shards[0])

        return self._do("all_gather", shards, full[0], perform)

    def _reduce_scatter_base(self, shard: Tensor, full: Tensor, opts: Any = None) -> RecordedWork:
        def perform() -> None:
            shard.copy_(full.view(-1).chunk(self.size())[self.rank()].clone().view(shard.shape))

        return self._do(
            "reduce_scatter", [full], [shard], perform, is_async=getattr(opts, "asyncOp", True)
        )

    def reduce_scatter_single(self, shard: Tensor, full: Tensor, opts: Any = None) -> RecordedWork:
        return self._reduce_scatter_base(shard, full, opts)

    def alltoall_base(
        self, received: Tensor, sent: Tensor, out_split: Any, in_split: Any, opts: Any = None
    ) -> RecordedWork:
        return self._do(
            "all_to_all",
            [sent],
            [received],
            lambda: received.copy_(sent),
            is_async=getattr(opts, "asyncOp", True),
        )

    def all_to_all_single(
        self, received: Tensor, sent: Tensor, out_split: Any, in_split: Any, opts: Any = None
    ) -> RecordedWork:
        return self.alltoall_base(received, sent, out_split, in_split, opts)

    def _pair(self, peer: int) -> str:
        if self.pair_of_batch is not None:
            return self.pair_of_batch
        low, high = sorted((self.rank(), peer))
        return f" {low}:{high}"

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> RecordedWork:
        return self._do("send", tensors, [], lambda: None, pair=self._pair(peer))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> RecordedWork:
        return self._do("receive", [], tensors, tensors[0].zero_, pair=self._pair(peer))


@contextmanager
def process_group(recording: Recording, rank: int, world_size: int) -> Iterator[None]:
    """A default process group of recorded communicators, and ``new_group`` for more, which have the
    names of the mesh's axes."""
    name = [WORLD]

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> RecordedGroup:
        return RecordedGroup(recording, name[0], rank, size)

    def naming(build: Callable[..., Any], position: int) -> Callable[..., Any]:
        def build_named(*arguments: Any, **options: Any) -> Any:
            name[0] = arguments[position]
            return build(*arguments, **options)

        return build_named

    batch = dist.batch_isend_irecv

    def batched(operations: list[Any]) -> Any:
        # One batch is one launch on the communicator of the whole group.
        group = operations[0].group
        group.pair_of_batch = ""
        try:
            return batch(operations)
        finally:
            group.pair_of_batch = None

    def require_gloo(group: RecordedGroup | None) -> None:
        if group is not None and group._name != WORLD:
            raise RecordingError(f"Python values on {group._name}: on a device it has NCCL alone")

    def all_gather_object(found: list[Any], value: Any, group: RecordedGroup | None = None) -> None:
        require_gloo(group)
        found[:] = [value] * len(found)

    def broadcast_object_list(
        values: list[Any], *, group: RecordedGroup | None = None, group_src: int = 0
    ) -> None:
        require_gloo(group)

    if world_size == 1:
        yield
        return
    # Registered anew each time, because the name of a backend lives as long as the process.
    dist.Backend._plugins.pop(BACKEND.upper(), None)
    if hasattr(dist.Backend, BACKEND.upper()):
        delattr(dist.Backend, BACKEND.upper())
    dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
    dist.init_process_group(BACKEND, store=HashStore(), rank=rank, world_size=world_size)
    try:
        with (
            patch.object(meshes._AxisBuilder, "build", naming(meshes._AxisBuilder.build, 1)),
            patch.object(data_meshes, "_axis", naming(data_meshes._axis, 0)),
            patch.object(meshes._AxisBuilder, "_options", lambda self, axis: None),
            patch.object(data_meshes, "communicator_options", lambda *arguments, **options: None),
            patch.object(devices, "axis_backend", lambda device: BACKEND),
            patch.object(devices, "backend", lambda device: BACKEND),
            patch.object(dist, "batch_isend_irecv", batched),
            # Python values travel over the host's backend, pickled: no memory of a step is in them.
            patch.object(dist, "all_gather_object", all_gather_object),
            patch.object(dist, "broadcast_object_list", broadcast_object_list),
            # It waits for other ranks, and touches no memory.
            patch.object(peers, "_look", lambda *arguments: None),
        ):
            yield
    finally:
        dist.destroy_process_group()
