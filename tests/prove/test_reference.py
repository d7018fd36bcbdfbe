"""The twins of a case: what of its options they keep, learning rates by their formulas, documents as sequences of their own."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from megatron_llama.config.schema import Config, DataConfig, LoraConfig, ModelConfig, OptimizerConfig
from megatron_llama.data.loader import Batch
from megatron_llama.engine.offload_options import OffloadConfig
from megatron_llama.prove.case import Case
from megatron_llama.prove.reference import (
    NotComparedError,
    in_fp32,
    learning_rates,
    not_in_transformers,
    one_process,
    sequences,
    smooth,
    steady,
)
from megatron_llama.train.run.lr import learning_rate

SPREAD = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2, "recompute_granularity": "full"}
SHARDED = {"data_parallel_sharding_strategy": "optim_grads", "optimizer_offload": "exact", "grad_reduce_in_bf16": True}
KEPT = {"hidden_size": 64, "global_batch_size": 8, "bf16": True, "clip_grad": 0.5}
CASE = Case("as given", {**KEPT, **SPREAD, **SHARDED, "micro_batch_size": 2}, 8)


def test_one_process_keeps_what_is_computed_and_nothing_of_how_it_is_spread() -> None:
    single = one_process(CASE)
    assert single.world_size == 1
    assert single.options == {**KEPT, "micro_batch_size": 8}
    exact = one_process(in_fp32(CASE), fp64=True).options
    assert exact["fp64"] and "bf16" not in exact
    zenflow = {"optimizer_offload": "zenflow", "zenflow_topk_ratio": 0.3}
    options = one_process(replace(CASE, options={**CASE.options, **zenflow})).options
    assert zenflow.items() <= options.items()
    without = {name: value for name, value in CASE.options.items() if name != "global_batch_size"}
    assert one_process(replace(CASE, options=without)).options["micro_batch_size"] == 4, "two samples on each of two data ranks"
    growing = {**CASE.options, "rampup_batch_size": (2, 2, 16)}
    assert one_process(replace(CASE, options=growing)).options["micro_batch_size"] == 2, "every size of a growing batch is a multiple"


def test_a_small_epsilon_grows_and_is_said() -> None:
    case = steady(CASE)
    assert case.options["adam_eps"] == 1e-6 and case.notes[-1].option == "--adam-eps"
    large = replace(CASE, options={**CASE.options, "adam_eps": 1e-5})
    assert steady(large) == large
    # A's second gradient is made of Adam's first step of B: a full one where the gradient was rounding.
    low_rank = replace(CASE, options={**CASE.options, "lora_rank": 2, "adam_eps": 1e-5})
    case = steady(low_rank)
    assert case.options["adam_eps"] == 1e-5 and smooth(case).options["adam_eps"] == 1e-2
    assert case.notes[-1].here == "1e-05, and 0.01 in half precision"
    assert steady(in_fp32(low_rank)) == in_fp32(low_rank) == smooth(in_fp32(low_rank))


def test_tokens_have_all_experts_in_half_precision_and_that_is_said() -> None:
    """Rounding would send some to other ones."""
    mixture = replace(CASE, options={**CASE.options, "num_experts": 6, "num_experts_per_tok": 2})
    case = steady(mixture)
    assert case.options["num_experts_per_tok"] == 2 and smooth(case).options["num_experts_per_tok"] == 6
    assert (case.notes[-1].option, case.notes[-1].here) == ("--num-experts-per-tok", "2, and 6 in half precision")
    assert smooth(in_fp32(case)) == in_fp32(case)


WARMUPS: tuple[dict[str, float], ...] = ({}, {"lr_warmup_iters": 3}, {"lr_warmup_fraction": 0.2}, {"lr_warmup_samples": 21})
DECAYS: tuple[dict[str, int], ...] = ({"lr_decay_iters": 9}, {"lr_decay_samples": 70})
STYLES = ("constant", "linear", "cosine", *(("WSD", style) for style in ("exponential", "linear", "cosine", "minus_sqrt")))


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_learning_rates_are_those_of_the_trainer(style: str | tuple[str, str]) -> None:
    """Two texts of one formula, written by different hands."""
    checked = 0
    for warmup, decay in itertools.product(WARMUPS, DECAYS):
        if ("lr_warmup_samples" in warmup) > ("lr_decay_samples" in decay) or ("lr_warmup_iters" in warmup) > ("lr_decay_iters" in decay):
            continue
        named: dict[str, str] = (
            {"lr_decay_style": style} if isinstance(style, str) else {"lr_decay_style": style[0], "lr_wsd_decay_style": style[1]}
        )
        last = {"lr_wsd_decay_iters": 4, "lr_wsd_decay_samples": 28} if style[0] == "WSD" else {}
        config = OptimizerConfig(lr=1e-2, min_lr=1e-3, **warmup, **decay, **named, **last)  # type: ignore[arg-type]
        batches = (7,) * 12
        expected = [learning_rate(config, 9, step, step * 7) for step in range(12)]
        found = learning_rates(config, 9, batches)
        assert all(math.isclose(one, other, rel_tol=1e-13, abs_tol=1e-18) for one, other in zip(found, expected, strict=True)), config
        checked += 1
    assert checked >= 5


def test_documents_are_sequences_of_their_own() -> None:
    tokens = torch.arange(10).view(5, 2)
    documents = torch.tensor([[0, 0], [0, 0], [1, 0], [1, 0], [2, 1]], dtype=torch.int32)
    positions = torch.tensor([[0, 0], [1, 1], [0, 2], [1, 3], [0, 0]])
    mask = torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0], [0.0, 1.0]])
    found = sequences([Batch(tokens, tokens + 1, mask, positions, documents)])
    assert found.tokens.tolist() == [[0, 2, 0, 0], [4, 6, 0, 0], [1, 3, 5, 7], [9, 0, 0, 0]], "the one of which nothing counts is left out"
    assert found.labels.tolist() == [[1, 3, 0, 0], [5, 7, 0, 0], [2, 4, 6, 8], [10, 0, 0, 0]]
    assert found.positions.tolist() == [[0, 1, 0, 0], [0, 1, 0, 0], [0, 1, 2, 3], [0, 0, 0, 0]]
    assert found.weights.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    # A batch without masks is its samples.
    tokens = torch.arange(6).view(3, 2)
    found = sequences([Batch(tokens, tokens + 1), Batch(tokens, tokens + 1)])
    with pytest.raises(NotComparedError, match="no label that counts"):
        sequences([Batch(tokens, tokens, torch.zeros(3, 2))])
    assert found.tokens.shape == (4, 3) and found.positions[3].tolist() == [0, 1, 2] and bool(found.weights.all())


LONGROPE, DYNAMIC = (ModelConfig(rope_scaling={"rope_type": kind}) for kind in ("longrope", "dynamic"))
COMPARED: list[tuple[dict[str, object], Config, str]] = [
    ({}, Config(), ""),
    ({"neftune_noise_alpha": 5.0}, Config(), "noise"),
    ({}, Config(offload=OffloadConfig(optimizer_offload="zenflow")), "ZenFlow"),
    ({"packing": True}, Config(model=LONGROPE), "longrope"),
    ({}, Config(model=LONGROPE, data=DataConfig(reset_position_ids=True)), ""),
    ({}, Config(model=DYNAMIC, data=DataConfig(reset_attention_mask=True)), "dynamic"),
]


def test_what_transformers_has_no_counterpart_of_is_said() -> None:
    for options, config, reason in COMPARED:
        found = not_in_transformers(replace(CASE, options=options), config)
        assert reason in found and bool(found) is bool(reason)


def test_libraries_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    adapted = Config(lora=LoraConfig(lora_rank=4))
    monkeypatch.setattr("megatron_llama.prove.reference.find_spec", lambda name: None if name == "peft" else object())
    assert "pip install peft" in not_in_transformers(CASE, adapted) and not not_in_transformers(CASE, Config())
    monkeypatch.setattr("megatron_llama.prove.reference.find_spec", lambda name: None)
    assert "pip install transformers" in not_in_transformers(CASE, Config())
