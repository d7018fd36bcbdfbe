"""Experts in FP8: each is a dense MLP of its own rows, to the bit, and no code depends on which ranks have rows or experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from megatron_llama.config.schema import Config, ModelConfig, ParallelConfig, TrainingConfig
from megatron_llama.engine.mesh import Mesh
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.nn.fp8.layers import products_by_layer
from megatron_llama.model.nn.functional import gated
from megatron_llama.model.nn.linear import ColumnLinear, RowLinear
from megatron_llama.model.nn.moe.dispatch import dispatched_mlp
from megatron_llama.model.nn.moe.experts import expert_mlp
from megatron_llama.model.nn.moe.routing import Routing
from megatron_llama.model.nn.ops import PLAIN
from megatron_llama.model.nn.overlap import LayerProducts
from torch import Tensor, nn

from tests.harness import Cluster
from tests.model.nn.fp8.numbers import normal

HIDDEN, INNER = 256, 128
GATE = PLAIN.gate("silu")
Recipe = Literal["blockwise", "tensorwise"]
EACH_RECIPE = pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])


def config(recipe: Recipe, experts: int) -> Config:
    model = ModelConfig(num_hidden_layers=1, hidden_size=HIDDEN, num_experts=experts, num_experts_per_tok=1, moe_intermediate_size=INNER)
    return Config(model=model, training=TrainingConfig(bf16=True, fp8=recipe, fp8_bf16_layers=0))


def products(recipe: Recipe, experts: int, mesh: Mesh | None = None) -> LayerProducts:
    return products_by_layer(config(recipe, experts), mesh or Mesh.single())(0)


def drawn(experts: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x and a gradient [t, 1, h], gate with up, and down. Tokens and experts differ in size, so that scales do."""
    sizes = 2.0 ** torch.arange(-3, tokens - 3).remainder(7)
    x, grad = (normal(tokens, 1, HIDDEN, seed=seed) * sizes[:, None, None].bfloat16() for seed in (1, 2))
    of_experts = 2.0 ** torch.arange(experts, dtype=torch.float32).bfloat16()
    gate_up = normal(experts * 2 * INNER, HIDDEN, seed=3) / 16 * of_experts.repeat_interleave(2 * INNER)[:, None]
    down = normal(experts * HIDDEN, INNER, seed=4) / 16 * of_experts.repeat_interleave(HIDDEN)[:, None]
    return x, grad, gate_up, down


def routing(table: Tensor, weights: Tensor) -> Routing:
    return Routing(table, weights, torch.empty(0), torch.empty(0))


def dense(x: Tensor, grad: Tensor, gate_up: Tensor, down: Tensor, recipe: Recipe) -> list[Tensor]:
    """Output and gradients of a dense MLP of the same recipe."""
    single = Mesh.single()
    layer = products_by_layer(replace(config(recipe, 0), model=ModelConfig(num_hidden_layers=1)), single)(0)
    first = ColumnLinear(HIDDEN, 2 * INNER, tp=single.tp, sequence_parallel=False, **layer)
    second = RowLinear(INNER, HIDDEN, tp=single.tp, sequence_parallel=False, **layer)
    first.weight, second.weight = nn.Parameter(gate_up.clone()), nn.Parameter(down.clone())
    x = x.clone().requires_grad_()
    out = second(gated(first(x), GATE))
    out.backward(grad)
    return [gradient for gradient in (out.detach(), x.grad, first.weight.grad, second.weight.grad) if gradient is not None]


