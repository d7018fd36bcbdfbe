"""Layouts with one FP8 scale a tensor train what one process trains."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cache

import pytest
import torch
from megatron_llama.config.schema import Config
from megatron_llama.engine.comm.recorder import Traffic
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.launch.launcher import Place
from megatron_llama.model.nn.fp8 import tensorwise
from megatron_llama.model.nn.linear import ColumnLinear, RowLinear
from megatron_llama.model.plan.fp8 import SCALE_BYTES, fp8_layers, scale_messages, weight_code_bytes
from megatron_llama.model.plan.tensor_messages import block_messages
from megatron_llama.pipeline.plan.run_engine import rank_bucket_plan
from torch import Tensor

from tests.harness import Cluster
from tests.parallel.cases import STRATEGIES, Layout, Record, Reference, Row, initial_weights, merged, train, trainer
from tests.parallel.draw import axes, draw


@dataclass(frozen=True)
class Tensorwise(Layout):
    """A layout in FP8 with one scale a tensor; with fp64 it is the same model in fp64."""

    gathers_codes: bool = False
    skewed: bool = False
    """Weights differ in size from rank to rank of two."""

    @property
    def reference(self) -> Layout:
        """The same training in one process, in the same microbatches: each of their tensors has a scale."""
        plain = super().reference
        same = {field.name: getattr(plain, field.name) for field in fields(Layout)}
        return Tensorwise(**{**same, "microbatches": self.microbatches * self.dp}, skewed=self.skewed)

    def weights(self) -> Callable[[Rectangle, Tensor], None]:
        return skewed_weights if self.skewed else super().weights()

    def config(self) -> Config:
        config = super().config()
        if self.fp64:
            return config
        how = {"bf16": True, "fp8": "tensorwise", "fp8_gather": self.gathers_codes, "fp8_bf16_layers": min(1, (self.layers - 1) // 2)}
        return replace(config, training=replace(config.training, **how))


def skewed_weights(rectangle: Rectangle, out: Tensor) -> None:
    """Those that all layouts share, but small in the first half of the columns of row-parallel layers."""
    initial_weights()(rectangle, out)
    if rectangle.name.endswith(("o_proj.weight", "down_proj.weight")):
        columns = torch.arange(out.shape[1]) + rectangle.offset[1]
        out[:, columns < rectangle.shape[1] // 2] /= 64


def in_tensors(layout: Layout) -> Tensorwise:
    """The layout in FP8; half of those that gather sequences gather codes."""
    same = {field.name: getattr(layout, field.name) for field in fields(Layout)}
    return Tensorwise(**{**same, "tp_comm": "0", "steps": 5}, gathers_codes=layout.sp and layout.microbatches % 2 == 0)


DRAWN = [in_tensors(layout) for layout in draw(41, 30) if layout.tp <= layout.kv_heads][:24]
"""Of a seed of their own, on all axes."""
MICROBATCHES = (1, 2, 4, 8)
"""Of one process. Its roundings differ with them, as those of layouts do: where the largest number of a tensor differs by the last bit of
bf16, the scale does, and all codes of the tensor are rounded anew."""


@pytest.fixture(scope="module")
def one_process(cluster: Cluster) -> Callable[[Layout], list[Record]]:
    """In FP8, in so many microbatches each, and last in fp64; trained once for every kind of model."""

    @cache
    def trained(layout: Layout) -> list[Record]:
        return cluster.run(len(MICROBATCHES) + 1, train_alone, layout)

    return lambda layout: trained(replace(layout.reference, microbatches=1))


def train_alone(place: Place, layout: Layout) -> Record:
    exact = place.rank == len(MICROBATCHES)
    return train(Place(0, 1, 0), replace(layout, fp64=exact, microbatches=1 if exact else MICROBATCHES[place.rank]))


Compare = Callable[[Layout, Record], Row]


def mean_square(roundings: Iterable[float]) -> float:
    """The root of it."""
    return math.sqrt(statistics.fmean(rounding**2 for rounding in roundings))


@pytest.fixture(scope="module")
def compare(one_process: Callable[[Layout], list[Record]]) -> Compare:
    """A layout with one process and its microbatches. Roundings are those of one process in the mean square."""

    def row(layout: Layout, record: Record) -> Row:
        *alone, exact = one_process(layout)
        rows = [Reference(single, exact, None).row(layout.name, record) for single in alone]
        mine = rows[MICROBATCHES.index(layout.reference.microbatches)]
        return replace(mine, loss_rounding=mean_square(row.loss_rounding for row in rows), norm_rounding=mean_square(row.norm_rounding for row in rows))

    return row


def test_all_axes_are_drawn() -> None:
    assert {layout.tp for layout in DRAWN} >= {1, 2} and {layout.cp for layout in DRAWN} == {1, 2, 4} and {layout.dp for layout in DRAWN} >= {1, 2}
    assert {layout.strategy for layout in DRAWN} == set(STRATEGIES) and {layout.schedule for layout in DRAWN} >= {"1f1b", "zb-h1", "zb-v"}
    assert {layout.recompute for layout in DRAWN} == {"none", "selective", "full"} and {layout.gathers_codes for layout in DRAWN} == {True, False}
    assert sum(axes(layout) >= 3 for layout in DRAWN) >= 5 and len(DRAWN) >= 20


@pytest.mark.tries("fp8", "fp8_gather", "fp8_bf16_layers")
@pytest.mark.parametrize("layout", DRAWN, ids=lambda layout: f"{layout.name}{' codes' * layout.gathers_codes}")
@pytest.mark.few(1, all=4)
def test_drawn_layout_equals_one_process(compare: Compare, cluster: Cluster, layout: Layout) -> None:
    """By the rule of docs/numerics.md: within twice what one process in FP8 differs from fp64 by."""
    records = cluster.run(layout.world_size, train, layout)
    row = compare(layout, records[0])
    print(f"{row.loss:.1e} of {row.loss_bound:.1e}, {row.norm:.1e} of {row.norm_bound:.1e}")
    assert row.holds, (row, layout)
    for record in records:
        assert len({records[rank].parameters for rank in record.dp_line}) == 1, (record.dp_line, layout)
    merged(records)  # in which copies are equal to the bit


def own_codes(self: tensorwise.Measured, dtype: torch.dtype) -> tensorwise.Codes:
    """Codes by the largest magnitude of this rank's part of a tensor, with the scale of the whole."""
    whole = CODES(self, dtype)
    return tensorwise.Codes(CODES(tensorwise.measured(self.numbers, (), waits=True), dtype).codes, whole.scale)


