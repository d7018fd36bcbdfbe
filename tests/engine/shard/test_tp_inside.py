"""Models with torch's tensor parallelism inside train under ``shard`` as in one process, and as under FSDP2 over the same mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron_llama as ml
import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron_llama.engine.shard.engine import ModuleEngine
from megatron_llama.errors import ConfigError, UserError
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from tests import torch_twin
from tests.engine.shard.twins import VOCABULARY, sentences
from tests.engine.shard.training import CLIP, EPS, STEPS, WEIGHT_DECAY, adamw, deviation
from tests.engine.shard.training import BETAS, LR
from tests.harness import Cluster
from tests.parallel.cases import STRATEGIES
from tests.refused import keys

WIDTH, HEAD = 32, 8
LOSS, NORM = 1e-6, 2e-5


class Attention(nn.Module):
    """Causal attention over as many heads as its weights have here."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=name == "query") for name in ("query", "key", "value"))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 48, bias=False), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A block of LLaMA."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.mlp_norm, self.mlp = nn.RMSNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """A small LLaMA."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


Plan = dict[str, ParallelStyle]


def plain_plan() -> Plan:
    """Matrices of blocks and the head are cut; norms and the embedding are plain parameters on every rank."""
    cut = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
    of_block: Plan = {name: ColwiseParallel() for name in cut} | {name: RowwiseParallel() for name in ("attention.out", "mlp.down")}
    return of_blocks(of_block) | {"head": ColwiseParallel(output_layouts=Replicate())}


def sequence_plan() -> Plan:
    """Everything is a DTensor, and between the matrices ranks have different tokens."""
    of_block: Plan = {name: SequenceParallel() for name in ("attention_norm", "mlp_norm")}
    for name in ("attention", "mlp"):
        of_block[name] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    of_block |= {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    of_block |= {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
    of_block |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.out", "mlp.down")}
    return of_blocks(of_block) | {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def of_blocks(plan: Plan) -> Plan:
    return {f"blocks.*.{name}": style for name, style in plan.items()}


PLANS: Mapping[str, Callable[[], Plan]] = {"plain": plain_plan, "sequence": sequence_plan}


def grid(dp: int = 2, tp: int = 2) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(dp * tp).view(dp, tp), mesh_dim_names=("dp", "tp"))


def built(seed: int = 7, frozen: Sequence[str] = ()) -> Model:
    torch.manual_seed(seed)
    model = Model()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model


def parallelized(mesh: DeviceMesh, plan: str, frozen: Sequence[str] = ()) -> Model:
    """With values that differ between data-parallel ranks: those of the first one count."""
    return parallelize_module(built(7 + mesh.get_local_rank("dp"), frozen), mesh["tp"], PLANS[plan]())


def loss_of(model: nn.Module, step: int, part: int, parts: int) -> Tensor:
    """Of one of the equal parts of a step's batch."""
    rows = 8 // parts
    start = 8 * step + rows * part
    ids = sentences(range(start, start + rows))
    return cross_entropy(model(ids[:, :-2]).flatten(0, 1), ids[:, 1:-1].flatten())


@dataclass(frozen=True)
class Curve:
    """Losses, the mean over the ranks, and norms before clipping."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]


def optimizer_of(**options: Any) -> ml.AdamW:
    return ml.AdamW(lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, **options)


def mean(value: float, mesh: DeviceMesh) -> float:
    found = torch.tensor(value, dtype=torch.float64)
    torch.distributed.all_reduce(found, group=mesh.get_group("dp"))
    return float(found) / mesh["dp"].size()


def steps_of(engine: ModuleEngine, mesh: DeviceMesh, steps: range) -> Curve:
    """Train with an engine of two microbatches."""
    losses, norms = [], []
    here, parts = mesh.get_local_rank("dp"), 2 * mesh["dp"].size()
    for step in steps:
        total = 0.0
        for number in range(2):
            loss = loss_of(engine.model, step, 2 * here + number, parts) / 2
            loss.backward()
            total += loss.item()
        losses.append(mean(total, mesh))
        norms.append(engine.step().grad_norm.item())
    return Curve(tuple(losses), tuple(norms))


def sharded(mesh: DeviceMesh, plan: str, frozen: Sequence[str] = (), **options: Any) -> ModuleEngine:
    given = {"units": [Block], "optimizer": optimizer_of(), "clip": CLIP, "microbatches": 2, "mesh": mesh["dp"]} | options
    return ml.shard(parallelized(mesh, plan, frozen), **given)


def alone(steps: int = STEPS, frozen: Sequence[str] = ()) -> tuple[Curve, dict[str, Tensor]]:
    """One process with all samples, and its last weights."""
    model = built(frozen=frozen)
    losses, norms = torch_twin.train(model, adamw(model), lambda step: (loss_of(model, step, part, 4) / 4 for part in range(4)), steps, CLIP)
    by_step = torch.tensor(losses, dtype=torch.float64).view(steps, 4).sum(1)
    return Curve(tuple(by_step.tolist()), tuple(norms)), {name: p.detach().clone() for name, p in model.named_parameters()}


def require_close(found: Curve, expected: Curve) -> None:
    assert deviation(found.losses, expected.losses) < LOSS
    assert deviation(found.norms, expected.norms) < NORM


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def require_weights(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Weights are as near as a hundredth of what one step may move an element."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape
        assert float((found[name] - value).abs().max()) < 0.02 * LR, name


def train_by_every_strategy(place: Place, plan: str) -> list[Curve]:
    mesh = grid()
    curves = []
    for strategy in STRATEGIES:
        with sharded(mesh, plan, strategy=strategy) as engine:
            curves.append(steps_of(engine, mesh, range(STEPS)))
    return curves


@pytest.mark.parametrize("plan", PLANS)
def test_ranks_train_as_one_process(cluster: Cluster, plan: str) -> None:
    expected, _ = alone()
    assert min(expected.norms) > CLIP
    for curves in cluster.run(4, train_by_every_strategy, plan):
        for curve in curves:
            require_close(curve, expected)
