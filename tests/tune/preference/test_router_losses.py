"""Preference tuning of a model with experts: losses of its routers are those of all samples as they are laid out, beside the loss of the method."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import torch_twin
from tests.harness import Cluster
from tests.model.families.twins import BALANCE, TWINS, Z_LOSS, FamilyLayout
from tests.parallel.cases import GLOBAL_BATCH_SIZE, LOSS_BOUND, NORM_BOUND, OPTIMIZER, Record, deviation
from tests.torch_twin import adamw
from tests.tune.preference.cases import CASES, align, batch, halves, plain_loss, sum_of_tokens

STEPS = 4


def twin(layout: FamilyLayout, method: str) -> tuple[Record, list[Mapping[str, float]]]:
    """The losses of the method, the gradient norms, and the numbers of routers in each step, by transformers' model and its own loss of
    routers: each half a row of its own for the method, and whole samples, in which documents follow each other, for the routers."""
    model: Any = TWINS[layout.family].hf_model()
    balance, options = sys.modules[type(model).__module__].load_balancing_loss_func, CASES[method]
    experts, chosen = layout.model.num_experts, layout.model.num_experts_per_tok
    losses: list[float] = []
    numbers: list[Mapping[str, float]] = []

    def loss_of(index: int) -> Tensor:
        places = range(index * GLOBAL_BATCH_SIZE, (index + 1) * GLOBAL_BATCH_SIZE)
        kl = 0.0
        if options.method == "kto":
            others = [half for sample in places for half in halves(sample, mismatched=True)]
            with torch.no_grad():
                kl = max(0.0, sum(float(sum_of_tokens(model, half)) - half.reference for half in others) / len(others))
        loss, _ = plain_loss(model, [half for sample in places for half in halves(sample)], options, kl)
        losses.append(loss.item())
        samples = batch(places, options)
        assert samples.position_ids is not None
        blocks = model(samples.tokens.t(), position_ids=samples.position_ids.t(), use_cache=False, output_router_logits=True).router_logits
        parts = [part for logits in blocks for part in (logits.chunk(len(places)) if layout.balance == "seq_aux_loss" else (logits,))]
        balanced = torch.stack([balance((part,), experts, chosen) / chosen for part in parts]).mean()
        squares = torch.stack([logits.logsumexp(-1).square().mean() for logits in blocks])
        loads = torch.stack([torch.bincount(logits.topk(chosen).indices.flatten(), minlength=experts) for logits in blocks])
        shares = loads / loads.sum(-1, keepdim=True)
        entropy = torch.special.entr(shares).sum(-1).mean() / math.log(experts)
        told = {"load_balancing_loss": balanced, "z_loss": squares.mean(), "experts/largest_load": shares.max() * experts, "experts/entropy": entropy}
        numbers.append({name: value.item() for name, value in told.items()})
        return loss + (BALANCE * balanced * len(blocks) if layout.balance != "none" else 0.0) + layout.z_loss * squares.sum()

    _, norms = torch_twin.train(model, adamw(model.parameters(), OPTIMIZER), lambda index: [loss_of(index)], STEPS, layout.clip)
    return Record(tuple(losses), tuple(norms)), numbers


@pytest.mark.parametrize(
    ("layout", "method"),
    [
        (FamilyLayout(family="qwen3_moe", tp=2, sp=True, pp=2, microbatches=2, recompute="full", balance="seq_aux_loss", z_loss=Z_LOSS), "dpo smoothed"),
        pytest.param(FamilyLayout(family="mixtral", dp=2, ep=2, cp=2, balance="global_aux_loss", strategy="optim_grads"), "orpo", marks=pytest.mark.long),
        pytest.param(FamilyLayout(family="qwen3_moe", dp=2, microbatches=2, balance="seq_aux_loss"), "kto", marks=pytest.mark.long),
        pytest.param(FamilyLayout(family="mixtral", dp=2, tp=2, sp=True, ep=2), "dpo", marks=pytest.mark.long),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_losses_of_routers_stand_beside_that_of_the_method(cluster: Cluster, layout: FamilyLayout, method: str) -> None:
    """In the gradient, and in the log, which has the loads of experts without such losses, too; not in the loss."""
    expected, numbers = twin(layout, method)
    for found, told in cluster.run(layout.world_size, align, replace(layout, steps=STEPS), CASES[method]):
        assert deviation(found.losses, expected.losses) < LOSS_BOUND and deviation(found.norms, expected.norms) < NORM_BOUND
        for name, values in told.items():
            if name in numbers[0]:
                assert deviation(values, [step[name] for step in numbers]) < LOSS_BOUND, name
        assert {"experts/largest_load", "experts/entropy"} < told.keys() and ("z_loss" in told) == (layout.z_loss > 0)
