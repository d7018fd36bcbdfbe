"""Engines to save and load, and what they hold in HuggingFace coordinates."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron_llama.checkpoint import native
from megatron_llama.checkpoint.chunks import Region, regions
from megatron_llama.checkpoint.native import TrainState
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.pieces import shard_pieces, step_counts
from megatron_llama.launch.launcher import Place
from megatron_llama.model.plan.params import hf_shapes
from torch import Tensor

from tests.parallel.cases import GLOBAL_BATCH_SIZE, Layout, Trainer, trainer
from tests.torch_twin import drawn

SINGLE = Place(0, 1, 0)
TRAINED = 2
"""Steps before a save: moments and step counter differ from their start."""


@dataclass(frozen=True)
class Held:
    """One rank's state after a save or a load."""

    regions: list[Region]
    steps: set[float]
    later: list[tuple[float, float]]
    """Loss and gradient norm of the steps that follow, where the layout can share their samples out."""


def state_at(iteration: int) -> TrainState:
    return TrainState(iteration, iteration * 8)


def trained(place: Place, layout: Layout, steps: int = TRAINED) -> Trainer:
    run = trainer(place, layout)
    for index in range(steps):
        run.step(index)
    return run


def copies(engine: OverlappedDistributedOptimizer) -> list[Region]:
    return [Region(part.key, part.shape, part.offset, part.size, part.tensor.clone()) for part in regions(shard_pieces(engine))]


def merged(parts: Iterable[Region]) -> dict[str, Tensor]:
    """Whole tensors by key. Asserts that nothing is missing and that all copies are bitwise equal."""
    parts = list(parts)
    whole = {part.key: torch.full(part.shape, torch.nan) for part in parts}
    for part in parts:
        place = whole[part.key][tuple(slice(start, start + size) for start, size in zip(part.offset, part.size, strict=True))]
        assert bool((place.isnan() | (place == part.tensor)).all()), f"copies of {part.key} differ"
        place.copy_(part.tensor)
    assert not any(bool(tensor.isnan().any()) for tensor in whole.values())
    return whole


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def held(run: Trainer, later: int = 2) -> Held:
    run.optimizer.settle()
    before = copies(run.optimizer)
    steps = {float(count) for count in step_counts(run.optimizer)}
    following = range(TRAINED, TRAINED + later) if GLOBAL_BATCH_SIZE % run.layout.dp == 0 else ()
    return Held(before, steps, [(loss.item(), norm.item()) for loss, norm in map(run.step, following)])


def save_under(place: Place, layout: Layout, folder: Path, later: int = 2) -> Held:
    run = trained(place, layout)
    path = native.save(folder, run.optimizer, run.mesh, state_at(TRAINED), layout.config())
    assert path == folder / "iter_0000002"
    return held(run, later)


def load_under(place: Place, layout: Layout, folder: Path, later: int = 2) -> Held:
    return load_into(trainer(place, layout), folder, later)


def load_into(run: Trainer, folder: Path, later: int = 2) -> Held:
    assert native.load(folder, run.optimizer, run.mesh, run.layout.config().model) == state_at(TRAINED)
    return held(run, later)


def whole_weights(folder: Path) -> dict[str, Tensor]:
    """All weights of the newest checkpoint, read without an engine."""
    weights = native.open_weights(folder)
    return {name: drawn(weights, name, shape) for name, shape in hf_shapes(weights.model).items()}


def renew_sums(folder: Path) -> None:
    """Have SHA256SUMS say what the files of a checkpoint hold now, as one who changes them on purpose does: what is wrong with them is
    then for the checks behind that of the sums to find."""
    names = [line[66:] for line in (folder / "SHA256SUMS").read_text().splitlines()]
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names if (folder / name).is_file()}
    (folder / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """The kernel refuses to make any file of this process larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
