"""ZenFlow under every layout: when it is AdamW, that the same columns are chosen everywhere, what crosses, what is late, and that a
checkpoint holds all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from megatron_llama.checkpoint import native
from megatron_llama.checkpoint.chunks import regions
from megatron_llama.checkpoint.columns import column_pieces
from megatron_llama.config.schema import Config
from megatron_llama.engine.offload.zenflow.rule import ZenFlow
from megatron_llama.engine.offload.zenflow.schedule import Step
from megatron_llama.engine.offload_options import OffloadConfig, ZenFlowConfig
from megatron_llama.engine.plan.offload import offload_plan
from megatron_llama.errors import OffloadError
from megatron_llama.launch.launcher import Place
from megatron_llama.pipeline.plan.run_engine import engine_options, rank_bucket_plan
from torch import Tensor

from tests.checkpoint.cases import copies, merged, same, state_at
from tests.harness import Cluster
from tests.model.families.twins import FamilyLayout
from tests.parallel.cases import MODEL, OPTIMIZER, Layout, Trainer, train, trainer
from tests.parallel.cases import merged as trained

SINGLE = Place(0, 1, 0)
ZENFLOW = OffloadConfig(optimizer_offload="zenflow")
FOUR = ZenFlowConfig(zenflow_topk_ratio=0.25, zenflow_select_strategy="step", zenflow_select_interval="8", zenflow_update_interval="4")
OVERLAP = replace(FOUR, zenflow_overlap_step=True)


@dataclass(frozen=True)
class Zen(Layout):
    """A layout with ZenFlow."""

    offload: OffloadConfig = ZENFLOW
    zenflow: ZenFlowConfig = FOUR

    def config(self) -> Config:
        """See Layout."""
        return replace(super().config(), zenflow=self.zenflow)


def zen(layout: Layout, zenflow: ZenFlowConfig = FOUR) -> Zen:
    """The same layout with ZenFlow."""
    return Zen(**{name: getattr(layout, name) for name in Layout.__dataclass_fields__ if name != "offload"}, zenflow=zenflow)


@dataclass(frozen=True)
class ZenFamily(FamilyLayout):
    """A layout of a family's model with ZenFlow."""

    offload: OffloadConfig = ZENFLOW

    def config(self) -> Config:
        """See Layout."""
        return replace(super().config(), zenflow=FOUR)


ZenLayout = Zen | ZenFamily


def rule_of(run: Trainer) -> ZenFlow:
    (rule,) = [rule for rule in run.optimizer.rules.distinct if isinstance(rule, ZenFlow)]
    return rule


FULL = Layout(tp=2, pp=2, dp=2, sp=True, tied=True, microbatches=2, strategy="optim_grads", steps=4, layers=2)
SPREAD = (
    Layout(dp=2, strategy="no_shard", steps=4, layers=2),
    Layout(dp=4, shard_size=2, strategy="optim_grads_params", steps=4, layers=2),
    Layout(dp=2, clip=0.0, early=True, steps=4, layers=2),
    FULL,
    Layout(dp=2, bf16=True, steps=4, layers=2),
    Layout(tp=2, fp16=True, steps=4, layers=2),
)
EVERY = ZenFlowConfig(zenflow_topk_ratio=1.0, zenflow_update_interval="4", zenflow_overlap_step=True)
AT_ONCE = replace(FOUR, zenflow_update_interval="1", zenflow_select_interval="2")


@pytest.mark.long
@pytest.mark.parametrize("layout", SPREAD, ids=lambda layout: layout.name)
def test_it_is_adamw_with_every_column_hot_or_with_windows_of_one_step(cluster: Cluster, layout: Layout) -> None:
    """To the bit: the same fused kernel, and no element in a tail. In half precision windows of one step send gradients in fp32."""
    plain = cluster.run(layout.world_size, train, layout)
    for zenflow in (EVERY, AT_ONCE):
        found = cluster.run(layout.world_size, train, zen(layout, zenflow))
        assert [record.losses for record in found] == [record.losses for record in plain]
        weights = trained(found)
        assert all(torch.equal(weights[name], tensor) for name, tensor in trained(plain).items())


