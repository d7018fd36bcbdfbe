"""Experts that ranks divide among them compute and deliver what one rank with all experts does: against a loop over tokens in fp64."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from megatron_llama.config.schema import Config, ParallelConfig
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.nn.moe.dispatch import dispatched_mlp
from megatron_llama.model.nn.moe.exchange import exchanged_mlp
from megatron_llama.model.nn.moe.experts import expert_mlp
from megatron_llama.model.nn.moe.routing import Router, route
from megatron_llama.model.nn.ops import PLAIN
from megatron_llama.model.nn.recompute import Recomputable
from torch import Tensor

from tests.harness import Cluster
from tests.model.nn.moe.reference import Sizes, block, chosen
from tests.model.nn.moe.test_experts import EXACT, leaves, near

Choice = Literal["drawn", "the first experts", "the last experts"]
SENDING = {"allgather": dispatched_mlp, "alltoall": exchanged_mlp}
CASES: dict[str, tuple[int, Sizes, Choice]] = {
    "usual": (2, Sizes(12, 6, 2, 16, 12), "drawn"),
    "fewer experts here than a token has": (4, Sizes(12, 4, 3, 8, 6), "drawn"),
    "all tokens to the first rank": (2, Sizes(12, 6, 3, 16, 12), "the first experts"),
    "all tokens to the last rank": (3, Sizes(9, 6, 1, 8, 4), "the last experts"),
    "one token of each rank": (2, Sizes(2, 8, 2, 8, 4), "drawn"),
}


def drawn(sizes: Sizes, choice: Choice, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The leaves, and a gradient of the output. Where all tokens choose alike, experts of other ranks have none."""
    found = sizes.draw(5, dtype)
    if choice != "drawn":
        with torch.no_grad():
            found[0].abs_()
            best = torch.arange(sizes.experts, dtype=dtype).unsqueeze(-1) * 0.01
            found[1].copy_(found[1].abs() * 0.001 + (best if choice == "the last experts" else -best))
    return found


def of_a_rank(
    place: Place, way: str, sizes: Sizes, choice: Choice, dtype: torch.dtype, recompute: bool, rule: Router, on_input: bool = False
) -> list[Tensor]:
    """Output and gradients of this rank: of its tokens, of the router through these, and of its experts."""
    config = Config(parallel=ParallelConfig(expert_model_parallel_size=place.world_size))
    ep = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu")).ep
    assert ep is not None
    x, router, gate_up, down = leaves(drawn(sizes, choice, dtype))
    x, gate_up, down = (whole.detach().chunk(ep.size)[ep.rank].clone().requires_grad_() for whole in (x, gate_up, down))
    given: Tensor | Recomputable = x
    if recompute:
        given = Recomputable(x * 1.0, lambda source: source * 1.0, (x,))
    routing = route(given, router, rule)
    out = SENDING[way](given, routing, gate_up, down, PLAIN.gate("silu"), ep, recompute=recompute, on_input=on_input)
    out.backward(drawn(sizes, choice, dtype)[-1].chunk(ep.size)[ep.rank])
    assert out.dtype is dtype
    return [out.detach(), *(leaf.grad for leaf in (x, router, gate_up, down) if leaf.grad is not None)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", SENDING)
def test_as_a_loop_over_all_tokens_and_experts(way: str, case: str, dtype: torch.dtype, recompute: bool, cluster: Cluster) -> None:
    """Outputs and gradients, of experts without tokens too, and of ranks to which no token comes."""
    ranks, sizes, choice = CASES[case]
    found = cluster.run(ranks, of_a_rank, way, sizes, choice, dtype, recompute, Router(sizes.top_k, normalize=sizes.top_k > 1))
    assert all(len(own) == 5 for own in found)
    wide = leaves(drawn(sizes, choice, dtype), torch.float64)
    experts = chosen(wide[0].flatten(0, -2) @ wide[1].t(), sizes.top_k)
    here = sizes.experts // ranks
    assert choice == "drawn" or experts.unique().tolist() == [*range(sizes.top_k)] or bool((experts >= sizes.experts - here).all())
    expected = block(*wide, experts, normalize=sizes.top_k > 1)
    expected.backward(drawn(sizes, choice, dtype)[-1].double())
    # Outputs of the ranks are rounded before they are added up.
    bound = 4 * EXACT[dtype]
    out, x, router, gate_up, down = zip(*found, strict=True)
    assert near(torch.cat(out), expected, bound)
    for parts, reference in ((x, wide[0]), (gate_up, wide[2]), (down, wide[3])):
        assert near(torch.cat(parts), torch.zeros_like(reference) if reference.grad is None else reference.grad, bound)
    assert wide[1].grad is not None
    assert near(torch.stack(router).sum(0), wide[1].grad, bound if sizes.top_k > 1 else 2 * bound)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("way", SENDING)
def test_weights_on_inputs_as_with_all_experts(way: str, recompute: bool, cluster: Cluster) -> None:
    """Those of LLaMA 4, whose gradients come through the inputs: with two experts of a token, some of which are on one rank."""
    sizes, rule = Sizes(12, 6, 2, 16, 12), Router(2, normalize=False, score="sigmoid")
    found = cluster.run(2, of_a_rank, way, sizes, "drawn", torch.float64, recompute, rule, True)
    wide = leaves(drawn(sizes, "drawn", torch.float64))
    expected = expert_mlp(wide[0], route(wide[0], wide[1], rule), *wide[2:], PLAIN.gate("silu"), on_input=True)
    expected.backward(drawn(sizes, "drawn", torch.float64)[-1])
    out, x, router, gate_up, down = zip(*found, strict=True)
    for parts, reference in ((out, expected), (x, wide[0].grad), (gate_up, wide[2].grad), (down, wide[3].grad)):
        assert reference is not None and near(torch.cat(parts), reference, EXACT[torch.float64])
    assert wide[1].grad is not None and near(torch.stack(router).sum(0), wide[1].grad, EXACT[torch.float64])
