"""The axes of a process: the groups of processes that share something with it.

The engine's caller makes its ``Mesh``: ``launch/mesh.py`` for the trainer's grid,
``engine/shard/data_mesh.py`` for a user's model. Nothing here joins the world or makes a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_llama.engine.comm.recorder import Recorder

if TYPE_CHECKING:  # plans name no process
    from megatron_llama.engine.plan.buckets import BucketKind


@dataclass(frozen=True)
class Axis:
    """The processes along one dimension of the mesh. An axis of size 1 has no group, and its
    collectives do nothing."""

    name: str
    rank: int
    ranks: tuple[int, ...]
    """Global ranks, in axis order."""
    group: dist.ProcessGroup | None
    recorder: Recorder

    @property
    def size(self) -> int:
        """Number of processes."""
        return len(self.ranks)

    @property
    def communicator(self) -> dist.ProcessGroup | None:
        """The group for the next message; None for an axis of size 1. Raises RuntimeError after
        ``close_data_mesh``: with the group that remains then, torch's collectives do nothing, warn,
        and return as if they had sent."""
        gone: object = dist.GroupMember.NON_GROUP_MEMBER
        if self.group is gone:
            raise RuntimeError(f"the communicator of {self.name} has ended")
        return self.group


@dataclass(frozen=True)
class DataAxes:
    """The data-parallel axes of a bucket: of all ranks that hold its weights."""

    dp: Axis
    shard: Axis
    replica: Axis
    gather: Axis

    @property
    def all(self) -> tuple[Axis, ...]:
        """All of them, in one order on every rank."""
        return self.dp, self.shard, self.replica, self.gather


@dataclass(frozen=True)
class Mesh:
    """This process's position on every axis."""

    world: Axis
    tp: Axis
    kv: Axis
    """The tensor-parallel ranks that hold copies of the same key/value head, if these are more than
    one and not all of ``tp``; else size 1."""
    cp: Axis
    """The ranks that share sequences."""
    dp: Axis
    """All ranks that hold the same weights: the data-parallel and the context-parallel ones.
    Shards and reductions span both."""
    dp_shard: Axis
    """The ranks of ``dp`` over which a bucket is sharded, for its reductions: all of them, some
    neighbours (hybrid sharding), or one."""
    dp_replica: Axis
    """The ranks of ``dp`` that hold the same shard."""
    dp_gather: Axis
    """The ranks of ``dp_shard``, for gathers. On a device they have a communicator of their own,
    so that gathers and reductions run concurrently."""
    pp: Axis
    pp_backward: Axis
    """The ranks of ``pp`` with a communicator of their own, so that gradients never queue behind
    activations."""
    embedding: Axis
    """The first and the last pipeline rank, for tied embeddings; size 1 on the ranks between."""
    device: torch.device
    recorder: Recorder = field(repr=False)
    pp_return: Axis | None = None
    pp_backward_return: Axis | None = None
    """With virtual stages: transfers against the usual direction of ``pp`` and ``pp_backward``."""
    cp_heads: Axis | None = None
    """The ranks of ``cp`` that exchange parts of the sequence for parts of the heads before
    attention, and back behind it (``head_exchange.py``). None: keys and values travel instead."""
    cp_keys: Axis | None = None
    """With ``cp_heads``: the ranks of ``cp`` that hold the same heads of other parts of the
    sequence. Keys and values travel between them."""
    ep: Axis | None = None
    """Neighbouring data-parallel ranks that divide the experts of a block among them. None: each
    rank has all experts."""
    exchanges_tokens: bool = False
    """With ``ep``: whether a token travels only to the ranks that have some of its experts, and not
    to all."""
    experts: DataAxes | None = None
    """With ``ep``: the ranks of ``dp`` that hold the same experts."""
    made: tuple[dist.ProcessGroup, ...] = field(default=(), repr=False)
    """The groups that ``close_data_mesh`` ends, in this order: those that ``data_mesh`` and
    ``add_shard_axes`` have made."""

    def link(self, sender: int, receiver: int, *, backward: bool) -> Axis:
        """Return the communicator for transfers from one pipeline rank to another: there is one for
        each kind of tensor and each direction."""
        # NCCL runs the operations of one communicator in the order of their issue. Two ranks that
        # each first wait to receive from the other would wait forever.
        usual = (sender < receiver) is not backward
        if backward:
            axis = self.pp_backward if usual else self.pp_backward_return
        else:
            axis = self.pp if usual else self.pp_return
        assert axis is not None, "only virtual stages send against the usual direction"
        return axis

    def data_axes(self, kind: BucketKind) -> DataAxes:
        """Return the axes along which a bucket is sharded, reduced and gathered."""
        if kind.ep == 1:
            return DataAxes(self.dp, self.dp_shard, self.dp_replica, self.dp_gather)
        assert self.experts is not None, "parameters of experts without ranks that divide them"
        return self.experts

    def copies_axis(self, kind: BucketKind) -> Axis:
        """Return the axis of the ranks that hold copies of a kind's parameters."""
        return self.tp if kind.copies == self.tp.size else self.kv

    def is_primary(self, kind: BucketKind) -> bool:
        """Whether this rank counts a shard, or writes it to a checkpoint, for all ranks that hold
        it."""
        copies = [self.data_axes(kind).replica.rank, self.tp.rank % kind.copies]
        if kind.tied:
            copies.append(self.embedding.rank)
        return not any(copies)

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.world.rank

    @property
    def data_rank(self) -> int:
        """The number of the share of a global batch that this process reads. Context-parallel ranks
        read the same samples."""
        return self.dp.rank // self.cp.size

    @property
    def data_size(self) -> int:
        """The number of shares of a global batch."""
        return self.dp.size // self.cp.size

    @staticmethod
    def single(device: torch.device | None = None) -> Mesh:
        """Return the mesh of one process, without process groups."""
        recorder = Recorder()

        def alone(name: str) -> Axis:
            return Axis(name, 0, (0,), None, recorder)

        dp = alone("dp")
        return Mesh(
            world=alone("world"),
            tp=alone("tp"),
            kv=alone("kv"),
            cp=alone("cp"),
            dp=dp,
            dp_shard=dp,
            dp_replica=dp,
            dp_gather=alone("dp_gather"),
            pp=alone("pp"),
            pp_backward=alone("pp_backward"),
            embedding=alone("embedding"),
            device=device or torch.device("cpu"),
            recorder=recorder,
        )
