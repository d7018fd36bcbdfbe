"""Models in fp16, whose loss the engine scales."""

from __future__ import annotations

import warnings
from typing import Any

import megatron_llama as ml
import pytest
import torch
from megatron_llama.engine.shard.accesses import PassError
from megatron_llama.errors import CheckpointError, ConfigError
from megatron_llama.launch.launcher import Place

from tests.engine.shard.test_units import DECAY, LR, MICROBATCHES, Block, Router, cast, in_order, inputs, loss_of, net
from tests.harness import Cluster
from tests.torch_twin import by_decay

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
STEPS = 20
SCALING = ml.LossScaling(initial_loss_scale=2.0**30, loss_scale_window=3, hysteresis=1)
"""It overflows in the first steps, and again when it has grown."""


def engine_of(model: torch.nn.Module, **options: Any) -> ml.ModuleEngine:
    given = {"units": [Block], "dtype": torch.float16, "microbatches": MICROBATCHES, "loss_scaling": SCALING}
    return ml.shard(model, optimizer=ml.AdamW(lr=LR, weight_decay=DECAY), **(given | options))


class Twin:
    """One process in fp16 with masters in fp32, and the same rule of the scale."""

    def __init__(self, world: int, own: dict[type[torch.nn.Module], torch.dtype], *, each_microbatch: bool) -> None:
        self.masters, self.model = net(), net()
        cast(self.model, own, torch.float16)
        self.world, self.each_microbatch = world, each_microbatch
        self.optimizer = torch.optim.AdamW(by_decay(self.masters.parameters(), DECAY), lr=LR, fused=True)
        self.scale, self.clean = SCALING.initial_loss_scale, 0

    def step(self, step: int) -> tuple[list[list[float]], bool]:
        """Losses by rank and microbatch, and whether the step is skipped."""
        losses: list[list[float]] = []
        grads = {}
        for rank in range(self.world):
            losses.append([])
            for microbatch in range(MICROBATCHES):
                loss = loss_of(self.model(inputs(step, microbatch, rank).half()))
                losses[-1].append(loss.item())
                (loss * self.scale).backward()
                grads[rank, microbatch] = [parameter.grad.float() for parameter in self.model.parameters()]
                self.model.zero_grad()
        for number, master in enumerate(self.masters.parameters()):
            by_rank = [[grads[rank, m][number] for m in range(MICROBATCHES)] for rank in range(self.world)]
            outer = list(zip(*by_rank, strict=True)) if self.each_microbatch else by_rank
            master.grad = in_order([in_order(inner) for inner in outer]) / (self.world * self.scale)
        skipped = not all(bool(master.grad.isfinite().all()) for master in self.masters.parameters())
        if skipped:
            self.scale, self.clean = self.scale / 2, 0
        else:
            self.optimizer.step()
            self.clean += 1
            if self.clean == SCALING.loss_scale_window:
                self.scale, self.clean = self.scale * 2, 0
        for master, computes in zip(self.masters.parameters(), self.model.parameters(), strict=True):
            computes.data.copy_(master.data)
        return losses, skipped


def trained(place: Place, strategy: str, mixed: bool) -> tuple[bool, int]:
    """Half of the steps by an engine that takes over the state of the one before."""
    own = {Router: torch.float32} if mixed else {}
    options: dict[str, Any] = {"strategy": strategy, "units": [Block, ml.unit(Router, dtype=torch.float32)] if mixed else [Block]}
    twin = Twin(place.world_size, own, each_microbatch=strategy.startswith("optim_grads"))
    model = net()
    engine = engine_of(model, **options)
    same, skips = True, 0
    for step in range(STEPS):
        if step == STEPS // 2:
            state = engine.state_dict()
            engine.close()
            model = net(1)
            engine = engine_of(model, **options)
            engine.load_state_dict(state)
        scale = twin.scale
        losses, skipped = twin.step(step)
        for microbatch in range(MICROBATCHES):
            loss = loss_of(model(inputs(step, microbatch, place.rank)))
            same &= loss.item() == losses[place.rank][microbatch]
            if microbatch:
                engine.backward(loss)
            else:
                engine.scale(loss).backward()
        result = engine.step()
        same &= float(result.loss_scale) == scale and float(result.skipped) == skipped
        skips += skipped
    with engine.gathered(modify=True):
        same &= all(map(torch.equal, model.parameters(), twin.masters.parameters()))
    engine.close()
    return bool(same), skips


@pytest.mark.few(1, all=4)
@pytest.mark.parametrize("strategy", STRATEGIES[::-1])
@pytest.mark.parametrize("mixed", [False, True])
def test_fp16_has_the_bits_of_one_process(mixed: bool, strategy: str, cluster: Cluster) -> None:
    for same, skips in cluster.run(2, trained, strategy, mixed):
        assert same and 2 < skips < STEPS - 6


@pytest.mark.long
@pytest.mark.parametrize("strategy", [STRATEGIES[-1], STRATEGIES[0]])
def test_fp16_over_four_ranks_has_the_bits_of_one_process(strategy: str, cluster: Cluster) -> None:
    for same, skips in cluster.run(4, trained, strategy, True):
        assert same and 2 < skips < STEPS - 6


def test_a_loss_that_is_not_scaled_is_refused() -> None:
    model = net()
    with engine_of(model) as engine, pytest.raises(PassError, match=r"backward: got a loss that the engine has not scaled"):
        engine.scale(loss_of(model(inputs(0, 0, 0))))
        loss_of(model(inputs(0, 0, 0))).backward()


def test_recomputed_units_and_frozen_models_in_fp16() -> None:
    model = net(recomputes=True)
    with engine_of(model, microbatches=1) as engine:
        engine.backward(loss_of(model(inputs(0, 0, 0))))
        engine.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        teacher = net().requires_grad_(False)
        with ml.shard(teacher, units=[Block], dtype=torch.float16) as engine:
            x = inputs(0, 0, 0).requires_grad_()
            loss_of(teacher(x)).backward()
            assert x.grad is not None and "loss_scale" not in engine.state_dict()


def test_scales_of_other_engines_are_refused() -> None:
    model = net()
    with engine_of(model, dtype=torch.bfloat16) as engine:
        loss = loss_of(model(inputs(0, 0, 0)))
        assert engine.scale(loss) is loss
    with engine_of(net(), dtype=torch.bfloat16) as engine, pytest.raises(CheckpointError, match="expected nothing without fp16"):
        engine.load_state_dict(engine.state_dict() | {"loss_scale": torch.tensor([1.0, 0.0, 0.0])})
    with engine_of(net()) as engine, pytest.raises(CheckpointError, match="expected the scale and two counts"):
        engine.load_state_dict(engine.state_dict() | {"loss_scale": torch.tensor([0.0, 0.0, 0.0])})
    for wrong, message in (({"loss_scaling": 3}, "loss_scaling: got 3"), ({"optimizer_offload": "exact"}, "optimizer_offload: got 'exact' for a model in torch.float16")):
        with pytest.raises(ConfigError, match=message):
            engine_of(net(), **wrong)
