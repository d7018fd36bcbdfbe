"""bf16 with fp32 masters, against FSDP2's mixed precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_llama.launch.launcher import Place
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

from tests.engine.shard.training import CLIP, Run, Trained, adamw, built, differences, train
from tests.engine.shard.twins import llama
from tests.harness import Cluster

RUN = Run(microbatches=1, clip=CLIP)
ROUNDING = 2.0**-8
"""Largest relative error of a number that is rounded to bf16, which has eight significant bits."""


def mixed(place: Place, run: Run, options: dict[str, Any]) -> Trained:
    return train(run, place.rank, dtype=torch.bfloat16, **options)


def fsdp2(place: Place, run: Run, reduce_dtype: torch.dtype, error: float) -> Trained:
    """The same model with FSDP2. ``error``: each gradient that autograd computes is off by at most this part of itself, at random, as if it
    had been rounded once more."""
    model = built(llama)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = adamw(model)
    noise = torch.Generator().manual_seed(place.rank)
    losses, norms = [], []
    for step in range(run.steps):
        [part] = run.parts(place.rank, step)
        loss = run.twin.loss(model, part)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        for parameter in model.parameters():
            assert parameter.grad is not None
            local: Tensor = parameter.grad.to_local()  # type: ignore[attr-defined]
            local.mul_(1 + error * (2 * torch.rand(local.shape, generator=noise) - 1))
        norm: Any = clip_grad_norm_(model.parameters(), run.clip)
        norms.append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(tuple(losses), tuple(norms))


@pytest.mark.long
@pytest.mark.parametrize("reduce_dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)])
def test_bf16_with_fp32_masters_trains_as_with_fsdp2(reduce_dtype: torch.dtype, cluster: Cluster) -> None:
    """In the first step weights are equal, so losses are, to the bit, and the norm is off by the rounding of gradients at most: a gradient
    that is summed in fp32 from products of bf16 need not be rounded to bf16. Later steps train on weights that this rounding has moved. How
    far that carries losses and norms is measured: by FSDP2 itself with gradients off by one rounding. Twice that is the bound."""
    expected = cluster.run(2, fsdp2, RUN, reduce_dtype, 0.0)
    moved = cluster.run(2, fsdp2, RUN, reduce_dtype, ROUNDING)
    loss_bound, norm_bound = (2 * each for each in differences(moved, expected))
    assert 0 < loss_bound < 0.02 and 0 < norm_bound < 0.1
    for strategy in ("optim_grads_params", "no_shard"):
        found = cluster.run(2, mixed, RUN, {"strategy": strategy, "reduce_dtype": reduce_dtype})
        assert [each.losses[0] for each in found] == [each.losses[0] for each in expected]
        assert abs(found[0].norms[0] / expected[0].norms[0] - 1) <= ROUNDING
        loss, norm = differences(found, expected)
        assert loss <= loss_bound and norm <= norm_bound, (strategy, loss, loss_bound, norm, norm_bound)
        assert {value.dtype for value in found[0].values.values() if value.is_floating_point() and value.dim() > 1} == {torch.bfloat16}
