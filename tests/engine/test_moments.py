"""AdamW with moments in bf16 and in 8 bits: rounded when they are kept, alike in every layout, and in checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.checkpoint.native import load, require_complete, save
from megatron_llama.config.schema import Config, OptimizerConfig
from megatron_llama.engine.comm.streams import Future
from megatron_llama.engine.pieces import shard_pieces
from megatron_llama.engine.plan.limits import UPDATE_PIECE
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.engine.rules.moments import EightBitMoment, Table, Tables, open_moment
from megatron_llama.engine.rules.update_rule import rounded_adamw_step
from megatron_llama.errors import CheckpointError
from megatron_llama.launch.launcher import Place
from torch import Tensor

from tests.engine.test_muon import STEPS, gradients, place_of
from tests.harness import Cluster, WorkerError
from tests.parallel.cases import OPTIMIZER, Layout, Trainer, trainer
from tests.torch_twin import drawn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MOMENTS = ("exp_avg", "exp_avg_sq")
BETA2 = 0.95
Found = list[tuple[Rectangle, dict[str, Tensor]]]


@dataclass(frozen=True)
class MomentLayout(Layout):
    """A layout whose moments are kept in these dtypes."""

    kept: tuple[str, str] = ("bf16", "bf16")

    @property
    def reference(self) -> MomentLayout:
        return MomentLayout(**vars(super().reference), kept=self.kept)

    def config(self) -> Config:
        config = super().config()
        first, second = self.kept
        optimizer = replace(config.optimizer, exp_avg_dtype=first, exp_avg_sq_dtype=second, adam_beta2=BETA2)
        # Rows of whole blocks on two tensor-parallel ranks, too.
        return replace(config, model=replace(config.model, intermediate_size=256, head_dim=32), optimizer=optimizer)


def owned(place: Place, layout: MomentLayout, steps: range, loads: str | None = None, saves: str | None = None) -> Found:
    """What a rank owns after these steps."""
    return owned_and_gradients(place, layout, steps, loads, saves)[0]


def owned_and_gradients(
    place: Place, layout: MomentLayout, steps: range, loads: str | None = None, saves: str | None = None
) -> tuple[Found, list[Found]]:
    """What a rank owns after these steps, and the gradients of each step by which it was updated."""
    run = trainer(place, layout)
    if loads is not None:
        load(loads, run.optimizer, run.mesh, layout.config().model)
    gradients: list[Found] = [[] for _ in steps]
    updates = Counter[int]()
    for rule in run.optimizer.rules.distinct:
        rule.step = partial(_recorded, rule.step, run, gradients, updates)  # type: ignore[method-assign]
    for index in steps:
        run.step(index)
    if saves is not None:
        save(saves, run.optimizer, run.mesh, TrainState(1, 8), layout.sized())
    run.optimizer.settle()
    found = [(p.rectangle, {name: tensor.clone() for name, tensor in p.tensors.items()}) for p in shard_pieces(run.optimizer) if p.primary]
    run.optimizer.close()
    return found, gradients


def _recorded(
    step: Callable[..., Future], run: Trainer, gradients: list[Found], updates: Counter[int], bucket: int, grad: Tensor, **how: Any
) -> Future:
    """Note the gradient of a bucket, which is final when the rule gets it, and let the rule go on. Some updates are made in the next step only."""
    for rectangle, where in run.optimizer.bucket_plan.rectangles(bucket, run.mesh.dp_shard.rank):
        gradients[updates[bucket]].append((rectangle, {"gradient": grad[where].view(rectangle.size).clone()}))
    updates[bucket] += 1
    return step(bucket, grad, **how)


def whole(records: list[Found]) -> dict[tuple[str, str], Tensor]:
    found: dict[tuple[str, str], Tensor] = {}
    for rectangle, tensors in (one for record in records for one in record):
        for state, tensor in tensors.items():
            key = (rectangle.name, state)
            found.setdefault(key, torch.full(rectangle.shape, torch.nan if tensor.is_floating_point() else 0, dtype=tensor.dtype))[
                place_of(rectangle)
            ] = tensor
    return found


def table(signed: bool) -> Tensor:
    """The paper's 8-bit dynamic type (arXiv 2110.02861, section 1.3), with -1 for the negative number nearest to 0."""
    decades = [
        torch.linspace(0.1, 1, 2 ** (k if signed else k + 1) + 1, dtype=torch.float64).unfold(0, 2, 1).mean(1) * 10.0 ** (k - 6)
        for k in range(7)
    ]
    positive = torch.cat(decades)
    negative = torch.cat([-positive, torch.tensor([-1.0])]) if signed else torch.empty(0)
    numbers = torch.cat([negative[negative < -positive.min()], torch.tensor([0.0]), positive, torch.tensor([1.0])]).sort().values
    assert len(numbers) == 256
    return numbers.float()