CODES = tensorwise.Measured.codes


def train_wrongly(place: Place, layout: Layout) -> Record:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorwise.Measured, "codes", own_codes)
        return train(place, layout)


def test_the_largest_of_one_rank_exceeds_the_bound_tenfold(compare: Compare, cluster: Cluster) -> None:
    layout = Tensorwise(tp=2, sp=True, steps=5, skewed=True)
    assert compare(layout, cluster.run(2, train, layout)[0]).holds
    row = compare(layout, cluster.run(2, train_wrongly, layout)[0])
    assert row.loss > 10 * row.loss_bound and row.norm > 10 * row.norm_bound, row


GATHERS = [
    Tensorwise(tp=2, sp=True, steps=2),
    Tensorwise(tp=2, sp=True, cp=2, recompute="full", microbatches=2, steps=2),
    Tensorwise(tp=2, sp=True, pp=2, schedule="zb-h1", microbatches=2, steps=2),
    Tensorwise(tp=2, sp=True, lora=4, steps=2),
]


@pytest.mark.parametrize("layout", GATHERS, ids=lambda layout: layout.name)
@pytest.mark.few(2)
def test_gathers_of_codes_change_no_bit(cluster: Cluster, layout: Tensorwise) -> None:
    whole, coded = (cluster.run(layout.world_size, train, replace(layout, gathers_codes=gathers)) for gathers in (False, True))
    assert [(record.losses, record.norms, record.parameters) for record in whole] == [
        (record.losses, record.norms, record.parameters) for record in coded
    ]