def chosen(place: Place, layout: Zen) -> tuple[list[tuple[str, int, Tensor, Tensor]], dict[str, int]]:
    """Which columns are hot after some steps and how often all have been updated, by name and first column; and what the choice sent."""
    run = trainer(place, layout)
    for index in range(layout.steps - 1):
        run.step(index)
    run.optimizer.settle()
    traffic = run.mesh.recorder.traffic
    before = {axis: traffic[axis, "all_reduce"].bytes for axis in ("dp", "tp") if (axis, "all_reduce") in traffic}
    rule_of(run)._norms.totals()
    sent = {axis: traffic[axis, "all_reduce"].bytes - before.get(axis, 0) for axis in ("dp", "tp") if (axis, "all_reduce") in traffic}
    run.step(layout.steps - 1)
    run.optimizer.settle()
    found = [
        (piece.rectangle.name, piece.rectangle.offset[0], piece.tensors["hot"].clone(), piece.tensors["updates"].clone())
        for piece in column_pieces(run.optimizer, run.mesh)
        if "hot" in piece.tensors
    ]
    return found, sent


def whole(found: Sequence[tuple[list[tuple[str, int, Tensor, Tensor]], dict[str, int]]]) -> dict[str, tuple[list[int], list[int]]]:
    """By name, all columns. Asserts that ranks agree on those that several have."""
    known: dict[str, dict[int, tuple[int, int]]] = {}
    for parts, _ in found:
        for name, first, hot, updates in parts:
            columns = known.setdefault(name, {})
            for column, values in enumerate(zip(hot.tolist(), updates.tolist(), strict=True), first):
                assert columns.setdefault(column, values) == values, f"ranks have different ideas of {name}"
    return {name: ([columns[c][0] for c in sorted(columns)], [columns[c][1] for c in sorted(columns)]) for name, columns in known.items()}


@pytest.fixture(scope="module")
def alone() -> dict[bool, dict[str, tuple[list[int], list[int]]]]:
    """What one process chooses, with the embedding apart from the head and tied to it."""
    return {tied: whole([chosen(SINGLE, zen(Layout(tied=tied, steps=10, layers=2)))]) for tied in (False, True)}


