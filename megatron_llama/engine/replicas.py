"""Are replicas still replicas? Ranks that must hold the same bits compare them, and say who does
not (a faulty memory or link).

Compared are whole parameters over the data-parallel ranks, where they stay in place after an
update; shards and optimizer state over the replicas of hybrid sharding, over the tensor-parallel
ranks that share a parameter, and over the two ends of the pipeline where the embedding is tied. A
rank sends two numbers for each tensor, and whole tensors only where those differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_llama.distributed.comm.collectives import all_gather_single
from megatron_llama.distributed.comm.object_collectives import AGREEMENT, raise_error_on_all_ranks
from megatron_llama.distributed.mesh import Axis, Mesh
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer, Replicated
from megatron_llama.errors import TrainingError, describe

AXES = ("dp", "dp_replica", "tp", "kv", "embedding")
"""In which all ranks compare, so that those who meet on several axes meet in one order."""
CHUNK = 1 << 20
"""Elements that are widened at once."""


def check_replicas(engine: OverlappedDistributedOptimizer, mesh: Mesh, iteration: int) -> None:
    """Compare everything that some ranks must hold alike. Collective; waits for the updates of the
    last step.

    Raises TrainingError on every rank, naming the first parameter that differs, where it does, and
    the ranks."""
    engine.settle()
    found = list(engine.replicated())
    problems = (
        _difference([one for one in found if one.axis.name == name], mesh.device, iteration)
        for name in AXES
    )
    # All axes are compared before anybody leaves: their ranks are others.
    errors = [problem for problem in problems if problem is not None]
    raise_error_on_all_ranks(errors[0] if errors else None, mesh.world)


def _difference(
    tensors: Sequence[Replicated], device: torch.device, iteration: int
) -> TrainingError | None:
    """Of the tensors of one axis, which all its ranks have in the same order. Some may be in the
    host's memory."""
    if not tensors:
        return None
    axis = tensors[0].axis
    digests = _gathered(
        torch.stack([_digest(one.tensor).to(device, non_blocking=True) for one in tensors]), axis
    )
    for number, one in enumerate(tensors):
        same: dict[tuple[int, ...], list[int]] = {}
        for position, digest in enumerate(digests[:, number].tolist()):
            same.setdefault(tuple(digest), []).append(position)
        if len(same) > 1:
            return _complaint(one, max(same.values(), key=len), iteration)
    return None


def _complaint(one: Replicated, majority: Sequence[int], iteration: int) -> TrainingError:
    """``majority``: positions on the axis whose tensors are alike; the lower ones where there are
    as many others."""
    values = _gathered(_bits(one.tensor), one.axis)
    ranks = one.axis.ranks
    differs = (values != values[majority[0]]).any(dim=0)
    place = int(differs.nonzero()[0])
    odd = [position for position in range(one.axis.size) if position not in majority]
    shown = values[:, place].contiguous().view(one.tensor.dtype).tolist()
    wrong = ", ".join(f"{shown[position]:.9g} on rank {ranks[position]}" for position in odd)
    where = f"{one.name} ({one.what}) at iteration {iteration}, element {one.start + place}"
    expected = f"{shown[majority[0]]:.9g} as on rank {', '.join(str(ranks[position]) for position in majority)}, over {one.axis.name}"
    do = "look for a faulty memory, device or link there; resume from a checkpoint, on other machines"
    return TrainingError(
        describe(
            where, got=f"{wrong} ({int(differs.sum())} elements differ)", expected=expected, do=do
        )
    )


def _bits(tensor: Tensor) -> Tensor:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(-1).view(integers[tensor.element_size()])


def _digest(tensor: Tensor) -> Tensor:
    """Two sums over the bits, modulo 2^64: as they are, which sees any single change, and by place,
    which sees exchanges."""
    plain, placed = (torch.zeros((), dtype=torch.int64, device=tensor.device) for _ in range(2))
    for number, chunk in enumerate(torch.split(_bits(tensor), CHUNK)):
        wide = chunk.to(torch.int64)
        plain += wide.sum()
        places = torch.arange(number * CHUNK, number * CHUNK + wide.numel(), device=tensor.device)
        placed += (wide * (2 * places + 1)).sum()  # odd factors lose no bit
    return torch.stack([plain, placed])


def _gathered(tensor: Tensor, axis: Axis) -> Tensor:
    """Everybody's tensor, [size, *shape], on the host."""
    own = tensor.cpu()
    found = own.new_empty((axis.size * own.shape[0], *own.shape[1:]))
    with axis.recorder.waiting(AGREEMENT):
        all_gather_single(found, own, group=axis.group)
    return found.view(axis.size, *own.shape)