def of_experts(x: Tensor, grad: Tensor, gate_up: Tensor, down: Tensor, chosen: Routing, recipe: Recipe, *, recompute: bool = False) -> list[Tensor]:
    x, gate_up, down = (leaf.clone().requires_grad_() for leaf in (x, gate_up, down))
    how = products(recipe, len(down) // HIDDEN)["experts"]
    out = expert_mlp(x, chosen, gate_up, down, GATE, recompute=recompute, products=how)
    out.backward(grad)
    return [gradient for gradient in (out.detach(), x.grad, gate_up.grad, down.grad) if gradient is not None]


@pytest.mark.parametrize("recompute", [False, True])
@EACH_RECIPE
def test_an_expert_of_all_tokens_is_a_dense_mlp(recipe: Recipe, recompute: bool) -> None:
    """To the bit, with all gradients; and something is rounded to codes."""
    given = drawn(1, 24)
    one = routing(torch.zeros(24, 1, dtype=torch.int64), torch.ones(24, 1))
    found, expected = of_experts(*given, one, recipe, recompute=recompute), dense(*given, recipe)
    assert len(found) == 4 and all(map(torch.equal, found, expected))
    plain = expert_mlp(given[0], one, *given[2:], GATE)
    assert 0.005 < float((found[0] - plain).norm() / plain.norm()) < 0.2


@EACH_RECIPE
def test_experts_are_dense_mlps_of_their_rows(recipe: Recipe) -> None:
    """One of them has no token. The weight of a token is a power of two, which rounds nothing."""
    experts, tokens = 4, 30
    x, grad, gate_up, down = drawn(experts, tokens)
    table = torch.randint(0, 3, (tokens, 1), generator=torch.Generator().manual_seed(5))
    weights = 2.0 ** -table.float()
    found = of_experts(x, grad, gate_up, down, routing(table, weights), recipe)
    expected = [torch.zeros_like(part) for part in found]
    for expert in range(3):
        rows = (table[:, 0] == expert).nonzero()[:, 0]
        matrices = gate_up.chunk(experts)[expert], down.chunk(experts)[expert]
        weight = float(2.0**-expert)
        out, x_grad, gate_up_grad, down_grad = dense(x[rows], grad[rows], *matrices, recipe)
        expected[0][rows], expected[1][rows] = out * weight, x_grad * weight
        expected[2].chunk(experts)[expert].copy_(gate_up_grad * weight)
        expected[3].chunk(experts)[expert].copy_(down_grad * weight)
    assert all(map(torch.equal, found, expected))


TOKENS = 24
"""Of one microbatch."""


def on_ranks(place: Place, recipe: Recipe, axis: str) -> list[Tensor]:
    """Output and gradient of this rank's tokens: along ep those of a microbatch of its own, along tp or cp a part of one."""
    size = place.world_size
    axes = {"ep": "expert_model_parallel_size", "tp": "tensor_model_parallel_size", "cp": "context_parallel_size"}
    parallel = ParallelConfig(**{axes[axis]: size}, sequence_parallel=axis == "tp")
    whole = replace(config(recipe, 4), parallel=parallel)
    mesh = build_mesh(whole, rank=place.rank, world_size=size, device=torch.device("cpu"))
    how = products_by_layer(whole, mesh)(0)["experts"]
    x, grad, gate_up, down = drawn(4, 2 * TOKENS if axis == "ep" else TOKENS)
    table = chosen(len(x)).chunk(size)[place.rank]
    x, grad = (tensor.chunk(size)[place.rank].clone() for tensor in (x, grad))
    x.requires_grad_()
    one = routing(table, torch.ones(len(table), 1))
    if mesh.ep is None:
        out = expert_mlp(x, one, gate_up, down, GATE, products=how)
    else:
        matrices = (tensor.chunk(size)[place.rank].clone() for tensor in (gate_up, down))
        out = dispatched_mlp(x, one, *matrices, GATE, mesh.ep, products=how)
    out.backward(grad)
    assert x.grad is not None
    return [out.detach(), x.grad]


def chosen(tokens: int) -> Tensor:
    """Of four experts the last one has no token of the second microbatch."""
    table = torch.randint(0, 4, (tokens, 1), generator=torch.Generator().manual_seed(6))
    table[TOKENS:].clamp_(max=2)
    return table


@pytest.mark.parametrize("axis", ["ep", "tp", "cp"])
@EACH_RECIPE
def test_rows_have_the_bits_of_one_process(cluster: Cluster, recipe: Recipe, axis: str) -> None:
    """Of one that computes the microbatches one after the other. Sums of numbers that a scale has rounded may cancel to another small one,
    where there are fewer rows; another code anywhere would be a thousand times as far."""
    found = [torch.cat(parts) for parts in zip(*cluster.run(2, on_ranks, recipe, axis), strict=True)]
    x, grad, gate_up, down = drawn(4, 2 * TOKENS if axis == "ep" else TOKENS)
    parts = []
    for start in range(0, len(x), TOKENS):
        place = slice(start, start + TOKENS)
        one = routing(chosen(len(x))[place], torch.ones(TOKENS, 1))
        parts.append(of_experts(x[place], grad[place], gate_up, down, one, recipe)[:2])
    for own, other in zip(found, map(torch.cat, zip(*parts, strict=True)), strict=True):
        distance = float((own.double() - other.double()).norm() / other.double().norm())
        assert distance == 0.0 if recipe == "blockwise" else distance < 1e-6, distance
