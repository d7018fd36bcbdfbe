"""A model in the engine trains as in plain torch, whatever it does with its units."""

from __future__ import annotations

from typing import Any

import pytest
from megatron_llama.launch.launcher import Place
from torch import nn

from tests.engine.shard.models import Block, Feed, Net, difference, net, plain, sharded, train
from tests.harness import Cluster

SINGLE = Place(0, 1, 0)
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
WAYS = (
    *("plain", "tied", "frozen", "same block", "head elsewhere", "twice", "round", "towers"),
    *("reentrant", "not reentrant", "reentrant pairs", "pairs"),
)
EXACT = 1e-7
"""Models are in fp64: what is left is the factor of clipping, which the engine has in fp32."""
MICROBATCHES, STEPS = 2, 3


def compare(place: Place, way: str, units: tuple[type[nn.Module], ...], options: dict[str, Any]) -> None:
    """Steps of a model with the engine equal those without it."""
    expected = plain(net(way), world=place.world_size, microbatches=MICROBATCHES, steps=STEPS)
    with sharded(net(way), units, microbatches=MICROBATCHES, **options) as engine:
        found = train(place, engine, microbatches=MICROBATCHES, steps=STEPS)
    assert difference(found, expected) < EXACT, (way, units, options)


def compare_ways(place: Place, strategy: str) -> None:
    for way in WAYS:
        compare(place, way, (Block,), {"strategy": strategy})
    compare(place, "plain", (), {"strategy": strategy})
    compare(place, "plain", (Net,), {"strategy": strategy})
    compare(place, "plain", (Block, Feed), {"strategy": strategy})
    compare(place, "not reentrant", (Block, Feed), {"strategy": strategy})
    compare(place, "reentrant", (Block, Feed), {"strategy": strategy})
    compare(place, "plain", (Feed,), {"strategy": strategy})


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_way_of_calling_units_equals_plain_torch(strategy: str) -> None:
    compare_ways(SINGLE, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_way_equals_plain_torch_on_two_ranks(cluster: Cluster, strategy: str) -> None:
    cluster.run(2, compare_ways, strategy)


def compare_options(place: Place) -> None:
    for options in (
        {"param_slots": 1, "grad_slots": 1},
        {"param_slots": 3, "grad_slots": 1},
        {"param_slots": "all"},
        {"static_order": False},
        {"find_unused": True},
        {"static_order": False, "strategy": "optim"},
    ):
        for way in ("plain", "twice", "reentrant pairs"):
            compare(place, way, (Block, Feed), options)


@pytest.mark.long
def test_options_change_nothing(cluster: Cluster) -> None:
    compare_options(SINGLE)
    cluster.run(2, compare_options)
