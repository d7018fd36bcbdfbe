"""Errors and flags that all ranks must know of together: one rank that leaves alone makes the others hang."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_llama.comm.collectives import Pending
from megatron_llama.errors import UserError
from megatron_llama.mesh import Axis


def largest(value: int, axis: Axis) -> tuple[torch.Tensor, Pending]:
    """Start finding the largest of a small integer over the ranks; the tensor is valid after the wait.

    On the host's own backend, so that asking never waits for a device."""
    found = torch.tensor(value)
    work = dist.all_reduce(found, dist.ReduceOp.MAX, group=axis.group, async_op=True) if axis.size > 1 else None
    return found, Pending(axis, work)


def raise_together(error: UserError | None, axis: Axis) -> None:
    """If any rank has an error, every rank raises it: the first rank's, named, with a count of the others. Collective."""
    if axis.size == 1:
        if error is not None:
            raise error
        return
    found: list[UserError | None] = [None] * axis.size
    dist.all_gather_object(found, error, group=axis.group)
    failed = [(rank, one) for rank, one in enumerate(found) if one is not None]
    if failed:
        raise _common(failed, axis.size)


def _common(failed: list[tuple[int, UserError]], size: int) -> UserError:
    rank, first = failed[0]
    text = str(first)
    if len(failed) < size or any(str(error) != text for _, error in failed):
        others = f" ({len(failed)} of {size} ranks failed)" if len(failed) > 1 else ""
        text = f"rank {rank}: {text}{others}"
    common = type(first)(text)
    common.everywhere = True
    return common


@contextmanager
def together(axis: Axis) -> Iterator[None]:
    """A section in which user errors of any rank become errors of all. Nothing inside may be collective."""
    error = None
    try:
        yield
    except UserError as caught:
        error = caught
    raise_together(error, axis)
