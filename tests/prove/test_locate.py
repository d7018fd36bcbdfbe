"""What is wrong first, in words; what can be switched off; and which of it is named."""

from __future__ import annotations

import math
import random

import pytest
import torch
from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.families import FAMILIES
from megatron_llama.model.plan.params import hf_shapes
from megatron_llama.prove.case import Case
from megatron_llama.prove.compare import Row
from megatron_llama.prove.locate import axes_of, first_wrong, from_loss, locate

PIPE = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "pipeline_schedule": "interleaved"}
SPREAD = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "data_parallel_sharding_strategy": "optim_grads_params", "param_slots": "2"}
OTHERS = {"micro_batch_size": 1, "global_batch_size": 8, "recompute_granularity": "full", "bf16": True, "lora_rank": 4, "reset_attention_mask": True}
CASE = Case("as given", {**SPREAD, **PIPE, **OTHERS}, 16)


SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}


def wrong(what: str, step: int | None = 1, tensor: str | None = None) -> Row:
    return Row("one process", what, 1.0, 0.5, step, tensor)


def test_tensors_come_in_the_order_of_the_backward_pass() -> None:
    """Of every family: that in which autograd of transformers' own model reaches them."""
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_hidden_layers=2, attention_bias=True, mlp_bias=True))
    reached: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: reached.append(name.rpartition(".")[0]))
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    modules = list(dict.fromkeys(reached))
    parallel = [("gate_proj", "up_proj"), ("q_proj", "k_proj", "v_proj")]

    def place(name: str) -> object:
        """Projections of one input are reached in any order."""
        layer, part = from_loss(name)
        among = next((group for group in parallel if any(one in name for one in group)), None)
        return layer, among or part

    places = [place(name) for name in modules]
    assert list(dict.fromkeys(places)) == list(dict.fromkeys(place(name) for name in sorted(modules, key=from_loss)))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_tensor_of_a_family_has_a_place(family: str) -> None:
    model = ModelConfig(model_type=family, **SIZES, num_hidden_layers=12, num_key_value_heads=1, head_dim=8)
    places = {name: from_loss(name) for name in hf_shapes(model)}
    assert places["lm_head.weight"] == min(places.values()) and places["model.embed_tokens.weight"] == max(places.values())
    last, earlier = (next(name for name in places if name.startswith(f"model.layers.{layer}.") and "down_proj" in name) for layer in (11, 9))
    assert places[last] < places[earlier]
    kinds = [name for name in places if name.startswith("model.layers.0.")]
    assert len({places[name] for name in kinds}) == len(kinds), "no two are at one place"


def test_the_first_is_by_step_then_by_kind_then_by_tensor() -> None:
    gradient = wrong("gradient", 2, "model.layers.3.mlp.up_proj.weight")
    later = [
        wrong("gradient", 2, "model.layers.2.mlp.down_proj.weight"),
        wrong("gradient", 2, "model.embed_tokens.weight"),
        wrong("gradient norm", 2),
        wrong("update", 2, "lm_head.weight"),
        wrong("loss", 3),
        wrong("read once", None),
    ]
    rows = [gradient, *later, Row("one process", "loss", 0.1, 0.5, 1)]
    random.Random(1).shuffle(rows)
    assert first_wrong(rows) == gradient
    assert first_wrong([*rows, wrong("loss", 2)]) == wrong("loss", 2), "the forward pass comes before"
    assert first_wrong([*rows, Row("one process", "the run", math.inf, 0.0)]) == Row("one process", "the run", math.inf, 0.0)
    assert first_wrong([Row("one process", "loss", 0.5, 0.5, 1)]) is None
    nothing = Row("one process", "loss", math.nan, 0.5, 7)
    assert first_wrong([nothing]) == nothing


def test_each_axis_is_switched_off_alone() -> None:
    axes = dict(axes_of(CASE))
    parallel = ["sequence parallelism", "tensor parallelism", "the pipeline's schedule and split", "pipeline parallelism", "data parallelism"]
    others = ["slots and prefetching", "sharding", "microbatches", "recomputation", "bf16", "LoRA", "documents"]
    assert list(axes) == parallel + others
    ranks = {"tensor parallelism": 8, "pipeline parallelism": 8, "data parallelism": 4}
    assert {name: case.world_size for name, case in axes.items() if case.world_size != 16} == ranks
    for name, case in axes.items():
        changed = {option for option in case.options if case.options[option] != CASE.options.get(option)}
        assert changed or name == "data parallelism", name
    assert axes["tensor parallelism"].options["sequence_parallel"] is False
    assert axes["microbatches"].options["micro_batch_size"] == 2
    assert axes["pipeline parallelism"].options["pipeline_schedule"] == "1f1b"
    assert "bf16" not in dict(axes_of(Case("plain", {"hidden_size": 64}, 1)))


def test_the_axes_without_which_it_holds_are_named() -> None:
    rows = [Row("one process", "loss", 0.1, 0.5, 1), wrong("gradient", 2, "model.norm.weight")]

    def again(case: Case) -> list[Row] | None:
        if case.options["pipeline_schedule"] == "1f1b":
            return None
        return rows if case.options["sequence_parallel"] else rows[:1]

    found = locate(CASE, rows, again, time_left=lambda case: True)
    assert found is not None and found.row == rows[1]
    assert found.named == ("sequence parallelism", "tensor parallelism")
    assert found.needed == ("the pipeline's schedule and split", "pipeline parallelism") and not found.not_tried
    assert {axis.name: axis.off for axis in found.axes}["sequence parallelism"] == {"sequence_parallel": False}
    hurried = locate(CASE, rows, again, time_left=lambda case: False)
    assert hurried is not None and not hurried.axes and len(hurried.not_tried) == 12 and not hurried.needed
    assert locate(CASE, rows[:1], again, time_left=lambda case: True) is None
