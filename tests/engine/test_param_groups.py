"""--param-group in every layout and strategy makes what torch.optim makes of parameter groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from megatron_llama.config.schema import Config
from megatron_llama.engine.offload_options import OffloadConfig
from megatron_llama.engine.pieces import shard_pieces
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.launch.launcher import Place
from megatron_llama.model.init import InitialWeights
from torch import Tensor

from tests.engine.test_muon import gradients, place_of
from tests.harness import Cluster
from tests.parallel.cases import OPTIMIZER, STRATEGIES, Layout, trainer

STEPS = 3
GROUPS = ("embed*: lr=3e-3, weight_decay=0", "mlp.*: lr_mult=0.5", "*norm.weight: weight_decay=0.05", "layers.1.self_attn.*: lr_mult=2")
EXACT = OffloadConfig(optimizer_offload="exact")
ZENFLOW = OffloadConfig(optimizer_offload="zenflow")


@dataclass(frozen=True)
class GroupLayout(Layout):
    """A layout whose parameters have groups."""

    groups: tuple[str, ...] = GROUPS
    optimizer: str = "adam"

    @property
    def reference(self) -> GroupLayout:
        return GroupLayout(**vars(super().reference), groups=self.groups, optimizer=self.optimizer)

    def config(self) -> Config:
        config = super().config()
        optimizer = replace(config.optimizer, param_group=self.groups, optimizer=self.optimizer)
        # Steps that update everything are exact, also with ZenFlow.
        zenflow = replace(config.zenflow, zenflow_full_warm_up_rounds=STEPS)
        return replace(config, optimizer=optimizer, zenflow=zenflow)


def options(name: str, dims: int) -> tuple[float, float]:
    """Learning rate and decay of a parameter, by what GROUPS says."""
    lr, decay = OPTIMIZER.lr, OPTIMIZER.weight_decay if dims > 1 else 0.0
    if "embed" in name:
        return 3e-3, 0.0
    if ".mlp." in name:
        return 0.5 * lr, decay
    if name.endswith("norm.weight"):
        return lr, 0.05
    if ".layers.1.self_attn." in name:
        return 2 * lr, decay
    return lr, decay


def torchs(parameters: Mapping[str, torch.nn.Parameter], *, muon: bool = False) -> list[torch.optim.Optimizer]:
    """torch's optimizers, with a group for each parameter."""
    groups: dict[bool, list[dict[str, object]]] = {True: [], False: []}
    for name, parameter in parameters.items():
        lr, decay = options(name, parameter.dim())
        groups[muon and parameter.dim() == 2 and ".layers." in name].append({"params": [parameter], "lr": lr, "weight_decay": decay})
    o = OPTIMIZER
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups[False], betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps)]
    return [*found, torch.optim.Muon(groups[True], adjust_lr_fn="match_rms_adamw")] if muon else found


def after(place: Place, layout: GroupLayout) -> list[tuple[Rectangle, Tensor]]:
    """What a rank owns after some steps."""
    run = trainer(place, layout)
    for index in range(STEPS):
        run.step(index)
    run.optimizer.settle()
    pieces = [(p.rectangle, p.tensors["master"].clone()) for p in shard_pieces(run.optimizer)]
    run.optimizer.close()
    return pieces


LAYOUTS = [
    GroupLayout(clip=0.0),
    GroupLayout(dp=2, strategy="optim_grads_params", fp64=True, microbatches=2),
    GroupLayout(pp=2, dp=2, fp64=True, tied=True, microbatches=2),
    GroupLayout(dp=2, strategy="optim", fp64=True, offload=EXACT),
    GroupLayout(fp64=True, optimizer="muon"),
    *(GroupLayout(dp=2, strategy=strategy, fp64=True, clip=0.0, early=True) for strategy in STRATEGIES),
    GroupLayout(tp=2, dp=2, strategy="optim_grads_params", slots="1", grad_slots=1, fp64=True),
    GroupLayout(dp=2, strategy="optim_grads", grad_slots=1, fp64=True, microbatches=2),
    GroupLayout(tp=4, kv_heads=2, fp64=True, strategy="optim_grads_params"),
    GroupLayout(dp=4, shard_size=2, strategy="optim_grads_params", fp64=True),
    GroupLayout(dp=2, strategy="optim_grads", fp64=True, offload=ZENFLOW),
    GroupLayout(dp=2, strategy="optim_grads", fp64=True, offload=replace(EXACT, offload_speculative=True)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.optimizer} {layout.name}")
def test_every_layout_makes_what_torch_makes(cluster: Cluster, layout: GroupLayout) -> None:
    """Of the gradients of one process. In fp64: elsewhere sums have another order."""
    found = cluster.run(1, gradients, layout.reference)[0]
    parameters = {}
    for name, gradient in found[0].items():
        weight = torch.empty_like(gradient)
        layout.weights()(Rectangle(name, tuple(gradient.shape), (0,) * gradient.dim(), tuple(gradient.shape), 0), weight)
        parameters[name] = torch.nn.Parameter(weight)
    optimizers = torchs(parameters, muon=layout.optimizer == "muon")
    for step in found:
        # The engine's factor is in fp32.
        norm = torch.nn.utils.get_total_norm(step.values())
        scale = ((norm + 1e-6) / layout.clip).clamp(min=1.0).to(torch.float32) if layout.clip else 1.0
        for name, parameter in parameters.items():
            parameter.grad = step[name] / scale
        for optimizer in optimizers:
            optimizer.step()
    seen = set[str]()
    for pieces in cluster.run(layout.world_size, after, layout):
        for rectangle, master in pieces:
            seen.add(rectangle.name)
            expected = parameters[rectangle.name].detach()[place_of(rectangle)]
            torch.testing.assert_close(master, expected, rtol=0, atol=1e-9 if layout.fp64 else 1e-7)
    assert seen == parameters.keys()


def test_initial_weights_have_the_size_of_their_group() -> None:
    config = GroupLayout(groups=("lm_head*: init_std=0", "*_proj.weight: init_std=0.5, lr_mult=0.1")).config()
    source, plain = InitialWeights.of(config), InitialWeights.of(replace(config, optimizer=OPTIMIZER))
    for name, factor in (("lm_head.weight", 0.0), ("model.layers.0.mlp.up_proj.weight", 0.5), ("model.embed_tokens.weight", 0.05)):
        drawn, before = torch.empty(64, 64), torch.empty(64, 64)
        rectangle = Rectangle(name, (64, 64), (0, 0), (64, 64), 0)
        source(rectangle, drawn)
        plain(rectangle, before)
        torch.testing.assert_close(drawn, before * (factor / config.model.initializer_range))
