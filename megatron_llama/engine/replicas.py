"""Compares tensors that several ranks must hold alike, bit by bit, and names the rank that differs:
it may have a faulty memory, device or link.

Whole parameters are compared over the data-parallel ranks (of experts: those that hold the same),
where they stay unsharded after an update. Shards and optimizer state are compared over the replicas
of hybrid sharding, over the tensor-parallel ranks that share a parameter, and over the two ends of
the pipeline where the embedding is tied. A rank sends two numbers for each tensor, and whole
tensors only if those differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_llama.engine.comm.exchange import all_gather_single
from megatron_llama.engine.comm.object_collectives import (
    AGREEMENT,
    all_reduce_max,
    raise_error_on_all_ranks,
)
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.pieces import block_tensors, shard_tensors
from megatron_llama.engine.plan.buckets import ALIGN, BucketKind
from megatron_llama.errors import TrainingError, describe

AXES = ("dp", "dp_replica", "expert_dp", "expert_dp_replica", "tp", "kv", "embedding")
"""The order in which all ranks compare, so that ranks which share several axes cannot deadlock."""
CHUNK = 1 << 20
"""Elements that are converted to int64 at once."""


@dataclass(frozen=True)
class Replicated:
    """A part of a parameter or of its optimizer state that all ranks of an axis must hold alike."""

    axis: Axis
    name: str
    """The name of the parameter."""
    what: str
    """``gathered``, ``master``, or the name of the update rule's state."""
    start: int
    """First element of the parameter."""
    tensor: Tensor
    """Flat, live."""


def has_replicas(engine: OverlappedDistributedOptimizer, mesh: Mesh) -> bool:
    """Whether any rank of the run holds a tensor that another rank must hold alike. Collective, and
    the same on all ranks."""
    any_rank, agreed = all_reduce_max(int(_has_replicas(engine)), mesh.world)
    agreed.wait()
    return bool(any_rank)


def check_replicas(engine: OverlappedDistributedOptimizer, mesh: Mesh, iteration: int) -> None:
    """Compare all tensors that several ranks must hold alike. Collective; waits for the updates of
    the last step.

    Raises TrainingError on every rank if something differs. It names the first such parameter, the
    element and the ranks."""
    engine.settle()
    tensors = list(replicated(engine))
    problems = (
        _difference(
            [tensor for tensor in tensors if tensor.axis.name == name], mesh.device, iteration
        )
        for name in AXES
    )
    # All axes are compared before an error is raised: the ranks of another axis would wait.
    errors = [problem for problem in problems if problem is not None]
    raise_error_on_all_ranks(errors[0] if errors else None, mesh.world)


