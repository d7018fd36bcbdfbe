"""Columns of shards: packing, choosing, updating, and when."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.offload.zenflow import columns as in_parts
from megatron_llama.engine.offload.zenflow.columns import (
    AT_ONCE,
    ROWS_OF,
    AccumulatedGradient,
    Block,
    ColdColumns,
    ColumnSet,
    HotColumns,
    Packing,
    adamw_columns,
    adamw_columns_,
    blocks_of,
)
from megatron_llama.engine.offload.zenflow.schedule import AutoInterval, Intervals, Step, UpdateWindows
from megatron_llama.engine.offload.zenflow.selection import ColumnNorms, Matrix, select_columns
from megatron_llama.engine.options import UpdateOptions
from megatron_llama.engine.plan.buckets import BucketPlan, Segment
from megatron_llama.engine.plan.specs import HFSlice, ParamSpec
from megatron_llama.engine.plan.zenflow import hot_column_count
from megatron_llama.engine.rules.bias_correction import bias_corrections
from megatron_llama.pipeline.plan.run_engine import rank_bucket_plan
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.cases import Layout

HOST = torch.device("cpu")


def segment(rows: int, width: int, low: int, stop: int, in_shard: int) -> Segment:
    name = "model.layers.0.mlp.down_proj.weight"
    spec = ParamSpec(name, (rows, width), (HFSlice(name, (rows, width), 0, rows),), decay=True)
    return Segment(spec, low, 0, in_shard, stop - low)


def test_blocks_cover_a_segment_once_with_the_right_columns() -> None:
    draw = random.Random(1)
    for _ in range(300):
        rows, width = draw.randint(1, 6), draw.randint(1, 7)
        low = draw.randrange(rows * width)
        one = segment(rows, width, low, draw.randint(low + 1, rows * width), draw.randrange(50))
        found = list(blocks_of(one, 3))
        assert len(found) <= 3 and all(block.matrix == 3 for block in found)
        covered = [
            (block.start + r * block.cols + c, block.col + c) for block in found for r in range(block.rows) for c in range(block.cols)
        ]
        assert covered == [(one.in_shard + at - low, at % width) for at in range(low, low + one.length)]


def packing(mask: Tensor) -> tuple[Packing, list[Block], Tensor]:
    """Of a shard of 7 x 5 elements from the third, with something before and behind; and the columns of its elements."""
    blocks = list(blocks_of(segment(9, 5, 2, 38, 10), 0))
    columns = torch.full((64,), -1)
    columns[10:46] = torch.arange(2, 38) % 5
    return Packing(blocks, [mask], HOST), blocks, columns


@pytest.mark.parametrize("at_once", [AT_ONCE, 6, 1])
@pytest.mark.parametrize("chosen", [[0], [1, 4], [2, 3, 4], [], [0, 1, 2, 3, 4]])
def test_packing_takes_the_chosen_columns_and_puts_them_back(chosen: list[int], at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_parts, "AT_ONCE", at_once)
    mask = torch.zeros(5, dtype=torch.bool)
    mask[chosen] = True
    one, _, columns = packing(mask)
    shard = torch.randn(64)
    inside = torch.isin(columns, torch.tensor(chosen, dtype=torch.int64))
    assert one.numel == int(inside.sum()) and one.padded % 64 == 0 and one.padded - one.numel < 64
    packed = torch.full((one.numel + 3,), 7.0, dtype=torch.bfloat16)
    one.pack(shard, packed)
    assert torch.equal(packed[: one.numel], shard[inside].to(torch.bfloat16)) and bool((packed[one.numel :] == 7).all())
    other = torch.zeros(64)
    one.unpack(packed, other)
    assert torch.equal(other[inside], shard[inside].bfloat16().float()) and not other[~inside].any()


class Largest(TorchDispatchMode):
    """Elements of the largest memory that an operator has taken."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and not any(isinstance(one, Tensor) and alias(one, found) for one in args):
            self.numel = max(self.numel, found.numel())
        return found