@pytest.mark.long
@pytest.mark.tries("zenflow_topk_ratio")
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, strategy="no_shard"),
        Layout(dp=2, bucket=3_000),
        Layout(tp=2, dp=2, sp=True, strategy="optim_grads_params"),
        Layout(tp=4, sp=True, microbatches=2),
        FULL,
    ],
    ids=lambda layout: layout.name,
)
def test_the_same_columns_are_chosen_in_every_layout(
    cluster: Cluster, alone: dict[bool, dict[str, tuple[list[int], list[int]]]], layout: Layout
) -> None:
    found = cluster.run(layout.world_size, chosen, zen(replace(layout, steps=10, layers=2)))
    here = whole(found)
    assert here == alone[layout.tied]
    for name, (hot, updates) in here.items():
        assert sum(hot) == len(hot) // 4, name
        assert len(set(updates)) > 1, "columns that are hot are updated more often"
    matrices = [name for name in here if not any(f".{part}_proj" in name for part in ("k", "v", "up"))]
    hidden = {name: len(here[name][0]) for name in matrices}
    if layout.pp == 1:
        sent = found[0][1]
        columns = sum(size // (layout.tp if ".o_proj" in name or ".down_proj" in name else 1) for name, size in hidden.items())
        separate = layout.layers * MODEL.hidden_size if layout.tp > 2 else 0  # keys and values apart from queries
        if layout.dp > 1 and layout.strategy != "no_shard":
            sums, largest = columns + separate, sum(hidden.values())
            assert sent["dp"] == 4 * (sums + largest), "a number for each column to be summed, and one to agree on"
        elements = sum(bucket.numel for bucket in rank_bucket_plan(layout.config(), dp=layout.dp).buckets)
        assert 30 * sum(sent.values()) < 4 * elements


def copied_bytes(rule: ZenFlow) -> tuple[int, int]:
    """Bytes of packed columns that have crossed the bus so far: to the host, and to the device."""
    shards = rule._shards.values()
    return sum(one.to_host_bytes for one in shards), sum(one.to_device_bytes for one in shards)


def crossing(place: Place, layout: Zen) -> tuple[int, int, int]:
    """Bytes that eight steps behind the first choice send each way, and elements of matrices in the shards."""
    run = trainer(place, layout)
    run.step(0)
    rule = rule_of(run)
    before = copied_bytes(rule)
    for index in range(1, 9):
        run.step(index)
    run.optimizer.parameters.settle()
    after = copied_bytes(rule)
    elements = sum(block.rows * block.cols for one in rule._shards.values() for block in one.blocks)
    return after[0] - before[0], after[1] - before[1], elements


@pytest.mark.long
@pytest.mark.tries("zenflow_update_interval", "zenflow_overlap_step")
@pytest.mark.parametrize("zenflow", [FOUR, OVERLAP], ids=["inline", "overlap"])
def test_what_crosses_is_what_is_cold(cluster: Cluster, zenflow: ZenFlowConfig) -> None:
    """At most (1 - k)(1 + 1/S) of the bf16 model in a step."""
    layout = zen(Layout(dp=2, bf16=True, layers=2), replace(zenflow, zenflow_select_interval="100"))
    for to_host, to_device, elements in cluster.run(2, crossing, layout):
        cold = elements - elements // 4
        assert to_host == 8 * 2 * cold, "a gradient in bf16 at each of eight steps"
        assert to_device == (2 if zenflow is FOUR else 1) * 2 * cold, "weights in bf16 after each of two windows, the second one later"
        assert to_host + to_device <= 8 * (1 - 0.25) * (1 + 1 / 4) * 2 * elements


def late(place: Place, layout: Zen) -> str:
    run = trainer(place, layout)
    rule = rule_of(run)
    run.step(0)
    rule.windows.next = lambda *, requested=False: Step(closes=False, applies=False, selects=False)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as error:
        for index in range(1, 12):
            run.step(index)
        run.optimizer.settle()
    return f"{rule.windows.done} {error.value}"


@pytest.mark.parametrize("dp", [1, 2])
def test_a_gradient_that_stays_out_of_the_weights_is_an_error(cluster: Cluster, dp: int) -> None:
    for found in cluster.run(dp, late, zen(Layout(dp=dp, layers=1))):
        assert "gradients of 8 steps ago are not in the weights, at most 7 may be" in found


def save_after(
    place: Place, layout: ZenLayout, folder: Path, steps: int, more: int
) -> tuple[list[float], list[native.Region], list[native.Region]]:
    run = trainer(place, layout)
    for index in range(steps):
        run.step(index)
    native.save(folder, run.optimizer, run.mesh, state_at(steps), layout.config())
    return _later(run, steps, more)


def resume_after(
    place: Place, layout: ZenLayout, folder: Path, steps: int, more: int
) -> tuple[list[float], list[native.Region], list[native.Region]]:
    run = trainer(place, layout)
    assert native.load(folder, run.optimizer, run.mesh, layout.config().model) == state_at(steps)
    return _later(run, steps, more)


def _later(run: Trainer, steps: int, more: int) -> tuple[list[float], list[native.Region], list[native.Region]]:
    """Losses of further steps, and everything before and after them."""
    before = everything(run)
    losses = [run.step(index)[0].item() for index in range(steps, steps + more)]
    run.optimizer.settle()
    return losses, before, everything(run)


def everything(run: Trainer) -> list[native.Region]:
    columns = regions(column_pieces(run.optimizer, run.mesh))
    parts = [replace(part, tensor=part.tensor.clone()) for part in columns]
    return [*copies(run.optimizer), *(replace(part, tensor=part.tensor.double()) for part in parts)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("zenflow", "steps"),
    [pytest.param(FOUR, 1, marks=pytest.mark.long), (FOUR, 7), pytest.param(OVERLAP, 9, marks=pytest.mark.long), (OVERLAP, 11)],
    ids=["inline 1", "inline 7", "overlap 9", "overlap 11"],
)
def test_a_run_that_is_killed_goes_on_as_the_one_that_saved(tmp_path: Path, cluster: Cluster, zenflow: ZenFlowConfig, steps: int) -> None:
    """Behind the first choice, in the middle of a window, at the end of one (that of the second choice), with one in flight."""
    layout = zen(Layout(dp=2, strategy="optim_grads", layers=2), zenflow)
    saved = cluster.run(2, save_after, layout, tmp_path, steps, 6)
    resumed = cluster.run(2, resume_after, layout, tmp_path, steps, 6)
    assert [one[0] for one in resumed] == [one[0] for one in saved]
    for when in (1, 2):
        found, expected = (merged(part for one in runs for part in one[when]) for runs in (resumed, saved))
        assert same(found, expected)
        assert any(key.startswith("optimizer.updates.") for key in found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(
            zen(Layout(dp=2, layers=2)), zen(Layout(tp=2, dp=2, sp=True, strategy="optim_grads_params", layers=2)), marks=pytest.mark.long
        ),
        (
            zen(Layout(tp=4, tied=True, layers=2)),
            zen(Layout(pp=2, dp=2, tied=True, microbatches=2, strategy="optim_grads", bucket=5_000, layers=2)),
        ),
        (ZenFamily(family="phi3"), ZenFamily(family="phi3", tp=4, sp=True)),
        (ZenFamily(family="phi3", tp=4, sp=True), ZenFamily(family="phi3", tp=2, dp=2, sp=True)),
    ],
    ids=["to tp", "to pp", "to queries apart from keys and values in one tensor", "and back"],
)
def test_a_checkpoint_can_be_resharded(tmp_path: Path, cluster: Cluster, one: ZenLayout, other: ZenLayout) -> None:
    """Phi-3 stores queries, keys and values in one tensor; tensor-parallel ranks beyond its key/value heads hold queries apart."""
    saved = cluster.run(one.world_size, save_after, one, tmp_path, 6, 5)
    resumed = cluster.run(other.world_size, resume_after, other, tmp_path, 6, 5)
    assert same(merged(part for rank in resumed for part in rank[1]), merged(part for rank in saved for part in rank[1]))
    assert resumed[0][0] == pytest.approx(saved[0][0], rel=2e-5)
    found, expected = (merged(part for rank in runs for part in rank[2]) for runs in (resumed, saved))
    counted = [key for key in expected if key.startswith(("optimizer.updates.", "optimizer.hot."))]
    assert counted and all(torch.equal(found[key], expected[key]) for key in counted)