def kept_and_planned(place: Place, layout: Tensorwise) -> tuple[int, int]:
    """Bytes of the codes of weights after a step, and by plan."""
    run = trainer(place, layout)
    run.step(0)
    run.optimizer.settle()
    layers = [module for stage in run.stages.values() for module in stage.modules() if isinstance(module, (ColumnLinear, RowLinear))]
    [weights] = {layer.products._weights for layer in layers if isinstance(layer.products, tensorwise.Tensorwise)}
    kept = sum(codes.forward.codes.nbytes + codes.backward.codes.nbytes + codes.forward.scale.nbytes for codes in weights._kept.values())
    plan = rank_bucket_plan(layout.config(), dp=run.mesh.dp.size, rank=run.mesh.pp.rank, tp_rank=run.mesh.tp.rank)
    return kept, weight_code_bytes(layout.config(), plan)


@pytest.mark.parametrize("layout", [Tensorwise(tp=2, sp=True, dp=2), Tensorwise(dp=2, strategy="optim_grads_params", slots="2")], ids=lambda layout: layout.name)
def test_the_codes_that_are_kept_are_planned(cluster: Cluster, layout: Tensorwise) -> None:
    for kept, planned in cluster.run(layout.world_size, kept_and_planned, layout):
        assert kept == planned > 0


def messages(place: Place, layout: Tensorwise) -> dict[tuple[str, str], tuple[int, int]]:
    """Of the second step: calls and bytes."""
    run = trainer(place, layout)
    run.step(0)
    before = {kind: replace(traffic) for kind, traffic in run.mesh.recorder.traffic.items()}
    run.step(1)
    run.optimizer.settle()
    return {
        kind: (traffic.calls - before.get(kind, Traffic()).calls, traffic.bytes - before.get(kind, Traffic()).bytes)
        for kind, traffic in run.mesh.recorder.traffic.items()
    }


@pytest.mark.parametrize(
    "layout",
    [
        Tensorwise(tp=2, sp=True, microbatches=2),
        Tensorwise(tp=2, sp=True, gathers_codes=True, microbatches=2),
        Tensorwise(tp=2, microbatches=2),
        Tensorwise(tp=2, cp=2, sp=True, gathers_codes=True, recompute="full"),
        Tensorwise(cp=2, cp_comm="ring", microbatches=2),
    ],
    ids=lambda layout: f"{layout.name}{' codes' * layout.gathers_codes}",
)
@pytest.mark.few(1)
def test_messages_are_planned(cluster: Cluster, layout: Tensorwise) -> None:
    """What a step sends more than the same one in bf16 does, and what less."""
    config = layout.sized()
    [found, *_] = cluster.run(layout.world_size, messages, layout)
    [plain, *_] = cluster.run(layout.world_size, bf16_messages, layout)
    blocks = len(fp8_layers(config))
    times = layout.microbatches
    for axis, scales in scale_messages(config).items():
        forward = scales.forward * (2 if layout.recompute == "full" else 1)
        expected = blocks * (times * (forward + scales.backward) + scales.weights)
        more = [found[axis, "all_reduce"][index] - plain.get((axis, "all_reduce"), (0, 0))[index] for index in (0, 1)]
        assert more == [expected, expected * SCALE_BYTES] and expected > 0, axis
    assert set(scale_messages(config)) == {axis for axis in ("tp", "cp") if getattr(layout, axis) > 1}
    if layout.sp:
        saved = block_messages(replace(config, training=replace(config.training, fp8_gather=False))).forward_bytes - block_messages(config).forward_bytes
        passes = 2 if layout.recompute == "full" else 1
        assert plain["tp", "all_gather"][1] - found["tp", "all_gather"][1] == blocks * times * passes * saved
        assert (saved > 0) == layout.gathers_codes


def bf16_messages(place: Place, layout: Tensorwise) -> dict[tuple[str, str], tuple[int, int]]:
    same = {field.name: getattr(layout, field.name) for field in fields(Layout)}
    return messages(place, Layout(**{**same, "bf16": True}))  # type: ignore[arg-type]
