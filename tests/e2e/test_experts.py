"""A model with experts from its first step to transformers' own class: resumed to the bit, in other layouts, exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.product import DP2, PP2, TP2, Layout, Product, assert_same_state, exact_curve, state

EXPERTS: dict[str, object] = {
    "model_type": "qwen3_moe", "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "norm_topk_prob": True, "mlp_only_layers": (1,),
    "adam_eps": 1e-5,
}  # fmt: skip
"""With that eps Adam does not turn a gradient that is all rounding into a whole step."""
LAST = "iter_0000006"
DIVIDED = Layout(4, {"expert_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim_grads_params"})
EXCHANGED = {"expert_model_parallel_size": 4, "moe_token_dispatcher_type": "alltoall"}
ALONE = Layout(4, {**EXCHANGED, "data_parallel_sharding_strategy": "no_shard"})
"""Each expert has two ranks, or one."""
SHARDED = Layout(2, {**DP2.options, "data_parallel_sharding_strategy": "optim_grads_params"})


@pytest.mark.long
@pytest.mark.tries("expert_model_parallel_size", "moe_token_dispatcher_type")
def test_from_the_first_step_to_the_export(product: Product, tmp_path: Path) -> None:
    """Each pair of layouts stops at step 3 and goes on: in the same layout the run is the unbroken one to the bit, in others but for rounding."""
    for layout, run in ((DIVIDED, "divided"), (TP2, "run")):
        straight = tmp_path / "straight" / run
        product.train(layout, save=straight, **EXPERTS)
        product.train(layout, save=tmp_path / run, train_iters=3, **EXPERTS)
        product.train(layout, save=tmp_path / run, load=tmp_path / run, **EXPERTS)
        assert exact_curve(tmp_path / run) == exact_curve(straight)
        assert_same_state(tmp_path / run / LAST, straight / LAST)

    for layout, until in ((SHARDED, 1), (DIVIDED, 2), (PP2, 3), (ALONE, 5), (TP2, 6)):
        product.train(layout, save=tmp_path / "moved", load=tmp_path / "moved", train_iters=until, **EXPERTS)
    for found, expected in zip(exact_curve(tmp_path / "moved"), exact_curve(tmp_path / "straight" / "run"), strict=True):
        assert found[:2] == expected[:2]
        assert found[2] == pytest.approx(expected[2], rel=1e-6) and found[3] == pytest.approx(expected[3], rel=2e-5)
    ours, theirs = state(tmp_path / "moved" / LAST), state(tmp_path / "straight" / "run" / LAST)
    names = [name for name in theirs if not name.startswith("optimizer.")]
    assert sum(".experts." in name for name in names) == 3 * 4 * 3
    for name in names:
        assert (ours[name] - theirs[name]).norm() < 1e-4 * theirs[name].norm(), name

    product.run("export", "--load", tmp_path / "run", "--output", tmp_path / "hf").ok()
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert sorted(exported) == sorted(names) and all(torch.equal(exported[name], theirs[name]) for name in names)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    stacked = model.state_dict()["model.layers.3.mlp.experts.gate_up_proj"]
    parts = [exported[f"model.layers.3.mlp.experts.{expert}.{half}_proj.weight"] for expert in range(4) for half in ("gate", "up")]
    assert torch.equal(stacked, torch.cat(parts).view_as(stacked))
