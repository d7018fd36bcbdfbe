"""AdamW with moments in bf16: they are rounded when they are kept, in every layout, and go into checkpoints and out of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.checkpoint.native import load, require_complete, save
from megatron_llama.config.schema import Config
from megatron_llama.distributed.launcher import Place
from megatron_llama.plans.memory import ROUNDED_PIECE
from megatron_llama.plans.params import Rectangle
from torch import Tensor

from tests.engine.test_muon import STEPS, gradients, place_of
from tests.harness import Cluster
from tests.parallel.cases import OPTIMIZER, STRATEGIES, Layout, trainer

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
        return replace(config, optimizer=optimizer)


def owned(place: Place, layout: MomentLayout, steps: range, loads: str | None = None, saves: str | None = None) -> Found:
    """What a rank owns after these steps."""
    run = trainer(place, layout)
    if loads is not None:
        load(loads, run.optimizer, run.mesh, layout.config().model)
    for index in steps:
        run.step(index)
    if saves is not None:
        save(saves, run.optimizer, run.mesh, TrainState(1, 8), layout.sized())
    run.optimizer.settle()
    found = [(p.rectangle, {name: tensor.clone() for name, tensor in p.tensors.items()}) for p in run.optimizer.pieces() if p.primary]
    run.optimizer.close()
    return found


def whole(records: list[Found]) -> dict[tuple[str, str], Tensor]:
    found: dict[tuple[str, str], Tensor] = {}
    for rectangle, tensors in (one for record in records for one in record):
        for state, tensor in tensors.items():
            key = (rectangle.name, state)
            found.setdefault(key, torch.full(rectangle.shape, torch.nan, dtype=tensor.dtype))[place_of(rectangle)] = tensor
    return found


def made(layout: MomentLayout, steps: list[dict[str, Tensor]]) -> dict[tuple[str, str], Tensor]:
    """What the formula makes of these gradients: it computes in fp32, from what is kept, and rounds what it keeps."""
    found: dict[tuple[str, str], Tensor] = {}
    o = OPTIMIZER
    for name, gradient in steps[0].items():
        shape = tuple(gradient.shape)
        weight = torch.empty(shape)
        layout.weights()(Rectangle(name, shape, (0,) * len(shape), shape, 0), weight)
        first, second = (torch.zeros(shape, dtype=DTYPES[kept]) for kept in layout.kept)
        for number, step in enumerate(steps, 1):
            norm = torch.nn.utils.get_total_norm(step.values())
            grad = step[name] / ((norm + 1e-6) / layout.clip).clamp(min=1.0)
            m = first.float() + (1 - o.adam_beta1) * (grad - first.float())
            v = BETA2 * second.float() + (1 - BETA2) * grad * grad
            weight -= o.lr * o.weight_decay * (weight.dim() > 1) * weight
            weight -= o.lr / (1 - o.adam_beta1**number) * m / ((v / (1 - BETA2**number)).sqrt() + o.adam_eps)
            first, second = m.to(first.dtype), v.to(second.dtype)
        found |= {(name, "master"): weight, (name, "exp_avg"): first, (name, "exp_avg_sq"): second}
    return found


LAYOUTS = [
    MomentLayout(),
    MomentLayout(kept=("fp32", "bf16")),
    MomentLayout(pp=2, dp=2, tied=True, microbatches=2),
    MomentLayout(tp=2, dp=2, strategy="optim_grads_params", slots="2", kept=("bf16", "fp32")),
    *(pytest.param(MomentLayout(dp=2, strategy=strategy), marks=pytest.mark.long) for strategy in STRATEGIES),
    pytest.param(MomentLayout(dp=4, shard_size=2, strategy="optim_grads"), marks=pytest.mark.long),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{' '.join(layout.kept)} {layout.name}")
def test_every_layout_rounds_what_it_keeps(cluster: Cluster, layout: MomentLayout) -> None:
    """Where sums have another order, a few moments in bf16 are rounded to a neighbour."""
    expected = made(layout, cluster.run(1, gradients, layout.reference)[0])
    found = whole(cluster.run(layout.world_size, owned, layout, range(STEPS)))
    assert found.keys() == expected.keys()
    for (name, state), tensor in found.items():
        wanted = expected[name, state]
        assert tensor.dtype == wanted.dtype
        # A gradient that is all rounding may have another sign, and Adam makes a full step of it.
        near = (1e-6 if layout.world_size == 1 else 1e-5) * (1 if state == "master" else float(wanted.abs().max()))
        far = (tensor.float() - wanted.float()).abs() > near
        assert far.float().mean() < (1e-3 if state == "master" or tensor.dtype == torch.float32 else 2e-2), (name, state)


def test_an_update_in_pieces_is_the_update_of_all() -> None:
    """Also of more elements than a piece has, and a skipped one changes nothing."""
    from megatron_llama.config.schema import OptimizerConfig
    from megatron_llama.engine.update_rule import rounded_adamw_step

    count, config = ROUNDED_PIECE + 128, OptimizerConfig(adam_beta2=BETA2)
    draw = torch.Generator().manual_seed(1)
    master, grad = (torch.randn(count, generator=draw) for _ in range(2))

    def run(of: slice, skips: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        weight = master[of].clone()
        state = {name: torch.zeros_like(weight, dtype=torch.bfloat16) for name in MOMENTS} | {"step": torch.zeros(())}
        for skip in (0.0, 0.0, *[1.0] * skips):
            rounded_adamw_step(
                weight, grad[of] * (1.0 if not skip else torch.nan), state, config, decay=0.1, scale=torch.ones(()), skip=torch.tensor(skip), lr=1e-2
            )
        return weight, state

    weight, state = run(slice(None))
    skipped, same = run(slice(None), skips=True)
    last, rest = run(slice(ROUNDED_PIECE, None))
    assert torch.equal(weight, skipped) and torch.equal(weight[ROUNDED_PIECE:], last) and state["step"] == 2
    for name, tensor in state.items():
        assert torch.equal(tensor, same[name]) and torch.equal(tensor[ROUNDED_PIECE:] if tensor.dim() else tensor, rest[name])


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