def exchange(place: Place, layout: Layout, folder: Path, next_layout: Layout) -> tuple[list[float], list[float]]:
    """Ten steps and a save; what two more give in this mode, and in the other one from the checkpoint."""
    run = trainer(place, layout)
    for index in range(10):
        run.step(index)
    native.save(folder, run.optimizer, run.mesh, state_at(10), layout.config())
    other = trainer(place, next_layout)
    native.load(folder, other.optimizer, other.mesh, next_layout.config().model)
    mine, theirs = ([one.step(index)[0].item() for index in (10, 11)] for one in (run, other))
    return mine, theirs


def test_the_mode_may_change_between_runs(tmp_path: Path) -> None:
    """Every column is due at once in windows of one step, so both modes make the same steps, but for moments that are corrected by
    the number of updates of all columns, or of each."""
    adamw = Layout(layers=2)
    every = zen(adamw, AT_ONCE)
    mine, theirs = exchange(SINGLE, adamw, tmp_path / "a", every)
    assert theirs == mine
    mine, theirs = exchange(SINGLE, every, tmp_path / "b", adamw)
    assert theirs == mine
    mine, theirs = exchange(SINGLE, zen(adamw), tmp_path / "c", adamw)
    # Cold columns have moments of three updates, which AdamW corrects as those of ten: without a recount the step is 1.6 times as long.
    assert theirs[0] == mine[0] and theirs[1] == pytest.approx(mine[1], rel=2e-2)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    run = trainer(SINGLE, zen(Layout(layers=1), FOUR))
    for index in range(3):
        run.step(index)
    run.optimizer.settle()
    before = everything(run)
    run.runtime.step(run.batches(3))
    for shard in run.optimizer.gradients.shards.values():
        shard[5] = torch.nan
    poisoned = run.optimizer.gradients.shards
    for bucket, shard in poisoned.items():
        run.optimizer._take_squared_norm(bucket)
        run.optimizer.rules.by_bucket[bucket].on_reduced(bucket, shard, speculative_lr=None)
    result = run.optimizer.step(OPTIMIZER.lr, clip=1.0)
    assert float(result.skipped) == 1.0
    run.optimizer.settle()
    found = everything(run)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(found, before, strict=True) if "windows" not in a.key)