def replicated(engine: OverlappedDistributedOptimizer) -> Iterator[Replicated]:
    """Yield all tensors that this rank and others hold, in the same order on each. Call ``settle``
    first."""
    for bucket in engine.bucket_plan.buckets:
        kind = bucket.kind
        dp = engine.mesh.data_axes(kind).dp
        if dp.size > 1 and engine.parameters.is_unsharded(bucket.index):
            whole = engine.parameters.unsharded[bucket.index]
            for placed in bucket.placements:
                piece = whole[placed.start : placed.stop]
                yield Replicated(dp, placed.spec.name, "gathered", 0, piece)
        # In one order on all ranks: they compare by position, and names are never sent.
        tensors = shard_tensors(engine, bucket.index)
        of_blocks = block_tensors(engine, bucket.index)
        for axis in _replica_axes(engine, kind):
            shard_rank = engine.shard_rank(bucket.index)
            for segment in engine.bucket_plan.segments(bucket.index, shard_rank):
                stop = segment.in_shard + segment.length
                for what, tensor in tensors.items():
                    piece = tensor[segment.in_shard : stop]
                    yield Replicated(axis, segment.spec.name, what, segment.in_param, piece)
                for what, tensor in of_blocks.items():
                    piece = tensor[segment.in_shard // ALIGN : stop // ALIGN]
                    yield Replicated(axis, segment.spec.name, what, segment.in_param, piece)


def _has_replicas(engine: OverlappedDistributedOptimizer) -> bool:
    """Whether ``replicated`` can yield anything on this rank."""
    return any(
        _replica_axes(engine, bucket.kind)
        or (
            engine.mesh.data_axes(bucket.kind).dp.size > 1
            and engine.bucket_plan.has_own_slot(bucket.index)
        )
        for bucket in engine.bucket_plan.buckets
    )


def _replica_axes(engine: OverlappedDistributedOptimizer, kind: BucketKind) -> list[Axis]:
    """Return the axes whose other ranks hold the same shards of this kind."""
    axes = [engine.mesh.data_axes(kind).replica]
    if kind.copies > 1:
        axes.append(engine.mesh.copies_axis(kind))
    if kind.tied:
        axes.append(engine.mesh.embedding)
    return [axis for axis in axes if axis.size > 1]


def _difference(
    tensors: Sequence[Replicated], device: torch.device, iteration: int
) -> TrainingError | None:
    """Return the error in the tensors of one axis, which all its ranks have in the same order. Some
    tensors may be in the host's memory."""
    if not tensors:
        return None
    axis = tensors[0].axis
    digests = _gathered(
        torch.stack([_digest(tensor.tensor).to(device, non_blocking=True) for tensor in tensors]),
        axis,
        device,
    )
    if bool((digests == digests[:1]).all()):
        return None  # at once: the loop takes seconds for thousands of ranks and tensors
    for number, tensor in enumerate(tensors):
        same: dict[tuple[int, ...], list[int]] = {}
        for position, digest in enumerate(digests[:, number].tolist()):
            same.setdefault(tuple(digest), []).append(position)
        if len(same) > 1:
            return _complaint(tensor, max(same.values(), key=len), iteration, device)
    return None


def _complaint(
    tensor: Replicated, majority: Sequence[int], iteration: int, device: torch.device
) -> TrainingError:
    """Return the error for a tensor that differs. ``majority`` has the positions on the axis whose
    tensors are alike; of two equal groups, that of the lowest position."""
    bits = _bits(tensor.tensor)
    ranks = tensor.axis.ranks
    count = 0
    first_difference: tuple[int, Tensor] | None = None
    # Chunk by chunk: the tensors of all ranks need not fit into the memory of the device.
    for start in range(0, len(bits), CHUNK):
        # NCCL sends no 16-bit integers.
        values = _gathered(bits[start : start + CHUNK].to(torch.int64), tensor.axis, device)
        differs = (values != values[majority[0]]).any(dim=0)
        count += int(differs.sum())
        if first_difference is None and bool(differs.any()):
            first = int(differs.nonzero()[0])
            first_difference = start + first, values[:, first].to(bits.dtype)
    assert first_difference is not None, "digests differ, and so do values"
    place, odd_values = first_difference
    odd = [
        position
        for position in range(tensor.axis.size)
        if odd_values[position] != odd_values[majority[0]]
    ]
    shown = odd_values.view(tensor.tensor.dtype).tolist()
    wrong = ", ".join(f"{shown[position]:.9g} on rank {ranks[position]}" for position in odd)
    where = (
        f"{tensor.name} ({tensor.what}) at iteration {iteration}, element {tensor.start + place}"
    )
    agreeing = ", ".join(str(ranks[position]) for position in majority)
    expected = f"{shown[majority[0]]:.9g} as on rank {agreeing}, over {tensor.axis.name}"
    do = (
        "look for a faulty memory, device or link there; "
        "resume from a checkpoint, on other machines"
    )
    return TrainingError(
        describe(where, got=f"{wrong} ({count} elements differ)", expected=expected, do=do)
    )


def _bits(tensor: Tensor) -> Tensor:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(-1).view(integers[tensor.element_size()])


def _digest(tensor: Tensor) -> Tensor:
    """Return two sums over the bits, modulo 2^64: of the values, which changes with any single
    element, and of values times places, which changes when elements are exchanged."""
    plain, placed = (torch.zeros((), dtype=torch.int64, device=tensor.device) for _ in range(2))
    for number, chunk in enumerate(torch.split(_bits(tensor), CHUNK)):
        values = chunk.to(torch.int64)
        plain += values.sum()
        places = torch.arange(number * CHUNK, number * CHUNK + len(values), device=tensor.device)
        placed += (values * (2 * places + 1)).sum()  # an odd factor loses no bit modulo 2^64
    return torch.stack([plain, placed])


def _gathered(tensor: Tensor, axis: Axis, device: torch.device) -> Tensor:
    """Return the tensors of all ranks, [size, *shape], on the host."""
    # An axis carries tensors on the device; only the group of all ranks has a backend for the host.
    local = tensor.to(device)
    gathered = local.new_empty((axis.size * local.shape[0], *local.shape[1:]))
    with axis.recorder.waiting(AGREEMENT):
        all_gather_single(gathered, local, group=axis.communicator)
    return gathered.cpu().view(axis.size, *local.shape)
