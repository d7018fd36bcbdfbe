"""Layouts of a model with experts in FP8 train what one process in FP8 trains."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal

import pytest
from megatron_llama.config.schema import Config
from megatron_llama.engine.comm.recorder import Traffic
from megatron_llama.launch.launcher import Place
from megatron_llama.model.nn.fp8.layers import KeptCodes
from megatron_llama.model.plan.expert_fp8 import sparse_scale_messages
from megatron_llama.model.plan.fp8 import SCALE_BYTES, TENSORWISE, fp8_layers, scale_messages, weight_code_bytes
from megatron_llama.pipeline.plan.run_engine import rank_bucket_plan

from tests.harness import Cluster
from tests.parallel.cases import Layout, Record, Reference, Row, merged, train, trainer

EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}


@dataclass(frozen=True)
class Sparse(Layout):
    """A layout of a model whose third block is dense, and whose inner two blocks are in FP8; with fp64 it is the same model in fp64."""

    recipe: Literal["blockwise", "tensorwise"] = "blockwise"
    shared: bool = False
    """There is an expert of all tokens."""

    @property
    def reference(self) -> Sparse:
        """In one process and, with one scale a tensor, in the same microbatches."""
        microbatches = self.microbatches * self.dp if self.recipe == TENSORWISE else 1
        kept = ("fp64", "steps", "layers", "recipe", "shared")
        return Sparse(**{name: getattr(self, name) for name in kept}, microbatches=microbatches)

    def config(self) -> Config:
        config = replace(self, fp8=True, fp64=False).plain_config()
        sparse = {**EXPERTS, "mlp_only_layers": (2,), "moe_shared_expert_intermediate_size": 128 * self.shared}
        how = {"fp8": "none", "bf16": False, "fp64": True} if self.fp64 else {"fp8": self.recipe}
        return replace(config, model=replace(config.model, **sparse), training=replace(config.training, **how))

    def plain_config(self) -> Config:
        return super().config()


LAYOUTS = [
    Sparse(dp=4, ep=2, strategy="optim_grads"),
    Sparse(tp=2, sp=True, dp=2, ep=2, recompute="selective", strategy="optim_grads_params", slots="2", shared=True),
    Sparse(pp=2, dp=2, ep=2, schedule="zb-h1", microbatches=2, recompute="full"),
    Sparse(cp=2, tp=2, sp=True, shared=True, microbatches=2),
]
ALL = [replace(layout, recipe=recipe, steps=5) for recipe in ("blockwise", "tensorwise") for layout in LAYOUTS]
EXCHANGED = Sparse(dp=4, ep=2, exchange=True, strategy="optim_grads", recompute="selective", steps=5)
MICROBATCHES = (1, 2, 4, 8)


def train_alone(place: Place, layout: Sparse) -> Record:
    exact = place.rank == len(MICROBATCHES)
    return train(Place(0, 1, 0), replace(layout, fp64=exact, microbatches=1 if exact else MICROBATCHES[place.rank]))


@pytest.fixture(scope="module")
def compare(cluster: Cluster) -> Callable[[Sparse, Record], Row]:
    """With one process, whose roundings are those of its runs in 1 to 8 microbatches, in the mean square."""

    @cache
    def trained(layout: Sparse) -> list[Record]:
        return cluster.run(len(MICROBATCHES) + 1, train_alone, layout)

    def row(layout: Sparse, record: Record) -> Row:
        *alone, exact = trained(replace(layout.reference, microbatches=1))
        rows = [Reference(single, exact, None).row(layout.name, record) for single in alone]
        roundings = {name: math.sqrt(statistics.fmean(getattr(one, name) ** 2 for one in rows)) for name in ("loss_rounding", "norm_rounding")}
        return replace(rows[MICROBATCHES.index(layout.reference.microbatches)], **roundings)

    return row


@pytest.mark.tries("fp8", "num_experts")
@pytest.mark.parametrize("layout", [*ALL, EXCHANGED], ids=lambda layout: f"{layout.recipe} {layout.name}")
@pytest.mark.few(1)
def test_a_layout_equals_one_process(compare: Callable[[Sparse, Record], Row], cluster: Cluster, layout: Sparse) -> None:
    """By the rule of docs/numerics.md: within twice what one process in FP8 differs from fp64 by."""
    records = cluster.run(layout.world_size, train, layout)
    row = compare(layout, records[0])
    print(f"{row.loss:.1e} of {row.loss_bound:.1e}, {row.norm:.1e} of {row.norm_bound:.1e}")
    assert row.holds, (row, layout)
    merged(records)  # in which copies are equal to the bit


def measured(place: Place, layout: Sparse) -> tuple[int, int, dict[tuple[str, str], tuple[int, int]]]:
    """Bytes of the kept codes of weights, and by plan; and number and bytes of the messages of the second step."""
    made: list[KeptCodes] = []
    begin = KeptCodes.__init__

    def noted(self: KeptCodes) -> None:
        begin(self)
        made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeptCodes, "__init__", noted)
        run = trainer(place, layout)
    run.step(0)
    before = {kind: replace(traffic) for kind, traffic in run.mesh.recorder.traffic.items()}
    run.step(1)
    run.optimizer.settle()
    kept = sum(part.nbytes for codes in made for one in codes._kept.values() for part in (*one.forward, *one.backward))
    if layout.recipe == TENSORWISE:
        # Both ways have the same scales.
        kept -= sum(one.backward.scale.nbytes for codes in made for one in codes._kept.values())
    plan = rank_bucket_plan(layout.config(), dp=layout.dp * layout.cp, rank=run.mesh.pp.rank, tp_rank=run.mesh.tp.rank)
    sent = {
        kind: (traffic.calls - before.get(kind, Traffic()).calls, traffic.bytes - before.get(kind, Traffic()).bytes)
        for kind, traffic in run.mesh.recorder.traffic.items()
    }
    return kept, weight_code_bytes(layout.config(), plan), sent


def in_bf16(layout: Sparse) -> Sparse:
    return InBF16(**{field.name: getattr(layout, field.name) for field in fields(Sparse)})


class InBF16(Sparse):
    """The same without FP8."""

    def config(self) -> Config:
        config = super().config()
        return replace(config, training=replace(config.training, fp8="none"))


@pytest.mark.long
@pytest.mark.parametrize("layout", [replace(layout, steps=2) for layout in ALL if layout.world_size == 4 and layout.pp == 1], ids=lambda layout: f"{layout.recipe} {layout.name}")
def test_codes_and_messages_are_planned(cluster: Cluster, layout: Sparse) -> None:
    """What is kept, and what is sent more than in bf16: nothing with scales of tiles."""
    [(kept, planned, sent), *_] = cluster.run(layout.world_size, measured, layout)
    [(_, _, plain), *_] = cluster.run(layout.world_size, measured, in_bf16(layout))
    assert kept == planned > 0 or (layout.slots == "2" and 0 < kept <= planned)
    config = layout.sized()
    scales = sparse_scale_messages(config)
    assert set(scales) == {axis for axis in ("tp", "cp") if layout.recipe == TENSORWISE and getattr(layout, axis) > 1}
    assert list(fp8_layers(config)) == [1, 2]
    for axis in ("tp", "cp", "ep", "dp"):
        more = [sent.get((axis, "all_reduce"), (0, 0))[index] - plain.get((axis, "all_reduce"), (0, 0))[index] for index in (0, 1)]
        if axis not in scales:
            assert more == [0, 0], axis
            continue
        single, experts = scales[axis]
        dense = scale_messages(config)[axis]
        of_one, of_all = (sum(one.forward + one.backward for one in kinds) * layout.microbatches for kinds in ((single, dense), (experts,)))
        of_one += single.weights + dense.weights
        assert more == [of_one + of_all, SCALE_BYTES * (of_one + 4 * of_all)], axis