def alias(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_nothing_takes_much_memory_that_nobody_has_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of a matrix: a shard in fp32 may be as large as half of a model in bf16."""
    monkeypatch.setattr(in_parts, "AT_ONCE", 500)
    rows, mask = 400, torch.tensor([True, False, True, True, False])
    blocks, shard = [Block(0, 0, rows, 0, 5)], torch.randn(5 * rows)
    one = ColumnSet.of(blocks, [mask], [torch.tensor([3.0, 3.0, 2.0, 3.0, 3.0])], HOST)
    hot = HotColumns(one, decay=0.1, options=UpdateOptions(), dtype=torch.float32, device=HOST)
    matrix = Matrix("m", 0, 5, 5, False)
    norms, asking = ColumnNorms([matrix], Mesh.single()), AutoInterval([matrix], 0.5, Mesh.single())
    asking.begin_window([mask])
    packed, room = torch.zeros(one.on_device.numel, dtype=torch.bfloat16), torch.zeros(5 * rows)
    scale, skip = torch.ones(()), torch.zeros(())
    with Largest() as largest:
        one.on_device.pack(shard, packed)
        one.on_device.unpack(packed, shard)
        hot.step(shard, shard, room, scale=scale, skip=skip, lr=0.1)
        norms.add(shard, blocks)
        asking.add(shard, blocks)
    assert 0 < largest.numel <= 500
    torch.testing.assert_close(norms.totals()["m"], shard.view(rows, 5).square().sum(0))
    torch.testing.assert_close(asking._step[:, 0], torch.stack([shard.view(rows, 5)[:, on].abs().sum() for on in (mask, ~mask)]))


def test_ties_go_to_the_first_columns_and_the_share_is_rounded_up() -> None:
    norms = {"a": torch.tensor([1.0, 3.0, 1.0, 3.0, 1.0]), "b": torch.tensor([0.0, 0.0, 0.0])}
    found = select_columns(norms, 0.5)
    assert found["a"].tolist() == [True, True, False, True, False] and found["b"].tolist() == [True, True, False]
    assert select_columns(norms, 0.5)["a"].equal(found["a"])
    assert [hot_column_count(ratio, 64) for ratio in (0.1, 0.5, 1.0, 1e-9)] == [7, 32, 64, 1]
    assert hot_column_count(0.1, 50) == hot_column_count(0.3, 16) == 5  # not what 0.1 and 0.3 lack to what they are called


def specs(layout: BucketPlan) -> dict[str, Matrix]:
    return {p.spec.name: Matrix.of(p.spec) for bucket in layout.buckets for p in bucket.placements if len(p.spec.shape) == 2}


def test_matrices_know_their_columns_over_tp_and_share_attention_inputs() -> None:
    whole = specs(rank_bucket_plan(Layout().config(), dp=1))
    parts = [specs(rank_bucket_plan(Layout(tp=4).config(), dp=1, tp_rank=rank)) for rank in range(4)]
    owner = "model.layers.1.self_attn"
    assert whole[f"{owner}.qkv_proj.weight"] == parts[3][f"{owner}.q_proj.weight"] == parts[2][f"{owner}.kv_proj.weight"]
    for leaf, total in ((f"{owner}.o_proj", 64), ("model.layers.1.mlp.down_proj", 160)):
        found = [part[f"{leaf}.weight"] for part in parts]
        assert [one.first for one in found] == [rank * total // 4 for rank in range(4)]
        assert {(one.name, one.total, one.columns) for one in found} == {(leaf, total, total // 4)}
        assert found[1].local(torch.arange(total)).tolist() == list(range(total // 4, total // 2))


def adamw(values: Tensor, grads: list[Tensor], config: UpdateOptions) -> Tensor:
    """torch's own."""
    parameter = torch.nn.Parameter(values.clone())
    rule = torch.optim.AdamW([parameter], lr=0.1, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, weight_decay=0.2)
    for grad in grads:
        parameter.grad = grad
        rule.step()
    return parameter.detach()


def test_columns_are_corrected_by_their_own_number_of_updates() -> None:
    config, start = UpdateOptions(), torch.randn(40, 3)
    grads = [torch.randn(40, 3) for _ in range(5)]
    state = (start.clone(), torch.zeros(40, 3), torch.zeros(40, 3))
    counts = torch.zeros(3, dtype=torch.int64)
    for step, grad in enumerate(grads):
        takes = torch.tensor([True, step % 2 == 0, step == 4])  # 5, 3 and 1 updates
        counts += takes
        new = adamw_columns(state, grad, bias_corrections(counts.clamp(min=1), config, torch.float32), config, lr=0.1, decay=0.2)
        for tensor, value in zip(state, new, strict=True):
            tensor.copy_(torch.where(takes, value, tensor))
    for column, wanted in enumerate(([0, 1, 2, 3, 4], [0, 2, 4], [4])):
        expected = adamw(start[:, column], [grads[step][:, column] for step in wanted], config)
        torch.testing.assert_close(state[0][:, column], expected, rtol=2e-6, atol=1e-7)


def test_in_place_and_in_parts_changes_no_bit() -> None:
    config, rows = UpdateOptions(), ROWS_OF // 50
    state = (torch.randn(rows, 100), torch.randn(rows, 100), torch.rand(rows, 100))
    grad, corrected = (torch.randn(rows, 100), bias_corrections(torch.arange(1, 101), config, torch.float32))
    expected = adamw_columns(state, grad, corrected, config, lr=0.1, decay=0.2)
    adamw_columns_(state, grad, corrected, config, lr=0.1, decay=0.2)
    assert all(torch.equal(found, wanted) for found, wanted in zip(state, expected, strict=True))
    assert float(bias_corrections(torch.tensor([1]), config, torch.float32)[1] ** 2) == pytest.approx(1e-3, rel=1e-6)


def test_a_window_sums_clipped_gradients_and_leaves_out_skipped_steps() -> None:
    window, grads = (AccumulatedGradient(torch.full((ROWS_OF + 5,), 9.0)), [torch.randn(ROWS_OF + 5) for _ in range(3)])
    for grad, scale, skip in zip(grads, (2.0, 1.0, 3.0), (False, True, False), strict=True):
        window.add(grad.to(torch.bfloat16), torch.tensor(scale), skip=skip)
    assert window.steps == 2
    assert torch.equal(window.total, grads[0].bfloat16().float() / 2.0 + grads[2].bfloat16().float() / 3.0)


def steps(windows: UpdateWindows, count: int) -> list[Step]:
    found = []
    for _ in range(count):
        found.append(windows.next())
        windows.end(found[-1])
        if found[-1].selects:
            windows.selected()
    return found


def test_windows_close_and_columns_are_chosen_when_they_should() -> None:
    windows = UpdateWindows(Intervals(update=3, auto=False, overlap=True, warm_up_rounds=2, selection=5))
    found = steps(windows, 12)
    assert [step.closes for step in found] == [True, True, *[False, False, True] * 3, False]
    assert [number for number, step in enumerate(found, 1) if step.selects] == [2, 8]
    assert [number for number, step in enumerate(found, 1) if step.applies] == [1, 2, 8]
    waiting = steps(UpdateWindows(Intervals(3, False, False, 0, 0)), 8)
    assert [step.applies for step in waiting] == [step.closes for step in waiting] == [True, *[False, False, True] * 2, False]
    assert [step.selects for step in waiting] == [True, *[False] * 7], "the first step has nothing to go by, 0 is never again"


def test_a_window_that_asks_closes_earlier_and_one_that_is_settled_begins_anew() -> None:
    windows = UpdateWindows(Intervals(update=4, auto=True, overlap=False, warm_up_rounds=0, selection=0))
    steps(windows, 3)
    assert not windows.next().closes and windows.next(requested=True).closes
    windows.settled()
    assert [step.closes for step in steps(windows, 4)] == [False, False, False, True]
    fixed = UpdateWindows(Intervals(update=4, auto=False, overlap=False, warm_up_rounds=0, selection=0), done=2, last_selection=1, opened=1)
    assert not fixed.next(requested=True).closes


def test_a_late_gradient_is_an_error() -> None:
    windows = UpdateWindows(Intervals(update=4, auto=False, overlap=True, warm_up_rounds=0, selection=0))
    windows.check_staleness(10, 17, "a bucket")
    windows.check_staleness(None, 99, "a bucket")
    with pytest.raises(RuntimeError, match="a bucket: gradients of 8 steps ago are not in the weights, at most 7 may be"):
        windows.check_staleness(10, 18, "a bucket")


def test_cold_columns_are_updated_by_their_own_counts_and_hot_ones_left_out() -> None:
    """One fused call for most, column by column for the others: as if each had been updated on its own."""
    config, mask = UpdateOptions(), torch.tensor([True, True, False, True, True])
    one, blocks, columns = packing(mask)
    counts, start = (torch.tensor([4.0, 4.0, 9.0, 7.0, 2.0], dtype=torch.float64), tuple(torch.rand(64) for _ in range(3)))
    host_state = (start[0].clone(), start[1].clone(), start[2].clone())
    cold = ColdColumns(host_state, [torch.zeros(64)], decay=0.1, options=config)
    cold.select(blocks, [mask], [counts])
    grads = [torch.randn(one.numel) for _ in range(2)]
    for grad in grads:
        cold.accumulated[0].add(grad, torch.tensor(2.0), skip=False)
    cold.update(0, one, torch.empty(64), lr=0.1)
    mean = torch.zeros(64)
    one.unpack((grads[0] + grads[1]) / 4, mean)
    for column, before in enumerate(counts.tolist()):
        here = columns == column
        if mask[column]:
            state = (start[0][here].unsqueeze(1), start[1][here].unsqueeze(1), start[2][here].unsqueeze(1))
            corrected = bias_corrections(torch.tensor([before + 1]), config, torch.float32)
            expected = adamw_columns(state, mean[here].unsqueeze(1), corrected, config, lr=0.1, decay=0.1)
            for tensor, wanted in zip(host_state, expected, strict=True):
                torch.testing.assert_close(tensor[here], wanted.squeeze(1), rtol=2e-6, atol=1e-7)
    assert cold.updates == 1 and cold.accumulated[0].steps == 0
