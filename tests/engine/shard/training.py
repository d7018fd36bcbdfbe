"""Training of a model: by torch alone, in one process or with DistributedDataParallel, and by ``shard``. Nothing here knows how the
package does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import megatron_llama as ml
import torch
import torch.distributed as dist
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests import torch_twin
from tests.engine.shard.shapes import SHAPES
from tests.engine.shard.twins import TWINS, Inputs, Twin
from tests.parallel.cases import STRATEGIES, digest
from tests.torch_twin import by_decay

STEPS, GLOBAL_BATCH_SIZE = 20, 8
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
CLIP = 0.2
"""Less than the norm of each step of each model."""


@dataclass(frozen=True)
class Run:
    """How a model is trained, whoever trains it."""

    model: str = "llama"
    dp: int = 2
    microbatches: int = 1
    """Of each rank, in one step."""
    clip: float = 0.0
    steps: int = STEPS
    dtype: torch.dtype = torch.float32

    @property
    def twin(self) -> Twin:
        """What is trained."""
        return (TWINS | SHAPES)[self.model]

    @property
    def name(self) -> str:
        """As tests are called."""
        return f"{self.model} dp{self.dp} {self.microbatches} microbatches clip {self.clip:g}"

    def parts(self, rank: int, step: int) -> list[Inputs]:
        """A rank's microbatches. The global batch of a step is the same for every number of ranks and microbatches."""
        size = GLOBAL_BATCH_SIZE // (self.dp * self.microbatches)
        starts = (step * GLOBAL_BATCH_SIZE + (m * self.dp + rank) * size for m in range(self.microbatches))
        return [self._cast(self.twin.inputs(range(start, start + size))) for start in starts]

    def _cast(self, inputs: Inputs) -> Inputs:
        return {name: value.to(self.dtype) if value.is_floating_point() else value for name, value in inputs.items()}

    def seed(self, step: int, rank: int, number: int) -> int:
        """Of what a microbatch draws."""
        return (step * self.dp + rank) * self.microbatches + number

    def built(self, rank: int = 0) -> nn.Module:
        """The model with the values of a rank: those of rank 0 count, for DDP as for this package."""
        return built(self.twin.build, rank).to(self.dtype)


@dataclass(frozen=True)
class Trained:
    """A rank's account of a run."""

    losses: tuple[float, ...]
    """Of each microbatch."""
    norms: tuple[float, ...]
    """Before clipping."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers after the last step; of rank 0."""
    digest: str = ""
    """Of all bits of the parameters; of every rank."""


def built(build: Callable[[], nn.Module], rank: int = 0) -> nn.Module:
    """A model whose values a seed decides, another one on each rank."""
    torch.manual_seed(7 + rank)
    return build().train()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Torch's, fused: the kernel that the package calls too."""
    return torch.optim.AdamW(by_decay(model.parameters(), WEIGHT_DECAY), lr=LR, betas=BETAS, eps=EPS, fused=True)


def trained(rank: int, model: nn.Module, losses: Sequence[float], norms: Sequence[float]) -> Trained:
    """The account of a rank whose model holds its last values."""
    parameters = dict(model.named_parameters())
    values = {} if rank else {name: value.detach().clone() for name, value in (parameters | dict(model.named_buffers())).items()}
    return Trained(tuple(losses), tuple(norms), values, digest(parameters.values()))


