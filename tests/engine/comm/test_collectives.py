"""A collective that is waited for at once: the same numbers and the same accounts as one that is not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron_llama.engine.comm import autograd, collectives
from megatron_llama.engine.comm.recorder import Recorder
from megatron_llama.engine.mesh import Axis
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from torch import Tensor

from tests.harness import Cluster
from tests.parallel.cases import Layout

Collective = Callable[..., tuple[Tensor, collectives.Pending]]


def summed(tensor: Tensor, axis: Axis, **options: bool) -> tuple[Tensor, collectives.Pending]:
    out = tensor.clone()
    return out, collectives.all_reduce(out, axis, **options)


COLLECTIVES: tuple[Collective, ...] = (summed, autograd.start_all_gather, autograd.start_reduce_scatter)


def both_ways(place: Place) -> list[tuple[Tensor, Tensor, object, object]]:
    """Of each collective: the result and the traffic, waited for at once and later."""
    found = []
    for collective in COLLECTIVES:
        out, counted = [], []
        for async_op in (True, False):
            axis = build_mesh(Layout(tp=4).config(), rank=place.rank, world_size=4, device=torch.device("cpu")).tp
            numbers = torch.arange(64.0).view(16, 4).div(7).add(place.rank / 3)
            result, pending = collective(numbers, axis, async_op=async_op)
            pending.wait()
            out.append(result)
            counted.append(axis.recorder.traffic)
        found.append((*out, *counted))
    return found  # type: ignore[return-value]


def test_waiting_at_once_changes_no_bit_and_no_account(cluster: Cluster) -> None:
    for rank in cluster.run(4, both_ways):
        for later, now, counted_later, counted_now in rank:
            assert torch.equal(later, now)
            assert counted_now == counted_later != {}


@pytest.mark.parametrize(
    ("name", "operation", "call"),
    [
        ("dist.all_reduce", "all_reduce on tp", lambda axis, x, **options: collectives.all_reduce(x, axis, **options)),
        ("all_gather_single", "all_gather on tp", lambda axis, x, **options: collectives.all_gather(x, x[:2], axis, **options)),
        ("reduce_scatter_single", "reduce_scatter on tp", lambda axis, x, **options: collectives.reduce_scatter(x[:2], x, axis, **options)),
    ],
    ids=["all_reduce", "all_gather", "reduce_scatter"],
)
def test_who_waits_inside_the_call_is_said_to_wait_there(name: str, operation: str, call: Callable[..., collectives.Pending]) -> None:
    """The backend is asked for a blocking call, in which a hang report names the message; nothing is left for the wait."""
    recorder = Recorder()
    axis = Axis("tp", 0, (0, 1), mock.Mock(), recorder)
    seen = list[tuple[bool, list[str]]]()

    def backend(*tensors: Any, async_op: bool, **options: Any) -> Any:
        seen.append((async_op, [str(wait.what) for wait in recorder.waits.values()]))
        return SimpleNamespace(wait=lambda: None) if async_op else None

    with mock.patch.object(collectives, "carried_by_gloo", return_value=False), mock.patch(f"{collectives.__name__}.{name}", backend):
        call(axis, torch.zeros(4), async_op=False).wait()
        call(axis, torch.zeros(4)).wait()
    assert seen == [(False, [operation]), (True, [])]
    assert recorder.waits == {}


def test_the_pairs_of_tensor_parallelism_wait_at_once() -> None:
    """Forward and backward of f, g and g-bar: what follows reads the result."""
    axis = Axis("tp", 0, (0, 1), mock.Mock(), Recorder())
    asked = list[bool]()

    def backend(*tensors: Any, async_op: bool, **options: Any) -> None:
        asked.append(async_op)

    names = ("dist.all_reduce", "all_gather_single", "reduce_scatter_single")
    patches = [mock.patch(f"{collectives.__name__}.{name}", backend) for name in names]
    with mock.patch.object(collectives, "carried_by_gloo", return_value=False), patches[0], patches[1], patches[2]:
        for function in (autograd.copy, autograd.gather_sequence, autograd.scatter_sequence, autograd.reduce):
            function(torch.zeros(4, requires_grad=True).mul(1), axis).sum().backward()
    assert asked == [False] * 6
