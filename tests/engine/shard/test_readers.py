"""Weights that are read outside of their unit: the error names the module to make a unit, and with that the model trains."""

from __future__ import annotations

from collections.abc import Callable

import megatron_llama as ml
import pytest
import torch
from megatron_llama.engine.shard.placeholders import ShardedParameterError
from torch import Tensor, nn


class Embedder(nn.Module):
    """What the first block has, and all blocks need."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Block(nn.Module):
    def __init__(self, *, embeds: bool) -> None:
        super().__init__()
        self.norm = nn.Module()
        if embeds:
            self.norm.emb = Embedder()
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return x + self.out(x) * condition


class Conditioned(nn.Module):
    """As DiT of diffusers: the condition of all blocks is made by a module inside of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(embeds=number == 0) for number in range(3))

    def forward(self, x: Tensor) -> Tensor:
        condition = self.blocks[0].norm.emb(x)
        for block in self.blocks:
            x = block(x, condition)
        return x


class Attending(nn.Module):
    """nn.MultiheadAttention reads the weights of its ``out_proj`` and does not call it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.attention(x, x, x)[0]
        return out


class Direct(nn.Module):
    """A model that reads a weight of a unit itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x @ self.layers[0].weight


@pytest.mark.parametrize(
    ("make", "units", "words", "mended"),
    [
        (
            Conditioned,
            [Block],
            "blocks.0.norm.emb.linear.weight: got a call of blocks.0.norm.emb from outside of its unit, blocks.0, .*; add Embedder to units",
            [Block, Embedder],
        ),
        (
            Attending,
            [nn.Linear],
            "attention.out_proj.weight: got a read by attention, outside of its unit, attention.out_proj, .*; name MultiheadAttention in units",
            [nn.MultiheadAttention],
        ),
        (
            Direct,
            [nn.Linear],
            "layers.0.weight: got a read by the model itself, outside of its unit, layers.0, .*; leave Linear out of units",
            [Direct],
        ),
        (
            lambda: nn.Sequential(Direct()),
            [nn.Linear],
            "0.layers.0.weight: got a read by 0, outside of its unit, 0.layers.0, .*; name Direct in units in place of Linear",
            [Direct],
        ),
    ],
    ids=["called from outside", "read by its parent", "read by the model", "read by a module of the model"],
)
def test_the_module_to_make_a_unit_is_named(
    make: Callable[[], nn.Module], units: list[type[nn.Module]], words: str, mended: list[type[nn.Module]]
) -> None:
    x = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0))
    with ml.shard(make(), units=units) as engine, pytest.raises(ShardedParameterError, match=words):
        engine.model(x)
    torch.manual_seed(1)
    plain = make()
    torch.manual_seed(1)
    engine = ml.shard(make(), units=mended)
    for model in (plain, engine.model):
        model(x).square().sum().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    assert float(engine.step().grad_norm) == pytest.approx(float(norm), rel=1e-5)
    engine.close()
