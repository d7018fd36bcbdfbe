"""Python values of some ranks of an axis, on the first of them.

``gather_object`` sends as many bytes from every rank as the longest value has, to one rank. Where
a few ranks of many have something long to say, each value goes from its rank alone."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_llama.engine.comm.object_collectives import AGREEMENT
from megatron_llama.engine.mesh import Axis

T = TypeVar("T")


def gather_from(ranks: Sequence[int], value: T, axis: Axis) -> list[T] | None:
    """Return the picklable value of each of these ranks of an axis with a group of the host, in
    their order, on the first of them; None on the others. Only these ranks call it."""
    first, *others = ranks
    with axis.recorder.waiting(AGREEMENT):
        if axis.rank != first:
            content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
            for message in (torch.tensor(len(content)), content):
                dist.send(message, group=axis.communicator, group_dst=first)
            return None
        values = [value]
        for rank in others:
            length = torch.tensor(0)
            dist.recv(length, group=axis.communicator, group_src=rank)
            content = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(content, group=axis.communicator, group_src=rank)
            values.append(pickle.loads(content.numpy().tobytes()))
    return values
