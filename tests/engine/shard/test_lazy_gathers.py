"""Nobody reads weights before their gather has been waited for: here gathers write when somebody waits, and until then a slot holds NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron_llama.engine.comm.queues import CommQueue
from megatron_llama.engine.parameters import ParameterBuckets
from megatron_llama.launch.launcher import Place

from tests.engine.shard.models import Block, Feed, difference, loss_of, net, part, plain, sharded, train


class Waiting:
    """The end of a gather that has not begun."""

    def __init__(self, gather: Callable[[], Any]) -> None:
        self._gather = gather

    def wait(self) -> None:
        self._gather().wait()


class LazyQueue:
    """Gathers into slots that others take as well, when they are waited for."""

    def __init__(self, queue: CommQueue, buckets: ParameterBuckets) -> None:
        self._queue = queue
        self._buckets = buckets

    def submit(self, exchange: Any, *, size: int, after: Any = None) -> Any:
        bucket = self._buckets._gathers.index(exchange)
        if self._buckets.bucket_plan.has_own_slot(bucket):
            return self._queue.submit(exchange, size=size, after=after)
        self._buckets.unsharded[bucket].data.fill_(float("nan"))
        return Waiting(lambda: self._queue.submit(exchange, size=size, after=after))


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine that is made in this test gathers as late as it may."""
    make = ParameterBuckets.__init__

    def made(self: ParameterBuckets, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self._comm_queue = LazyQueue(self._comm_queue, self)  # type: ignore[assignment]

    monkeypatch.setattr(ParameterBuckets, "__init__", made)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("way", ["plain", "tied", "reentrant", "pairs", "twice", "towers", "round"])
def test_every_read_is_waited_for(lazy: None, way: str, slots: int) -> None:
    alone = plain(net(way), world=1, microbatches=2, steps=3)
    units = (Block, Feed) if way == "plain" else (Block,)

    def loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            assert loss_of(model, part(50, 0, 0)).isfinite()
        return loss_of(model, ids)

    with sharded(net(way), units, microbatches=2, param_slots=slots, grad_slots=slots) as engine:
        assert difference(train(Place(0, 1, 0), engine, microbatches=2, steps=3, loss=loss), alone) < 1e-7
