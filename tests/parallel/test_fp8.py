"""Layouts in FP8 train what one process in FP8 trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
from megatron_llama.launch.launcher import Place
from megatron_llama.model.nn.fp8 import layers
from megatron_llama.model.nn.fp8.codes import Tiles, tiles
from torch import Tensor

from tests.harness import Cluster
from tests.parallel.cases import STRATEGIES, Layout, Record, Reference, merged, train
from tests.parallel.draw import alone, axes, draw
from tests.parallel.test_sharding import bits

DRAWN = [replace(layout, fp8=True) for layout in draw(40, 24)]
"""Of a seed of their own, on all axes."""
References = Callable[[Layout], Reference]


@pytest.fixture(scope="module")
def references(cluster: Cluster) -> References:
    """One process in FP8, and beside it one in fp64, trained once for every kind of model."""
    trained = cache(partial(alone, cluster))
    return lambda layout: trained(layout.reference)


def test_all_axes_are_drawn() -> None:
    assert {layout.tp for layout in DRAWN} == {layout.cp for layout in DRAWN} == {layout.dp for layout in DRAWN} == {1, 2, 4}
    assert {layout.strategy for layout in DRAWN} == set(STRATEGIES) and {layout.schedule for layout in DRAWN} >= {"1f1b", "zb-h1", "zb-v"}
    assert {layout.recompute for layout in DRAWN} == {"none", "selective", "full"} and {layout.sp for layout in DRAWN} == {True, False}
    assert any(layout.tp_comm != "0" for layout in DRAWN) and sum(axes(layout) >= 3 for layout in DRAWN) >= 5


@pytest.mark.tries("fp8", "fp8_bf16_layers")
@pytest.mark.parametrize("layout", DRAWN, ids=lambda layout: layout.name)
@pytest.mark.few(1, all=4)
def test_drawn_layout_equals_one_process(references: References, cluster: Cluster, layout: Layout) -> None:
    """By the rule of docs/numerics.md: within twice what one process in FP8 differs from fp64 by."""
    records, reference = cluster.run(layout.world_size, train, layout), references(layout)
    row = reference.row(layout.name, records[0])
    assert row.holds, (row, layout)
    for record in records:
        assert len({records[rank].parameters for rank in record.dp_line}) == 1, (record.dp_line, layout)
    merged(records)  # in which copies are equal to the bit


def neighbours_scale(x: Tensor) -> Tiles:
    """Codes, each with the scale of the row before."""
    made = tiles(x)
    return Tiles(made.codes, made.scales.flatten(0, -2).roll(1, 0).view_as(made.scales))


class Stale(layers.Blockwise):
    """Keeps the codes of the first version of each weight."""

    def codes(self, weight: Tensor) -> layers.WeightCodes:
        place = weight.untyped_storage()._cdata, weight.storage_offset()
        return self._kept[place] if place in self._kept else super().codes(weight)


FAULTS: dict[str, dict[str, object]] = {"the scale of another tile": {"tiles": neighbours_scale}, "codes of the step before": {"Blockwise": Stale}}


def train_wrongly(place: Place, layout: Layout, fault: str) -> Record:
    with pytest.MonkeyPatch.context() as patch:
        for name, wrong in FAULTS[fault].items():
            patch.setattr(layers, name, wrong)
        return train(place, layout)


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_exceeds_the_bound_tenfold(references: References, cluster: Cluster, fault: str) -> None:
    layout = Layout(fp8=True, tp=2, sp=True, steps=5)
    row = references(layout).row(fault, cluster.run(2, train_wrongly, layout, fault)[0])
    assert row.loss > 10 * row.loss_bound and row.norm > 10 * row.norm_bound, row


@pytest.mark.parametrize("layout", [Layout(fp8=True, tp=2, sp=True, pp=2, schedule="zb-h1", microbatches=2, recompute="full", steps=3)])
def test_a_layout_twice_has_the_same_bits(cluster: Cluster, layout: Layout) -> None:
    one, other = (cluster.run(layout.world_size, train, layout) for _ in range(2))
    assert bits(one) == bits(other)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.few(1)
def test_strategies_have_the_same_bits(cluster: Cluster, strategy: str) -> None:
    """Whether codes are kept from step to step or made at every gather."""
    first, second = (
        cluster.run(2, train, Layout(fp8=True, dp=2, strategy=name, steps=3, slots="2" if name == "optim_grads_params" else "default"))
        for name in ("no_shard", strategy)
    )
    assert [record.losses for record in first] == [record.losses for record in second]
    assert [record.norms for record in first] == [record.norms for record in second]


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", [Layout(fp8=True, tp=2, sp=True, lora=4, steps=3), Layout(fp8=True, dp=2, freeze=("*.mlp.*",), steps=3)])
def test_what_is_frozen_multiplies_in_fp8_too(references: References, cluster: Cluster, layout: Layout) -> None:
    row = references(layout).row(layout.name, cluster.run(2, train, layout)[0])
    assert row.holds and row.loss_rounding > 1e-4, row
