"""Layouts of a user's module under ``megatron_llama.shard``, and how one rank of them runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from megatron_llama.engine.shard.engine import ModuleEngine
from megatron_llama.engine.shard.muon import Muon
from megatron_llama.engine.shard.optimizer import AdamW
from megatron_llama.engine.shard.shard import shard
from megatron_llama.engine.shard.shard_options import STRATEGIES
from megatron_llama.engine.shard.user_groups import group
from tools.stream_check.events import Event, Site
from tools.stream_check.rank import name_buffers, recorded
from tools.stream_check.recording import DEVICE, Recording

_WIDTH = 16
_WORDS = 24


class _Block(nn.Module):
    """A residual block: a norm, two linear layers that wait for their weights themselves, and a
    parameter of its own, whose gradient comes through a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH, bias=False)
        self.mix = nn.Parameter(torch.randn(_WIDTH, _WIDTH) / _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x) @ self.mix)))
        return out


class _Model(nn.Module):
    """Embedding, blocks, and a head, which may share the embedding's weight."""

    def __init__(self, *, tied: bool, recompute: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(_WIDTH))
        self.head = nn.Linear(_WIDTH, _WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("bias", torch.zeros(_WIDTH))
        self._recompute = recompute

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scale + self.bias
        for block in self.blocks:
            x = self._recomputed(block, x) if self._recompute else block(x)
        out: Tensor = self.head(x)
        return out

    def _recomputed(self, block: nn.Module, x: Tensor) -> Tensor:
        # No check of devices: in a backward pass nobody answers for the recorded one.
        out: Tensor = checkpoint(block, x, use_reentrant=False, determinism_check="none")
        return out


@dataclass(frozen=True)
class UserLayout:
    """A training loop of a user, and the rank of it that is recorded."""

    world_size: int = 2
    rank: int = 0
    microbatches: int = 2
    steps: int = 3
    tied: bool = False
    recompute: bool = False
    muon: bool = False
    """Whether Muon updates the matrices of the blocks."""
    between: bool = False
    """Whether the model is evaluated, gathered, changed, saved and loaded after the second step."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of ``shard``."""


def record(layout: UserLayout, skip: Site | None = None) -> list[Event]:
    """Return what the rank does. What is called at ``skip`` to wait or to record an event does
    nothing."""
    return recorded(partial(_train, layout), layout.rank, layout.world_size, skip)


def _train(layout: UserLayout, recording: Recording) -> None:
    with DEVICE:
        torch.manual_seed(0)
        model = _Model(tied=layout.tied, recompute=layout.recompute)
    optimizer = Muon if layout.muon else AdamW
    engine = shard(
        model,
        units=[_Block],
        # A bucket of its own: those with nothing but weights of linear layers are waited for late.
        optimizer=optimizer(lr=1e-3, groups=[group("*.mix", weight_decay=0.0)]),
        microbatches=layout.microbatches,
        **layout.options,
    )
    with closing(engine):
        for step in range(layout.steps):
            for _ in range(layout.microbatches):
                torch.autograd.backward(_loss(model))
            result = engine.step()
            if step == 1 and layout.between:
                _between(engine)
        float(result.grad_norm)
        engine._engine.settle()
        name_buffers(recording, engine._engine)


def _loss(model: nn.Module) -> Tensor:
    ids = torch.arange(2 * 6).view(2, 6).to(DEVICE, non_blocking=True) % _WORDS
    logits = model(ids)
    loss: Tensor = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
    return loss


def _between(engine: ModuleEngine) -> None:
    """What users do between two steps."""
    model = engine.model
    with torch.no_grad():
        float(_loss(model))
    with engine.gathered():
        whole = {name: value.clone() for name, value in model.state_dict().items()}
    with engine.gathered(modify=True), torch.no_grad():
        next(model.parameters()).mul_(0.5)
    for value in engine.state_dict()["model"].values():
        float((value.to_local() if isinstance(value, DTensor) else value).sum())
    engine.load_state_dict({"model": whole})
    for each in engine.param_groups:
        each["lr"] = 5e-4


def user_layouts() -> Mapping[str, Callable[[Site | None], list[Event]]]:
    """Return every layout by its name, as ``layouts.layouts``."""
    sharded: dict[str, Any] = {"strategy": "optim_grads_params"}
    found = {
        f"shard, {strategy}": UserLayout(options={"strategy": strategy}) for strategy in STRATEGIES
    }
    for strategy in STRATEGIES:
        found[f"shard, {strategy}, between steps"] = UserLayout(
            between=True, steps=4, options={"strategy": strategy, "clip": 1.0}
        )
    for words, options in (
        ("1 slot", {"param_slots": 1, "grad_slots": 1}),
        ("3 slots", {"param_slots": 3, "grad_slots": 3}),
        ("all slots", {"param_slots": "all"}),
        ("any order", {"static_order": False}),
        ("any order, 3 slots", {"static_order": False, "param_slots": 3}),
        ("unused", {"find_unused": True}),
        ("bf16", {"dtype": torch.bfloat16, "clip": 1.0}),
        ("bf16, reduced in bf16", {"dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}),
        ("exact offload", {"optimizer_offload": "exact", "dtype": torch.bfloat16, "clip": 1.0}),
        ("exact offload, fp32", {"optimizer_offload": "exact"}),
    ):
        found[f"shard, {words}"] = UserLayout(options={**sharded, **options})
    found["shard, optim, exact offload, between steps"] = UserLayout(
        between=True, steps=4, options={"strategy": "optim", "optimizer_offload": "exact"}
    )
    found["shard, one microbatch"] = UserLayout(microbatches=1, options=sharded)
    found["shard, tied"] = UserLayout(tied=True, options=sharded)
    found["shard, recomputed"] = UserLayout(recompute=True, options=sharded)
    for strategy in STRATEGIES:
        found[f"shard, muon, {strategy}"] = UserLayout(
            muon=True, between=True, steps=4, options={"strategy": strategy, "clip": 1.0}
        )
    replicas = {**sharded, "shard_size": 2}
    found["shard, muon, two replicas"] = UserLayout(
        world_size=4, rank=3, muon=True, options=replicas
    )
    found["shard, two replicas"] = UserLayout(world_size=4, rank=3, options=replicas)
    found["shard, one process"] = UserLayout(world_size=1, options=sharded)
    return {name: partial(record, layout) for name, layout in found.items()}
