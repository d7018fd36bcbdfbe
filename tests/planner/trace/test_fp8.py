"""Traces of steps in FP8: their FLOPs, messages and kept codes, and which ranks are alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from megatron_llama.config.schema import Config
from megatron_llama.model.plan.expert_fp8 import sparse_scale_messages
from megatron_llama.model.plan.fp8 import fp8_layers, scale_messages, weight_code_bytes
from megatron_llama.model.plan.tensor_messages import block_messages
from megatron_llama.planner.trace.run import trace_run
from megatron_llama.train.setup.memory import MemoryPlan
from megatron_llama.train.setup.resolve import resolve

from tests.parallel.cases import Layout
from tests.planner.trace.test_trace import described, small, whole

RECIPES = ("blockwise", "tensorwise")
MICROBATCHES = 2


def in_fp8(layout: Layout, **training: Any) -> Config:
    """A layout in FP8; options of training are on top."""
    config = small(replace(layout, fp8=True, bf16=True))
    return resolve(replace(config, training=replace(config.training, **training)), layout.world_size)


def in_bf16(config: Config) -> Config:
    return replace(config, training=replace(config.training, fp8="none", fp8_gather=False))


@pytest.mark.few(1)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_changes_no_flops(recipe: str, recompute: Any) -> None:
    config = in_fp8(Layout(layers=3, microbatches=MICROBATCHES, recompute=recompute), fp8=recipe)
    trace, plain = trace_run(config, 1), trace_run(in_bf16(config), 1)
    assert trace.flops(trace.stages[0]) == plain.flops(plain.stages[0]) > 0


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_blocks_in_bf16_and_in_fp8_are_not_taken_for_each_other(recipe: str) -> None:
    """Of six ranks of a block each the two in the middle multiply in FP8."""
    config = in_fp8(Layout(pp=6, layers=6, microbatches=12), fp8=recipe, fp8_bf16_layers=2)
    short, full = trace_run(config, 6), whole(config, 6)
    for one, other in zip(short.stages, full.stages, strict=True):
        assert described(short, one) == described(full, other)
    assert sum(len(stage.traced) for stage in short.stages) < sum(len(stage.traced) for stage in full.stages)


LAYOUTS = {
    "tp": Layout(tp=2, layers=4),
    "sp": Layout(tp=2, sp=True, layers=4),
    "sp cp": Layout(tp=2, sp=True, cp=2, layers=4),
    "recomputed": Layout(tp=2, sp=True, cp=2, layers=4, recompute="full"),
    "slots": Layout(dp=2, layers=6, strategy="optim_grads_params", slots="2"),
}


KINDS = [(name, recipe, False) for name in LAYOUTS for recipe in RECIPES] + [(name, "tensorwise", True) for name in LAYOUTS if LAYOUTS[name].sp]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "recipe", "gather"), KINDS)
def test_messages_and_kept_codes_are_those_planned(name: str, recipe: str, gather: bool) -> None:
    """What a step in FP8 has more than the same in bf16."""
    layout = replace(LAYOUTS[name], microbatches=MICROBATCHES)
    config, world = in_fp8(layout, fp8=recipe, fp8_gather=gather), layout.world_size
    trace, plain = trace_run(config, world), trace_run(in_bf16(config), world)
    more, less = trace.traffic(trace.stages[0]), plain.traffic(plain.stages[0])
    layers, again = len(fp8_layers(config)), layout.recompute == "full"
    expected = dict(less)
    for axis, scales in scale_messages(config).items():
        calls, size = less.get((axis, "all_reduce"), (0, 0))
        found = layers * (MICROBATCHES * ((1 + again) * scales.forward + scales.backward) + scales.weights)
        expected[axis, "all_reduce"] = calls + found, size + 4 * found
    if gather:
        saved = block_messages(in_bf16(config)).forward_bytes - block_messages(config).forward_bytes
        calls, size = less["tp", "all_gather"]
        expected["tp", "all_gather"] = calls, size - layers * MICROBATCHES * (1 + again) * saved
    assert more == expected
    # Codes are made in the first passes of a step and outlive it.
    made = [one.bytes for one in trace.stages[0].lifetimes if one.made >= 0 and one.ended < 0]
    left = [one.bytes for one in plain.stages[0].lifetimes if one.made >= 0 and one.ended < 0]
    codes = weight_code_bytes(config, MemoryPlan(config, world).bucket_plans[0])
    assert sum(made) - sum(left) == codes > 0
    if name != "slots":
        block = config.model.hidden_size * (
            2 * (config.model.num_attention_heads + config.model.num_key_value_heads) * config.model.head_dim + 3 * config.model.intermediate_size
        )
        scales = 2 * block // 128**2 * 4 // layout.tp if recipe == "blockwise" else 4 * 4
        assert codes == layers * (2 * block // layout.tp + scales)


EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": (2,)}
EXPERTS |= dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size"), 128)


@pytest.mark.few(1)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, ep=2, recompute="selective"), Layout(tp=2, sp=True, cp=2)], ids=lambda layout: layout.name)
def test_experts_multiply_codes(layout: Layout, recipe: str) -> None:
    """As many FLOPs as in bf16, the messages and kept codes that are planned, and products that read codes and no number that stands for one.
    Of the two blocks in FP8 the first has experts."""
    config, world = in_fp8(replace(layout, microbatches=MICROBATCHES), fp8=recipe), layout.world_size
    config = resolve(replace(config, model=replace(config.model, **EXPERTS)), world)
    trace, plain = trace_run(config, world), trace_run(in_bf16(config), world)
    [stage], [in_16_bits] = trace.stages, plain.stages
    assert trace.flops(stage) == plain.flops(in_16_bits) > 0
    kept, left = (sum(one.bytes for one in which.lifetimes if one.made >= 0 and one.ended < 0) for which in (stage, in_16_bits))
    assert kept - left == weight_code_bytes(config, MemoryPlan(config, world).bucket_plans[0]) > 0
    sent, less = trace.traffic(stage), plain.traffic(in_16_bits)
    scales, dense = sparse_scale_messages(config), scale_messages(config)
    for axis in ("tp", "cp", "dp", "ep", "world"):
        calls, size = (sent.get((axis, "all_reduce"), (0, 0))[place] - less.get((axis, "all_reduce"), (0, 0))[place] for place in (0, 1))
        of_one = of_all = 0
        if axis in scales:
            single, experts = scales[axis]
            of_one = sum(MICROBATCHES * (kind.forward + kind.backward) + kind.weights for kind in (single, dense[axis]))
            of_all = MICROBATCHES * (experts.forward + experts.backward)
        assert (calls, size) == (of_one + of_all, 4 * (of_one + 4 * of_all)), axis
    # Forward both products, backward both gradients of inputs, and the first product again, (outputs, inputs) of each of a rank's experts. Rows
    # are all for which there is room.
    here = 4 // layout.ep
    rows = config.training.seq_length // (layout.tp * layout.cp) * layout.ep * 2
    products = [(256, 128), (128, 128), (128, 128), (128, 256), *[(256, 128)] * (layout.recompute == "selective")]
    side = 128 if recipe == "blockwise" else 0
    each = [
        rows * (inputs + 2 * outputs) + here * (outputs * inputs + 4) + 4 * (rows * inputs // side + here * outputs * inputs // side**2 if side else rows + here)
        for outputs, inputs in products
    ]
    found = {one: times for one, times in trace.operator_calls(stage).items() if one.name == "megatron_llama::scaled_experts"}
    assert sum(found.values()) == MICROBATCHES * len(products)
    assert sum(one.bytes * times for one, times in found.items()) == MICROBATCHES * sum(each)
