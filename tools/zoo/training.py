"""Training of a model of the zoo: by ``shard``, and by torch's DDP and AdamW."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import megatron_llama as ml
from megatron_llama.launch.launcher import Place
from tools.zoo.entry import Entry, Inputs
from tools.zoo.pictures import PICTURES
from tools.zoo.sounds import SOUNDS
from tools.zoo.texts import TEXTS

MODELS: dict[str, Entry] = {**TEXTS, **PICTURES, **SOUNDS}
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
STEPS, MICROBATCHES, CLIP = 5, 2, 1.0
LR = 1e-3


@dataclass(frozen=True)
class Trained:
    """A rank's account of a training."""

    losses: tuple[float, ...]
    """Of each microbatch."""
    norms: tuple[float, ...]
    """Of each step's gradient, before clipping."""
    digest: str
    """Of all bits of the parameters after the last step."""
    units: int
    values: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers after the last step; of rank 0 alone."""
    trained: frozenset[str] = frozenset()
    """The names of the parameters that were trained; of rank 0 alone."""


def built(entry: Entry, rank: int = 0) -> nn.Module:
    """Build a model whose values depend on the rank: those of rank 0 count, for DDP and here."""
    torch.manual_seed(7 + rank)
    model = entry.build().train()
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in entry.frozen):
            parameter.requires_grad_(False)
    return model


def microbatch(entry: Entry, place: Place, step: int, number: int, dtype: torch.dtype) -> Inputs:
    """Draw a microbatch of a rank, and seed what the model draws with it."""
    seed = (step * place.world_size + place.rank) * MICROBATCHES + number
    torch.manual_seed(seed)
    drawn = entry.inputs(torch.Generator().manual_seed(seed))
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in drawn.items()}


def losses_of_step(
    entry: Entry, model: nn.Module, place: Place, step: int, dtype: torch.dtype = torch.float32
) -> Iterator[Tensor]:
    """Yield the loss of each microbatch of a step, each to go backward before the next."""
    for number in range(MICROBATCHES):
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = number == MICROBATCHES - 1
        inputs = microbatch(entry, place, step, number, dtype)
        arguments = {name: value for name, value in inputs.items() if name != "target"}
        yield entry.loss(model(**arguments), inputs) / MICROBATCHES


def adamw(entry: Entry, model: nn.Module) -> torch.optim.AdamW:
    """Return torch's AdamW of what is trained, by the kernel that the engine calls, too."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=LR, eps=entry.eps, weight_decay=0.1, fused=True)


def train_by_ddp(place: Place, name: str, dtype: torch.dtype = torch.float32) -> Trained:
    """Train a model as torch's users do."""
    entry = MODELS[name]
    model = built(entry, place.rank).to(dtype)
    ddp = DistributedDataParallel(model)
    optimizer = adamw(entry, model)
    losses, norms = [], []
    for step in range(STEPS):
        for loss in losses_of_step(entry, ddp, place, step, dtype):
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return _account(entry, place, model, losses, norms)


def train_by_shard(place: Place, name: str, strategy: str) -> Trained:
    """Train the same model by ``shard``."""
    entry = MODELS[name]
    model = built(entry, place.rank)
    engine = ml.shard(
        model,
        units=entry.is_unit,
        strategy=strategy,
        optimizer=adamw(entry, model),
        clip=CLIP,
        microbatches=MICROBATCHES,
    )
    losses, norms = [], []
    with engine:
        for step in range(STEPS):
            for loss in losses_of_step(entry, model, place, step):
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.item())
            norms.append(engine.step().grad_norm.item())
        trained = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
        with engine.gathered():
            return _account(entry, place, model, losses, norms, trained)


def _account(
    entry: Entry,
    place: Place,
    model: nn.Module,
    losses: Sequence[float],
    norms: Sequence[float],
    trained: frozenset[str] | None = None,
) -> Trained:
    """Return the account of a rank whose model holds its last values."""
    parameters = dict(model.named_parameters())
    units = sum(entry.is_unit(module) for module in model.modules())
    digest = _digest(parameters.values())
    if place.rank:
        return Trained(tuple(losses), tuple(norms), digest, units)
    held = parameters | dict(model.named_buffers())
    values = {name: value.detach().clone() for name, value in held.items()}
    if trained is None:
        trained = frozenset(name for name, p in parameters.items() if p.requires_grad)
    return Trained(tuple(losses), tuple(norms), digest, units, values, trained)


def _digest(values: Iterable[Tensor]) -> str:
    joined = hashlib.sha256()
    for value in values:
        joined.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return joined.hexdigest()
