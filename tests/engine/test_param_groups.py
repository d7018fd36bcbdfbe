"""--param-group in every layout and strategy makes what torch.optim makes of parameter groups."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from megatron_llama.config.schema import Config
from megatron_llama.engine.offload_options import OffloadConfig
from megatron_llama.engine.pieces import shard_pieces
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.launch.launcher import Place
from megatron_llama.model.init import InitialWeights

from tests.engine.test_muon import STEPS, Pieces, assert_owned_by_torch, gradients, iterating_in_bf16, torchs
from tests.harness import Cluster
from tests.parallel.cases import OPTIMIZER, Layout, trainer

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


@iterating_in_bf16()
def after(place: Place, layout: GroupLayout) -> Pieces:
    """What a rank owns after some steps."""
    run = trainer(place, layout)
    for index in range(STEPS):
        run.step(index)
    run.optimizer.settle()
    pieces = [(p.rectangle, p.tensors["master"].clone()) for p in shard_pieces(run.optimizer)]
    run.optimizer.close()
    return pieces


LAYOUTS = [
    GroupLayout(tp=2, dp=2, strategy="optim_grads_params", slots="1", grad_slots=1, fp64=True),
    GroupLayout(pp=2, dp=2, strategy="no_shard", fp64=True, tied=True, microbatches=2),
    GroupLayout(dp=2, strategy="optim_grads", fp64=True, clip=0.0, early=True),
    GroupLayout(fp64=True, optimizer="muon"),
    GroupLayout(dp=2, strategy="optim_grads", fp64=True, offload=ZENFLOW),
    GroupLayout(dp=2, strategy="optim", fp64=True, offload=replace(EXACT, offload_speculative=True)),
]


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.optimizer} {layout.name}")
def test_every_layout_makes_what_torch_makes(cluster: Cluster, layout: GroupLayout) -> None:
    """Of the gradients of one process. In fp64: elsewhere sums have another order."""
    how = {"adjust_lr_fn": "match_rms_adamw"} if layout.optimizer == "muon" else {}
    expected = torchs(layout, cluster.run(1, gradients, layout.reference)[0], options, **how)
    assert_owned_by_torch(cluster.run(layout.world_size, after, layout), expected, atol=1e-9)


def test_initial_weights_have_the_size_of_their_group() -> None:
    config = GroupLayout(groups=("lm_head*: init_std=0", "*_proj.weight: init_std=0.5, lr_mult=0.1")).config()
    source, plain = InitialWeights.of(config), InitialWeights.of(replace(config, optimizer=OPTIMIZER))
    for name, factor in (("lm_head.weight", 0.0), ("model.layers.0.mlp.up_proj.weight", 0.5), ("model.embed_tokens.weight", 0.05)):
        drawn, before = torch.empty(64, 64), torch.empty(64, 64)
        rectangle = Rectangle(name, (64, 64), (0, 0), (64, 64), 0)
        source(rectangle, drawn)
        plain(rectangle, before)
        torch.testing.assert_close(drawn, before * (factor / config.model.initializer_range))
