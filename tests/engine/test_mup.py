"""The recipe of docs/optimizers.md for width: with it a step changes what layers compute by as much in a wide model as in a narrow one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron_llama.config.schema import Config
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.llama import build_stages
from megatron_llama.model.nn.functional import Residual
from megatron_llama.model.plan.run_params import param_groups
from megatron_llama.pipeline.build import build_optimizer
from megatron_llama.pipeline.runtime import PipelineRuntime
from torch import Tensor, nn

from tests.harness import Cluster
from tests.parallel.cases import GLOBAL_BATCH_SIZE, MODEL, Layout, batch

BASE = 64
WIDTHS = (64, 256)
STEPS = 4
LR = 4e-3


def mup(times: int) -> tuple[str, ...]:
    """The groups of a model that is so many times as wide as the one for which --lr was chosen."""
    scaled = f"lr_mult={1 / times}, weight_decay={0.1 * times}"
    return (f"*_proj.weight: {scaled}, init_std={0.02 / times**0.5}", f"lm_head*: {scaled}, init_std={0.02 / times}")


def coordinates(place: Place, width: int, groups: tuple[str, ...]) -> dict[str, float]:
    """By how much some steps change what each layer makes of the same text: the mean size of the change of an element."""
    plain = Layout().sized()
    model = replace(MODEL, hidden_size=width, intermediate_size=2 * width, num_attention_heads=width // 16, num_key_value_heads=width // 16)
    config: Config = replace(
        plain,
        model=replace(model, num_hidden_layers=2, initializer_range=0.02),
        optimizer=replace(plain.optimizer, lr=LR, param_group=groups, adam_beta2=0.95),
    )
    mesh = build_mesh(config, rank=place.rank, world_size=1, device=torch.device("cpu"))
    stages = build_stages(config, mesh)
    engine = build_optimizer(config, stages.values(), mesh)
    engine.load_weights(InitialWeights.of(config))
    runtime = PipelineRuntime(stages, engine, mesh, config, dtype=torch.float32)
    seen: dict[str, Tensor] = {}
    [stage] = stages.values()

    def watch(module: nn.Module, name: str) -> None:
        def keep(_: nn.Module, __: object, out: Residual | tuple[Tensor, Tensor]) -> None:
            # A norm returns what it was given, too.
            seen[name] = (out.sum() if isinstance(out, Residual) else out[1]).detach().clone()

        module.register_forward_hook(keep)

    for name, block in stage.model.layers.named_children():
        watch(block, f"block {name}")
    watch(stage.model.norm, "logits")
    rates = [group.lr for group in param_groups(config).configs]
    found: dict[str, Tensor] = {}
    for _ in range(STEPS + 1):
        seen.clear()
        runtime.step([batch(range(GLOBAL_BATCH_SIZE))])
        seen["logits"] = seen["logits"] @ stage.lm_head.weight.detach().T
        found = found or dict(seen)
        engine.step(rates, clip=0.0)
    engine.close()
    return {name: (seen[name] - found[name]).abs().mean().item() for name in seen}


@pytest.mark.long
def test_updates_are_as_large_in_a_wide_model_as_in_a_narrow_one(cluster: Cluster) -> None:
    """Yang et al., 2022, appendix D.1: the coordinate check. Without the groups it grows with the width."""
    for groups, holds in ((mup, True), (lambda times: (), False)):
        narrow, wide = (cluster.run(1, coordinates, width, groups(width // BASE))[0] for width in WIDTHS)
        print(holds, narrow, wide)
        for name, size in narrow.items():
            assert (wide[name] < 1.5 * size) is holds, (name, size, wide[name])
            assert wide[name] > size / 2
