"""Every layout trains the model that one process trains, and that HuggingFace with torch's own AdamW trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron_llama.launch.launcher import Place

from tests.harness import Cluster
from tests.parallel.cases import (
    FULL,
    LAYOUTS,
    LOSS_BOUND,
    NORM_BOUND,
    OPTIMIZER,
    Layout,
    Record,
    Reference,
    Strategy,
    deviation,
    merged,
    record,
    train,
    train_hf,
    trainer,
)
from tests.parallel.test_traffic import Counted, assert_as_planned, assert_reduced_when_complete, counted

References = Callable[[Layout], Reference]
STEPS = 6
"""Twenty: the table in docs/numerics.md."""

@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_one_process_equals_huggingface(references: References, tied: bool) -> None:
    reference = references(Layout(tied=tied))
    assert reference.hf is not None
    row = reference.row("one process", reference.single)
    assert len(reference.single.losses) == len(reference.hf.losses) == Layout().steps
    assert row.holds, row
    # The comparison means something only if the run learns and the clipping is at work in every step.
    assert reference.single.losses[-1] < 0.7 * reference.single.losses[0]
    assert min(reference.single.norms) > OPTIMIZER.clip_grad


@pytest.mark.long
def test_fp64_twins_agree_far_below_the_bounds(references: References, cluster: Cluster) -> None:
    """In double precision only a difference in the mathematics would be left. (The rotary tables are fp32 in both, the clip
    factor is fp32 in ours.)"""
    ours, theirs = references(Layout()).exact, train_hf(Layout(fp64=True))
    assert deviation(ours.losses, theirs.losses) < LOSS_BOUND / 10
    assert deviation(ours.norms, theirs.norms) < NORM_BOUND / 100
    spread = cluster.run(4, train, Layout(tp=2, pp=2, sp=True, fp64=True, microbatches=2, steps=8))[0]
    assert deviation(spread.losses, ours.losses[:8]) < LOSS_BOUND / 1000
    assert deviation(spread.norms, ours.norms[:8]) < NORM_BOUND / 1000


def train_and_count(place: Place, layout: Layout) -> tuple[Record, Counted]:
    """All steps, and what the second one did."""
    run = trainer(place, layout)
    first = run.step(0)
    second, done = counted(run, 1)
    return record(run, [first, second, *(run.step(index) for index in range(2, layout.steps))]), done


@pytest.mark.few(5, all=14)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_equals_one_process_and_does_what_is_planned(references: References, cluster: Cluster, layout: Layout) -> None:
    """Losses, norms, trained weights and their copies; and of one step each message to the byte, what autograd holds, and the order
    in which buckets are reduced."""
    layout = replace(layout, steps=STEPS)
    ranks = cluster.run(layout.world_size, train_and_count, layout)
    records = [trained for trained, _ in ranks]
    assert_as_planned(layout, [done for _, done in ranks])
    if layout.schedule in ("1f1b", "interleaved"):
        assert_reduced_when_complete(layout, [done for _, done in ranks])
    assert all(one.losses == records[0].losses and one.norms == records[0].norms for one in records)
    row = references(layout).row(layout.name, records[0])
    assert row.holds, row
    _assert_replicas_equal(records)
    trained, alone = merged(records), merged([references(layout).single])
    assert trained.keys() == alone.keys()
    for name, weight in trained.items():
        # Adam turns a gradient that is all rounding noise into full steps, so single elements may differ, tensors may not.
        assert float((weight - alone[name]).norm() / alone[name].norm()) < 1e-4, name


HALF: dict[str, tuple[dict[str, Any], float, float]] = {
    "bf16": ({"bf16": True}, 5e-3, 5e-2),
    # Eleven bits are nearer to fp32 than eight. The loss scale leaves loss and norm as they are.
    "fp16": ({"fp16": True, "loss_scale": 2.0**14}, 1e-3, 1e-2),
}


@pytest.mark.long
@pytest.mark.parametrize("half", HALF)
def test_layouts_in_half_precision_follow_fp32(references: References, cluster: Cluster, half: str) -> None:
    """Rounding bounds what can be said: the masters follow, and all replicas round alike."""
    options, loss, norm = HALF[half]
    layout = replace(FULL, tied=True, microbatches=2, strategy="optim_grads", steps=STEPS)
    records = cluster.run(layout.world_size, train, replace(layout, **options))
    row = references(layout).row(layout.name, records[0])
    assert LOSS_BOUND < row.loss < loss and row.norm < norm, row
    _assert_replicas_equal(records)
    assert all(weight.dtype is torch.float32 for weight in merged(records).values())


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_reductions_in_bf16_follow_fp32(references: References, cluster: Cluster, strategy: Strategy) -> None:
    layout = Layout(dp=2, strategy=strategy, microbatches=4, steps=STEPS)
    exact, records = (cluster.run(2, train, replace(layout, reduce_bf16=narrow)) for narrow in (False, True))
    assert records[0].losses[0] == exact[0].losses[0], "the first forward pass knows no gradient yet"
    row = references(layout).row(layout.name, records[0])
    assert LOSS_BOUND < row.loss < 1e-3 and NORM_BOUND < row.norm < 1e-2, row
    assert all(one.losses == records[0].losses and one.norms == records[0].norms for one in records)
    _assert_replicas_equal(records)
    merged(records)


def _assert_replicas_equal(records: list[Record]) -> None:
    for one in records:
        digests = {records[rank].parameters for rank in one.dp_line}
        assert len(digests) == 1, f"data-parallel ranks {one.dp_line} hold different parameters"
