"""A layout that exceeds its bound is excused where a token stood between two experts, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from megatron_llama.launch.launcher import Place
from megatron_llama.model.nn.moe import routing
from torch import Tensor

from tests.harness import Cluster
from tests.model.families import twins
from tests.model.families.parting import explained
from tests.model.families.twins import FamilyLayout
from tests.parallel.cases import Reference, Row, train
from tests.prove.faults import CATALOGUE, with_fault

LAYOUT = FamilyLayout(family="mixtral", dp=2, ep=2, exchange=True, strategy="optim_grads", steps=4)


class Wrong:
    """A pool in which layouts of several processes run in another way, and one process as ever."""

    def __init__(self, cluster: Cluster, run: Callable[..., Any], *options: Any) -> None:
        self._cluster, self._run, self._options = cluster, run, options

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """See WorkerPool."""
        given = (function, *args) if world_size == 1 else (self._run, *self._options, function, *args)
        return self._cluster.run(world_size, *given, **options)


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> Reference:
    return twins.reference(cluster, LAYOUT)


def row_in(pool: Wrong, expected: Reference, **options: float) -> tuple[Row, Row]:
    """The row of the layout, and what is made of it."""
    row = expected.row(LAYOUT.name, pool.run(LAYOUT.world_size, train, LAYOUT)[0])
    assert not row.holds
    return row, explained(cast(Cluster, pool), LAYOUT, expected, row, **options)


def gaps_of(logits: Tensor) -> Tensor:
    """How far the second and the third expert of a token are apart."""
    ordered = logits.sort(dim=-1, descending=True).values
    return ordered[:, 1] - ordered[:, 2]


def smallest_gaps(place: Place, layout: FamilyLayout) -> list[float]:
    """Of all tokens, blocks and steps."""
    correct, found = routing._Logits.forward, []

    def logits(ctx: Any, *args: Any) -> Tensor:
        out = correct(ctx, *args)
        found.append(gaps_of(out))
        return out

    with patch.object(routing._Logits, "forward", staticmethod(logits)):
        train(place, layout)
    return torch.cat(found).sort().values[:2].tolist()


def coarse(place: Place, width: float, function: Callable[..., Any], *args: Any) -> Any:
    """The second and the third expert of a token change places where their logits are less than ``width`` apart."""
    correct = routing._Logits.forward

    def logits(ctx: Any, *args: Any) -> Tensor:
        out = correct(ctx, *args)
        order = out.argsort(dim=-1, descending=True)
        near = gaps_of(out) < width
        swapped = order.clone()
        swapped[near, 1], swapped[near, 2] = order[near, 2], order[near, 1]
        return torch.empty_like(out).scatter_(-1, swapped, out.gather(-1, order))

    with patch.object(routing._Logits, "forward", staticmethod(logits)):
        return function(place, *args)


@pytest.mark.long
def test_a_token_between_two_experts_is_compared_with_one_process_that_moves_it(cluster: Cluster, expected: Reference) -> None:
    """And no further from either than rounding permits."""
    [smallest, next_one] = cluster.run(1, smallest_gaps, LAYOUT.reference)[0]
    assert 0 < smallest < 0.9 * next_one
    pool = Wrong(cluster, coarse, (smallest * next_one) ** 0.5)
    row, better = row_in(pool, expected, rounding=next_one)
    assert better.holds and better.loss_hf is None, (row, better)
    assert better.name.startswith(f"{row.name}, against one process that moves a token: step ")
    _, refused = row_in(pool, expected, rounding=smallest / 2)
    assert not refused.holds and ", another expert, but not by rounding: step " in refused.name


@pytest.mark.long
@pytest.mark.parametrize("name", ["experts scaled by ranks", "weights of sent tokens untrained", "router in bf16"])
def test_a_fault_is_not_excused(cluster: Cluster, expected: Reference, name: str) -> None:
    assert name in [fault.name for fault in CATALOGUE]
    layout_row, row = row_in(Wrong(cluster, with_fault, name), expected)
    assert not row.holds and row.loss_hf is not None
    assert row.name.startswith(f"{layout_row.name}, ") and replace(row, name=layout_row.name) == layout_row