def train(run: Run, rank: int, **options: Any) -> Trained:
    """Train by ``shard``, with these options of it."""
    model = run.built(rank)
    optimizer = ml.AdamW(lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    losses, norms = [], []
    given = (
        {"units": run.twin.units, "optimizer": optimizer, "clip": run.clip, "microbatches": run.microbatches} | run.twin.options | options
    )
    with ml.shard(model, **given) as engine:
        for step in range(run.steps):
            for number, part in enumerate(run.parts(rank, step)):
                torch.manual_seed(run.seed(step, rank, number))
                loss = run.twin.loss(model, part) / run.microbatches
                loss.backward()
                losses.append(loss.item())
            norms.append(engine.step().grad_norm.item())
        with engine.gathered():
            return trained(rank, model, losses, norms)


def train_with_ddp(run: Run, rank: int, hook: Callable[[object, dist.GradBucket], torch.futures.Future[Tensor]] | None = None) -> Trained:
    """Torch's data-parallel training. ``hook``: sums its gradients in DDP's place."""
    model = run.built(rank)
    ddp = DistributedDataParallel(model)
    if hook is not None:
        ddp.register_comm_hook(None, hook)

    def losses_of(step: int) -> Iterator[Tensor]:
        parts = run.parts(rank, step)
        for number, part in enumerate(parts):
            torch.manual_seed(run.seed(step, rank, number))
            ddp.require_backward_grad_sync = number == len(parts) - 1
            yield run.twin.loss(ddp, part) / run.microbatches

    return trained(rank, model, *torch_twin.train(model, adamw(model), losses_of, run.steps, run.clip))


def train_alone(
    run: Run,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    before_update: Callable[[int], object] = lambda step: None,
    loss_of: Callable[[nn.Module, Inputs, int], Tensor] | None = None,
) -> Trained:
    """One process that computes what all ranks of ``run`` do, a microbatch at a time: losses are those of rank 0, then those of rank 1.
    ``before_update``: called behind the backward passes of a step."""
    model = model or run.built()

    def losses_of(step: int) -> Iterator[Tensor]:
        for rank in range(run.dp):
            for number, part in enumerate(run.parts(rank, step)):
                torch.manual_seed(run.seed(step, rank, number))
                loss = loss_of(model, part, step) if loss_of else run.twin.loss(model, part)
                yield loss / run.microbatches / run.dp
        before_update(step)

    losses, norms = torch_twin.train(model, optimizer or adamw(model), losses_of, run.steps, run.clip)
    by_rank = torch.tensor(losses, dtype=torch.float64).view(run.steps, run.dp, run.microbatches).transpose(0, 1)
    return trained(0, model, (by_rank * run.dp).flatten().tolist(), norms)


def deviation(found: Sequence[float], expected: Sequence[float]) -> float:
    """Largest relative difference; NaN if any is."""
    return float((torch.tensor(found, dtype=torch.float64) / torch.tensor(expected, dtype=torch.float64) - 1).abs().max())


def farthest(found: dict[str, Tensor], expected: dict[str, Tensor], idle: str = "none") -> float:
    """The largest difference of two models' values, in learning rates: what one step of AdamW may move an element."""
    assert found.keys() == expected.keys() and found
    return max(
        float((found[name].double() - expected[name].double()).abs().max()) / LR
        for name in expected
        if idle not in name and expected[name].numel()
    )


def differences(found: Sequence[Trained], expected: Sequence[Trained]) -> tuple[float, float]:
    """Largest relative differences of losses and norms over all steps and ranks."""
    loss = max(deviation(one.losses, other.losses) for one, other in zip(found, expected, strict=True))
    return loss, max(deviation(one.norms, other.norms) for one, other in zip(found, expected, strict=True))


def ddp(place: Place, run: Run) -> Trained:
    """A rank of ``train_with_ddp``."""
    return train_with_ddp(run, place.rank)


def sharded(place: Place, run: Run, options: Mapping[str, Any]) -> Trained:
    """A rank of ``train``."""
    return train(run, place.rank, **options)


TWICE = Run(microbatches=2, clip=CLIP)


def layouts() -> list[tuple[Run, Mapping[str, Any]]]:
    """For ``tools/parity.py --modules``: every model over two and four ranks by every strategy, hybrid ones too; LLaMA with each kind of step."""
    kinds = [Run(), TWICE, Run(microbatches=2), Run(clip=CLIP), Run(microbatches=4, clip=CLIP)]
    found: list[tuple[Run, Mapping[str, Any]]] = []
    for model in TWINS:
        for kind in kinds if model == "llama" else kinds[:2]:
            two = replace(kind, model=model)
            four = replace(two, dp=4)
            if model == "resnet":
                # Batch norm of a single sample: fp32 itself is 5e-3 from fp64 in norm after 20 steps.
                four = replace(four, microbatches=1)
            found += [(run, {"strategy": strategy}) for run in (two, four) for strategy in STRATEGIES]
            found += [(four, {"strategy": strategy, "shard_size": 2}) for strategy in STRATEGIES[1:]]
    return [(run, options) for run, options in found if run.dp * run.microbatches <= GLOBAL_BATCH_SIZE]
