"""Small models in plain torch that use their layers in many ways, and what plain torch makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron_llama.engine.shard.engine import ModuleEngine
from megatron_llama.engine.shard.optimizer import AdamW
from megatron_llama.engine.shard.shard import shard
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import torch_twin
from tests.torch_twin import by_decay

WIDTH = 12
WORDS = 17
LENGTH = 5
LR, DECAY, CLIP = 1e-2, 0.1, 0.5


class Feed(nn.Module):
    """The inner half of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    """A residual block with parameters of its own and an inner module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Parameter(torch.randn(LENGTH, LENGTH) / LENGTH)
        self.feed = Feed()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed(self.mix @ self.norm(x)) * self.mix.diagonal().mean()


class Net(nn.Module):
    """Embedding, blocks and head. ``way`` says how the blocks are called."""

    def __init__(self, way: str = "plain", blocks: int = 4) -> None:
        super().__init__()
        self.way = way
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if way == "tied":
            self.head.weight = self.embed.weight
        if way == "frozen":
            self.blocks[1].requires_grad_(False)
            self.embed.requires_grad_(False)
            self.blocks[2].feed.up.weight.requires_grad_(False)
        if way == "same block":
            self.blocks = nn.ModuleList([self.blocks[0]] * blocks)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scale
        for number, block in enumerate(self.blocks):
            x = self._run(number, block, x)
        if self.way == "head elsewhere":
            return F.linear(x, self.head.weight)
        return self.head(x)

    def _run(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        match self.way:
            case "reentrant":
                return checkpoint(block, x, use_reentrant=True)
            case "not reentrant":
                return checkpoint(block, x, use_reentrant=False)
            case "reentrant pairs" | "pairs":
                if number % 2:
                    return x
                pair = self.blocks[number : number + 2]
                return checkpoint(lambda y: pair[1](pair[0](y)), x, use_reentrant=self.way != "pairs")
            case "without the last" if number == len(self.blocks) - 1:
                return x
            case "twice":
                return block(block(x))
            case "round":
                return block(self.blocks[0](x))
            case "towers":
                return block(x) + self.blocks[-1 - number](x.flip(0))
            case _:
                return block(x)


@dataclass
class Trained:
    """What some steps made."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


Loss = Callable[[nn.Module, Tensor], Tensor]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Cross entropy of the next word."""
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def part(step: int, microbatch: int, rank: int) -> Tensor:
    """The ids of one microbatch."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank)
    return torch.randint(WORDS, (3, LENGTH), generator=generator)


def net(way: str = "plain") -> Net:
    """The same model in every process, in fp64."""
    torch.manual_seed(7)
    return Net(way).double()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """torch's, as ``sharded`` has it."""
    return torch.optim.AdamW(by_decay(model.parameters(), DECAY), lr=LR)


def plain(model: nn.Module, *, world: int, microbatches: int, steps: int, loss: Loss = loss_of) -> Trained:
    """Train with torch alone, in one process, on the batches of all ranks."""

    def losses_of(step: int) -> Iterator[Tensor]:
        for rank in range(world):
            for microbatch in range(microbatches):
                yield loss(model, part(step, microbatch, rank)) / microbatches / world

    losses, norms = torch_twin.train(model, adamw(model), losses_of, steps, CLIP)
    together = torch.tensor(losses, dtype=torch.float64).view(steps, -1).sum(1).tolist()
    return Trained(together, norms, {name: p.detach().clone() for name, p in model.named_parameters()})


def train(place: Place, engine: ModuleEngine, *, microbatches: int, steps: int, loss: Loss = loss_of, first: int = 0) -> Trained:
    """Train with the engine, on this rank's batches."""
    found = Trained()
    for step in range(first, first + steps):
        total = torch.zeros((), dtype=torch.float64)
        for microbatch in range(microbatches):
            value = loss(engine.model, part(step, microbatch, place.rank)) / microbatches / place.world_size
            (value * place.world_size).backward()
            total += value.detach()
        result = engine.step()
        assert result.skipped == 0
        found.norms.append(result.grad_norm.item())
        if place.world_size > 1:
            dist.all_reduce(total)
        found.losses.append(total.item())
    with engine.gathered():
        found.parameters = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    return found


def sharded(model: nn.Module, units: Sequence[type[nn.Module]] = (Block,), **options: Any) -> ModuleEngine:
    """The engine of a model, with the optimizer of ``plain``."""
    return shard(model, units=units, optimizer=AdamW(lr=LR, weight_decay=DECAY), clip=CLIP, **options)


def difference(one: Trained, other: Trained) -> float:
    """The largest difference of losses, norms and parameters."""
    pairs = [*zip(one.losses, other.losses, strict=True), *zip(one.norms, other.norms, strict=True)]
    numbers = [abs(a - b) for a, b in pairs]
    assert one.parameters.keys() == other.parameters.keys()
    numbers += [(one.parameters[name] - other.parameters[name]).abs().max().item() for name in one.parameters]
    return max(numbers)
