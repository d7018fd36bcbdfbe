"""Collectives of Python values and of errors, over the host's backend.

A rank that leaves alone makes the others hang in their next collective. So an error that only one
rank can see (a file, a sample) becomes an error of all ranks before any rank acts on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_llama.engine.comm.collectives import Pending
from megatron_llama.engine.comm.exchange import all_gather_single
from megatron_llama.engine.mesh import Axis
from megatron_llama.errors import UserError

T = TypeVar("T")
AGREEMENT = "what other ranks have to say"
"""The wait that a hang report names for a rank in one of these functions."""
MEETING_SECONDS = 1.0
"""Interval at which ranks meet that wait for something other than a message. So no rank waits
longer in a collective, and all learn when a rank is gone."""


def all_reduce_max(value: int, axis: Axis) -> tuple[torch.Tensor, Pending]:
    """Start finding the largest of an integer over the ranks. The tensor (0-dim) is valid after
    the wait.

    It lives on the host, so that asking never waits for a device."""
    largest = torch.tensor(value)
    work = (
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=axis.communicator, async_op=True)
        if axis.size > 1
        else None
    )
    return largest, Pending(axis, work, operation="agreement")


def all_gather_float(value: float, axis: Axis) -> list[float]:
    """Return the numbers of all ranks, in rank order, on every rank. Collective.

    Cheaper than ``all_gather_object``: one message of known size, nothing pickled."""
    values = torch.full((axis.size,), value, dtype=torch.float64)
    if axis.size > 1:
        with axis.recorder.waiting(AGREEMENT):
            own = values[axis.rank : axis.rank + 1].clone()
            all_gather_single(values, own, group=axis.communicator)
    return values.tolist()


def sum_over_ranks(values: torch.Tensor, axis: Axis) -> None:
    """Add up a tensor on the host over all ranks, in place. Collective."""
    if axis.size > 1:
        with axis.recorder.waiting(AGREEMENT):
            dist.all_reduce(values, group=axis.communicator)


def gather_object(value: T, axis: Axis) -> list[T] | None:
    """Return the picklable value of every rank, in rank order, on the first rank of the axis; None
    on the others. Collective."""
    if axis.size == 1:
        return [value]
    found: list[Any] | None = [None] * axis.size if axis.rank == 0 else None
    with axis.recorder.waiting(AGREEMENT):
        dist.gather_object(value, found, group=axis.communicator, group_dst=0)
    return found


def all_gather_object(value: T, axis: Axis) -> list[T]:
    """Return the picklable value of every rank, in rank order, on all ranks. Collective."""
    found: list[Any] = [value] * axis.size
    if axis.size > 1:
        with axis.recorder.waiting(AGREEMENT):
            dist.all_gather_object(found, value, group=axis.communicator)
    return found


def raise_error_on_all_ranks(error: UserError | None, axis: Axis) -> None:
    """Raise, on every rank, the error of the first rank that has one, with the rank's name and a
    count of the others. Collective."""
    if axis.size == 1:
        if error is not None:
            raise error
        return
    errors: list[UserError | None] = [None] * axis.size
    with axis.recorder.waiting(AGREEMENT):
        dist.all_gather_object(errors, error, group=axis.communicator)
    failed = [(rank, error) for rank, error in enumerate(errors) if error is not None]
    if failed:
        raise common_error(failed, axis.size)


def common_error(failed: Sequence[tuple[int, UserError]], size: int) -> UserError:
    """Return the error that all ``size`` ranks raise when these ranks failed."""
    rank, first = failed[0]
    text = str(first)
    if len(failed) < size or any(str(error) != text for _, error in failed):
        others = f" ({len(failed)} of {size} ranks failed)" if len(failed) > 1 else ""
        text = f"rank {rank}: {text}{others}"
    common = type(first)(text)
    common.everywhere = True
    return common


def broadcast_object(value: T, axis: Axis) -> T:
    """Return the picklable value of the first rank, on every rank. Collective."""
    box = [value]
    if axis.size > 1:
        with axis.recorder.waiting(AGREEMENT):
            dist.broadcast_object_list(box, group=axis.communicator, group_src=0)
    return box[0]


def on_rank0(decide: Callable[[], T], axis: Axis) -> T:
    """Call ``decide`` on the first rank, and return its result on every rank. A UserError of it is
    raised on every rank. Collective."""
    results: list[T] = []
    error = None
    if axis.rank == 0:
        try:
            results.append(decide())
        except UserError as caught:
            error = caught
            error.everywhere = True
    results, error = broadcast_object((results, error), axis)
    if error is not None:
        raise error
    return results[0]


@contextmanager
def raise_on_all_ranks(axis: Axis) -> Iterator[None]:
    """Turn a UserError of any rank in a section into an error of all ranks at its end. Nothing
    inside may be collective, because a rank that has failed does not come to it."""
    error = None
    try:
        yield
    except UserError as caught:
        error = caught
    raise_error_on_all_ranks(error, axis)