def quantized(values: Tensor, numbers: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix [rows, columns], by comparing every element with every number."""
    rows, columns = values.shape
    blocks = values.reshape(rows, columns // 64, 64)
    scales = blocks.abs().amax(-1)
    share = torch.where(blocks == 0, 0.0, blocks / scales.unsqueeze(-1))
    below = (share.unsqueeze(-1) >= numbers).sum(-1).sub(1).clamp(0, 254)
    way = (share - numbers[below]) / (numbers[below + 1] - numbers[below])
    threshold = ((step * (5**0.5 - 1) / 2 + torch.arange(64, dtype=torch.float64) * 2**0.5) % 1).clamp(0.001, 0.999)
    codes = below + (way > threshold)
    if numbers[0] == 0:
        codes = torch.where(blocks > 0, codes.clamp(min=1), 0)
    return codes.reshape(rows, columns).to(torch.uint8), scales


def read(codes: Tensor, scales: Tensor, numbers: Tensor) -> Tensor:
    return numbers[codes.int()] * scales.repeat_interleave(64, -1)


class Kept:
    """One moment of one tensor, kept as an option says."""

    def __init__(self, state: str, shape: tuple[int, ...], kept: str) -> None:
        self.state, self.bytes = state, kept == "8bit" and len(shape) == 2
        self.numbers = table(signed=state == "exp_avg")
        if self.bytes:
            self.codes, self.scales = torch.zeros(shape, dtype=torch.uint8), torch.zeros(shape[0], shape[1] // 64)
        else:
            self.plain = torch.zeros(shape, dtype=DTYPES.get(kept, torch.float32))

    def read(self) -> Tensor:
        return read(self.codes, self.scales, self.numbers) if self.bytes else self.plain.float()

    def keep(self, values: Tensor, step: int) -> None:
        if self.bytes:
            self.codes, self.scales = quantized(values, self.numbers, step)
        else:
            self.plain = values.to(self.plain.dtype)

    def tensors(self) -> dict[str, Tensor]:
        return {f"{self.state}_codes": self.codes, f"{self.state}_scales": self.scales} if self.bytes else {self.state: self.plain}


def made(layout: MomentLayout, steps: list[dict[str, Tensor]]) -> dict[tuple[str, str], Tensor]:
    """What the formula makes of these gradients: it computes in fp32, from what is kept, and rounds what it keeps."""
    found: dict[tuple[str, str], Tensor] = {}
    o = OPTIMIZER
    for name, gradient in steps[0].items():
        shape = tuple(gradient.shape)
        weight = drawn(layout.weights(), name, shape)
        first, second = (Kept(state, shape, kept) for state, kept in zip(MOMENTS, layout.kept, strict=True))
        for number, step in enumerate(steps, 1):
            norm = torch.nn.utils.get_total_norm(step.values())
            grad = step[name] / ((norm + 1e-6) / layout.clip).clamp(min=1.0)
            m = first.read() + (1 - o.adam_beta1) * (grad - first.read())
            v = BETA2 * second.read() + (1 - BETA2) * grad * grad
            weight -= o.lr * o.weight_decay * (weight.dim() > 1) * weight
            weight -= o.lr / (1 - o.adam_beta1**number) * m / ((v / (1 - BETA2**number)).sqrt() + o.adam_eps)
            first.keep(m, number)
            second.keep(v, number)
        found |= {(name, state): tensor for state, tensor in {"master": weight, **first.tensors(), **second.tensors()}.items()}
    return found


LAYOUTS = [
    MomentLayout(kept=("fp32", "bf16")),
    MomentLayout(tp=2, dp=2, strategy="optim_grads_params", slots="2", kept=("bf16", "fp32")),
    MomentLayout(kept=("8bit", "8bit")),
    MomentLayout(tp=2, dp=2, strategy="optim_grads_params", slots="2", kept=("8bit", "8bit")),
    MomentLayout(pp=2, dp=2, strategy="no_shard", tied=True, microbatches=2, kept=("bf16", "8bit")),
    MomentLayout(dp=4, shard_size=2, strategy="optim_grads"),
]


@pytest.mark.long
@pytest.mark.tries("exp_avg_dtype", "exp_avg_sq_dtype")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{' '.join(layout.kept)} {layout.name}")
def test_every_layout_rounds_what_it_keeps(cluster: Cluster, layout: MomentLayout) -> None:
    """Each layout's own gradients are held against those of one process in the first step, where nothing has been rounded yet. Later ones depend
    on rounding: an element that a processor's sums put on the other side of a threshold changes every gradient. So the formula gets the
    gradients of the layout. Its gradient norm alone is summed in another order, which puts a few elements of thousands on the other side."""
    records = cluster.run(layout.world_size, owned_and_gradients, layout, range(STEPS))
    steps = [{name: gradient for (name, _), gradient in whole([record[1][step] for record in records]).items()} for step in range(STEPS)]
    for name, gradient in cluster.run(1, gradients, layout.reference)[0][0].items():
        torch.testing.assert_close(steps[0][name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()))
    expected = made(layout, steps)
    found = whole([record[0] for record in records])
    assert found.keys() == expected.keys()
    for (name, state), tensor in found.items():
        wanted = expected[name, state]
        assert tensor.dtype == wanted.dtype
        near = 0.0 if state.endswith("_codes") else 1e-6 * float(wanted.abs().max())
        far = ((tensor.float() - wanted.float()).abs() > near).sum().item()
        # About one in 10,000; of a tensor with few elements hardly ever three.
        assert far <= max(2.0, 1e-3 * wanted.numel()), (name, state, far)


@pytest.mark.parametrize("kept", ["bf16", "8bit"])
def test_an_update_in_pieces_is_the_update_of_all(kept: str) -> None:
    """Also of more elements than a piece has, and a skipped one changes nothing."""
    count, config = UPDATE_PIECE + 128, OptimizerConfig(adam_beta2=BETA2)
    tables = Tables.on(torch.device("cpu"))
    draw = torch.Generator().manual_seed(1)
    master, grad = (torch.randn(count, generator=draw) for _ in range(2))

    def run(of: slice, skips: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        weight = master[of].clone()
        moments = [open_moment(weight, kept, tables, signed=name == "exp_avg") for name in MOMENTS]
        step = torch.zeros(())
        # Skipped steps stand where each of them has another moment before it.
        for skip in (*[1.0] * skips, 0.0, *[1.0] * skips, 0.0, *[1.0] * skips):
            gradient = grad[of] * (1.0 if not skip else torch.nan)
            rounded_adamw_step(weight, gradient, *moments, step, config, decay=0.1, scale=torch.ones(()), skip=torch.tensor(skip), lr=1e-2)
        found = {f"{name}{what}": t for name, moment in zip(MOMENTS, moments, strict=True) for what, t in moment.tensors.items()}
        return weight, found | {"step": step}

    weight, state = run(slice(None))
    skipped, same = run(slice(None), skips=True)
    last, rest = run(slice(UPDATE_PIECE, None))
    assert torch.equal(weight, skipped) and torch.equal(weight[UPDATE_PIECE:], last) and state["step"] == 2
    for name, tensor in state.items():
        tail = UPDATE_PIECE // (64 if name.endswith("_scales") else 1)
        assert torch.equal(tensor, same[name]) and torch.equal(tensor[tail:] if tensor.dim() else tensor, rest[name])


@pytest.mark.long
def test_checkpoints_go_on(cluster: Cluster, tmp_path: Path) -> None:
    """To the bit in the same layout; in another one with the same moments; and in another precision with the converted ones."""
    layout, folder = MomentLayout(dp=2), str(tmp_path)
    kept = whole(cluster.run(2, owned, layout, range(2), None, folder))
    straight = whole(cluster.run(2, owned, layout, range(3)))
    resumed = whole(cluster.run(2, owned, layout, range(2, 3), folder))
    assert all(torch.equal(tensor, resumed[key]) for key, tensor in straight.items())
    for other in (MomentLayout(tp=2, strategy="optim_grads_params"), MomentLayout(kept=("fp32", "bf16"))):
        require_complete(tmp_path / "iter_0000001", other.sized(), optimizer=True)
        for (name, state), tensor in whole(cluster.run(other.world_size, owned, other, range(0), folder)).items():
            assert torch.equal(tensor.float(), kept[name, state].float())
            assert tensor.dtype == {"master": torch.float32, **dict(zip(MOMENTS, map(DTYPES.get, other.kept), strict=True))}[state]
    wide = whole(cluster.run(1, owned, MomentLayout(kept=("fp32", "fp32")), range(2), None, str(tmp_path / "wide")))
    for (name, state), tensor in whole(cluster.run(2, owned, layout, range(0), str(tmp_path / "wide"))).items():
        assert torch.equal(tensor, wide[name, state].to(tensor.dtype))


@pytest.mark.long
def test_eight_bits_in_checkpoints(cluster: Cluster, tmp_path: Path) -> None:
    """To the bit in the same layout, and the same bytes in any other; another precision is refused by name."""
    layout, folder = MomentLayout(dp=2, kept=("8bit", "8bit")), str(tmp_path / "bytes")
    kept = whole(cluster.run(2, owned, layout, range(2), None, folder))
    straight = whole(cluster.run(2, owned, layout, range(3)))
    resumed = whole(cluster.run(2, owned, layout, range(2, 3), folder))
    assert resumed.keys() == straight.keys() and all(torch.equal(tensor, resumed[key]) for key, tensor in straight.items())
    assert kept["lm_head.weight", "exp_avg_codes"].dtype == torch.uint8 and kept["model.norm.weight", "exp_avg"].dtype == torch.float32
    for other in (replace(layout, dp=1, tp=2, strategy="optim_grads_params"), replace(layout, dp=1, pp=2)):
        require_complete(tmp_path / "bytes" / "iter_0000001", other.sized(), optimizer=True)
        found = whole(cluster.run(other.world_size, owned, other, range(0), folder))
        assert found.keys() == kept.keys() and all(torch.equal(tensor, kept[key]) for key, tensor in found.items())
    cluster.run(1, owned, MomentLayout(kept=("bf16", "8bit")), range(1), None, str(tmp_path / "mixed"))
    for where, wanted in (("bytes", ("fp32", "fp32")), ("bytes", ("8bit", "bf16")), ("mixed", ("8bit", "8bit"))):
        other = MomentLayout(kept=wanted)
        with pytest.raises(WorkerError, match="precision of moments that saved it, or give --no-load-optim"):
            cluster.run(1, owned, other, range(0), str(tmp_path / where))
        with pytest.raises(CheckpointError, match="precision of moments that saved it, or give --no-load-optim"):
            require_complete(tmp_path / where / "iter_0000001", other.sized(), optimizer=True)


def test_eight_bits_lose_nothing_on_average() -> None:
    """A moment that decays by a thousandth of itself falls, where rounding to the nearest would keep it for ever; and what is positive stays so."""
    everything = slice(0, 6400)
    start = torch.logspace(-5, 0, 6400).view(64, 100).t().flatten().contiguous()
    start[::64] = 1.0  # the scale of each block stays
    for signed in (True, False):
        moment = EightBitMoment(start, Tables.on(torch.device("cpu")), signed=signed)
        moment.keep(everything, start, step=torch.tensor(1.0), skip=torch.tensor(0.0))
        first = moment.read(everything).clone()
        for step in range(2, 1002):
            values = moment.read(everything) * 0.999
            values[::64] = 1.0
            moment.keep(everything, values, step=torch.tensor(float(step)), skip=torch.tensor(0.0))
        last = moment.read(everything)
        falling = torch.arange(6400) % 64 != 0
        assert torch.all(last[::64] == 1.0) and torch.all(last > 0 if not signed else last >= 0)
        # By 1 / e; what is far below the largest has few numbers.
        large = falling & (start > 1e-2)
        assert (last[large] / first[large]).mean() == pytest.approx(0.999**1000, rel=0.05)


@pytest.mark.parametrize("extremes", [(-1.0, 1.0), (-3.0, 2.0)])
def test_the_largest_of_a_block_is_kept_exactly(extremes: tuple[float, float]) -> None:
    """Also a negative one: else it would shrink at each update."""
    values = torch.linspace(*extremes, 64)
    moment = EightBitMoment(values, Tables.on(torch.device("cpu")), signed=True)
    for step in range(1, 6):
        moment.keep(slice(0, 64), values, step=torch.tensor(float(step)), skip=torch.tensor(0.0))
        found = moment.read(slice(0, 64))
        assert found[0] == values[0] and (found - values).abs().max() < 0.015 * values.abs().max()
        # What is kept already is kept as it is.
        moment.keep(slice(0, 64), found.clone(), step=torch.tensor(step + 0.5), skip=torch.tensor(0.0))
        assert torch.equal(moment.read(slice(0, 64)), found)


@pytest.mark.parametrize("signed", [True, False])
def test_places_in_a_table_are_those_of_a_search(signed: bool) -> None:
    """Of all numbers of the table and their neighbours, of the first and last numbers with the same first bits, and of any."""
    made = Table.on(torch.device("cpu"), signed=signed)
    assert torch.equal(made.numbers, table(signed))
    edges = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)
    values = torch.cat([made.numbers, edges, torch.logspace(-9, 0, 100_000), torch.tensor([0.0])])
    values = torch.cat([values, values.nextafter(torch.tensor(-2.0)), values.nextafter(torch.tensor(2.0))])
    values = torch.cat([values, -values]) if signed else values
    values = values[(values.abs() <= 1) & ((values >= 0) | signed)]
    assert len(values) > 300_000
    assert torch.equal(made.below(values).long(), torch.bucketize(values, made.numbers, right=True).sub(1).clamp(0, 254))