def course(zenflow: ZenFlowConfig, steps: int) -> tuple[list[int], list[int]]:
    """The steps with which windows closed, and behind which columns were chosen, of a run in one process."""
    run = trainer(SINGLE, zen(Layout(layers=1), zenflow))
    windows, closed, chose = rule_of(run).windows, [], []
    for index in range(steps):
        run.step(index)
        closed += [index + 1] if windows.opened == windows.done else []
        chose += [index + 1] if windows.last_selection == windows.done else []
    return closed, chose


@pytest.mark.tries("zenflow_select_interval", "zenflow_full_warm_up_rounds", "zenflow_update_interval_cap")
def test_windows_close_and_columns_are_chosen_as_the_options_say() -> None:
    assert course(FOUR, 11) == ([1, 5, 9], [1, 9])
    assert course(replace(FOUR, zenflow_full_warm_up_rounds=3), 8) == ([1, 2, 3, 7], [3])
    assert course(replace(FOUR, zenflow_select_interval="4"), 10) == ([1, 5, 9], [1, 5, 9])
    # A hot column's gradient is larger, so a window that asks has several steps, unless its cap is less.
    asking = replace(FOUR, zenflow_update_interval="auto", zenflow_select_interval="100")
    closed, _ = course(asking, 9)
    lengths = [later - before for before, later in pairwise(closed)]
    assert lengths and all(2 <= length <= 4 for length in lengths), closed
    assert course(replace(asking, zenflow_update_interval_cap=2), 9)[0] == [1, 3, 5, 7, 9]


def kept(place: Place, layout: Zen) -> tuple[int, int]:
    """Bytes of host memory that the rule has taken, and what the plan says."""
    run = trainer(place, layout)
    plan = offload_plan(engine_options(layout.config()), run.optimizer.bucket_plan)
    assert plan is not None
    return rule_of(run).nbytes, plan.held


@pytest.mark.parametrize("layout", [Layout(dp=2, bf16=True, layers=1), Layout(tp=2, layers=1)], ids=lambda layout: layout.name)
def test_the_host_holds_what_the_plan_says(cluster: Cluster, layout: Layout) -> None:
    for zenflow in (FOUR, OVERLAP, AT_ONCE):
        for held, planned in cluster.run(2, kept, zen(layout, zenflow)):
            assert held == planned


class Full:
    """Room that is gone."""

    def __getitem__(self, part: object) -> Tensor:
        raise MemoryError("none left")


def failing(place: Place, layout: Zen) -> str:
    run = trainer(place, layout)
    run.step(0)
    rule_of(run)._scratch.whole_grad = Full()  # type: ignore[assignment]
    with pytest.raises(OffloadError) as error:
        for index in range(1, 6):
            run.step(index)
        run.optimizer.settle()
    return str(error.value)


@pytest.mark.parametrize("dp", [1, 2])
def test_an_error_of_the_worker_names_the_bucket(cluster: Cluster, dp: int) -> None:
    for found in cluster.run(dp, failing, zen(Layout(dp=dp, layers=1))):
        assert "optimizer offload, bucket" in found and "got MemoryError: none left" in found


def test_where_nothing_has_columns_it_is_adamw() -> None:
    """Of a model with low-rank additions these alone are trained."""
    layout = Layout(lora=4, layers=1, steps=3)
    plain, found = (train(SINGLE, one) for one in (layout, zen(layout, replace(FOUR, zenflow_update_interval="auto"))))
    assert found.losses == plain.losses
    assert all(torch.equal(one.master, other.master) for one, other in zip(found.pieces, plain.pieces, strict=True))
