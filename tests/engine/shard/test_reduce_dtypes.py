"""Units whose gradients travel in a dtype of their own: ``ml.unit(cls, reduce_dtype=)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import megatron_llama as ml
import pytest
import torch
from megatron_llama.errors import ConfigError
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn

from tests.engine.shard.test_units import DECAY, LR, MICROBATCHES, STRATEGIES, Block, Norm, Router, in_order, inputs, loss_of, net
from tests.harness import Cluster
from tests.torch_twin import by_decay

STEPS = 3
BF16, FP32 = torch.bfloat16, torch.float32
KINDS: dict[str, tuple[torch.dtype, dict[type[nn.Module], torch.dtype]]] = {
    "fp32 in bf16": (BF16, {Router: FP32, Norm: FP32}),
    "bf16 in fp32": (FP32, {Block: BF16, Router: FP32}),
}
"""The dtype of ``shard``, and those of units."""


def wires(module: nn.Module, kind: str, own: torch.dtype | None = None) -> list[torch.dtype]:
    """The dtype of each parameter's gradients on the wire, in the order of the model."""
    usual, units = KINDS[kind]
    if type(module) in (Block, Router, Norm):
        own = units.get(type(module), usual)
    dtypes = [own or usual for _ in module.parameters(recurse=False)]
    return dtypes + [dtype for child in module.children() for dtype in wires(child, kind, own)]


def reduced(grads: dict[tuple[int, int], Tensor], wire: torch.dtype, strategy: str, groups: Sequence[range]) -> Tensor:
    """The sum of the ranks' gradients as the engine makes it. ``groups``: the ranks that shard among themselves."""

    def over(values: Sequence[Tensor]) -> Tensor:
        return in_order([value.to(wire).float() for value in values])

    microbatches = range(MICROBATCHES)
    shards = []
    for ranks in groups:
        if strategy in ("no_shard", "optim"):
            shards.append(over([in_order([grads[rank, m] for m in microbatches]) for rank in ranks]))
        else:
            shards.append(in_order([over([grads[rank, m] for rank in ranks]) for m in microbatches]))
    if len(groups) > 1:
        return over(shards).to(wire).float()
    return shards[0].to(wire).float() if strategy == "no_shard" else shards[0]


def trained(place: Place, kind: str, strategy: str, shard_size: int) -> bool:
    usual, units = KINDS[kind]
    model, plain = net(), net()
    policies: list[Any] = [ml.unit(cls, reduce_dtype=units.get(cls)) for cls in (Block, Router, Norm)]
    optimizer = ml.AdamW(lr=LR, weight_decay=DECAY)
    engine = ml.shard(
        model, units=policies, strategy=strategy, optimizer=optimizer, microbatches=MICROBATCHES, reduce_dtype=usual, shard_size=shard_size
    )
    expected = torch.optim.AdamW(by_decay(plain.parameters(), DECAY), lr=LR, fused=True)
    width = shard_size or place.world_size
    groups = [range(first, first + width) for first in range(0, place.world_size, width)]
    same = True
    for step in range(STEPS):
        grads: list[dict[tuple[int, int], Tensor]] = [{} for _ in plain.parameters()]
        for rank in range(place.world_size):
            for microbatch in range(MICROBATCHES):
                loss = loss_of(plain(inputs(step, microbatch, rank)))
                loss.backward()
                for number, parameter in enumerate(plain.parameters()):
                    grads[number][rank, microbatch] = parameter.grad
                plain.zero_grad()
                if rank == place.rank:
                    own = loss_of(model(inputs(step, microbatch, rank)))
                    own.backward()
                    same &= own.item() == loss.item()
        for parameter, wire, by_rank in zip(plain.parameters(), wires(plain, kind), grads, strict=True):
            parameter.grad = reduced(by_rank, wire, strategy, groups) / place.world_size
        engine.step()
        expected.step()
        plain.zero_grad()
    with engine.gathered():
        same &= all(map(torch.equal, model.parameters(), plain.parameters()))
    engine.close()
    return bool(same)


@pytest.mark.few(3)
@pytest.mark.parametrize("strategy", STRATEGIES[::-1])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_travel_in_two_dtypes_have_the_bits_of_one_process(kind: str, strategy: str, cluster: Cluster) -> None:
    assert cluster.run(2, trained, kind, strategy, 0) == [True, True]


@pytest.mark.parametrize("strategy", [STRATEGIES[-1], pytest.param(STRATEGIES[1], marks=pytest.mark.long)])
def test_shards_of_two_of_four_ranks(strategy: str, cluster: Cluster) -> None:
    assert cluster.run(4, trained, "fp32 in bf16", strategy, 2) == [True] * 4


def shared() -> nn.Module:
    model = net()
    model[2].router.scores.weight = model[1].experts[0].weight = nn.Parameter(torch.randn(32, 32))
    return model


def test_what_cannot_be_reduced_so_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ml.unit\(Router\): reduce_dtype: got torch.float16, expected one of None, torch.float32, torch.bfloat16"):
        ml.shard(net(), units=[Block, ml.unit(Router, reduce_dtype=torch.float16)])
    with pytest.raises(ConfigError, match=r"got no reduce_dtype by 1 and torch.bfloat16 by 2.router, which share it, expected one reduce_dtype"):
        ml.shard(shared(), units=[Block, ml.unit(Router, reduce_dtype=BF16)])
