"""Checkpoints to resume from: written by all ranks together, read under any layout, never half
there.

SAVE/iter_0000100/      meta.json, .metadata and *.distcp (torch.distributed.checkpoint), SHA256SUMS

Tensors have the names and shapes of the HuggingFace model, and the saved weight is the fp32 master.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from uuid import uuid4

from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from megatron_llama.checkpoint.adapters import Merged, saved_lora, scaling_of
from megatron_llama.checkpoint.checkpoint_dir import (
    Retention,
    checkpoint_path,
    find,
    publish,
    retain,
    tidy,
)
from megatron_llama.checkpoint.checksums import seal
from megatron_llama.checkpoint.chunks import LoadRegions, Region, is_state, make_index, regions
from megatron_llama.checkpoint.columns import SavedColumns, column_pieces
from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.folders import discard, fresh_staging, staging
from megatron_llama.checkpoint.meta import (
    META,
    CheckpointMeta,
    TrainState,
    meta_json,
    model_differences,
    parse_meta,
)
from megatron_llama.checkpoint.storage import (
    ChunkReader,
    Written,
    read_metadata,
    refuse,
    write_index,
    write_parts,
)
from megatron_llama.checkpoint.storage_paths import storage_path
from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.distributed.comm.object_collectives import (
    all_reduce_max,
    broadcast_object,
    gather_object,
    raise_error_on_all_ranks,
    raise_on_all_ranks,
)
from megatron_llama.distributed.mesh import Mesh
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.errors import CheckpointError
from megatron_llama.plans.params import Rectangle, adapter_shapes, hf_shapes


@dataclass(frozen=True)
class SavePlan:
    """What a rank writes at every save of a run, agreed on once."""

    parts: tuple[Region, ...]
    """Of this rank, with their live storage."""
    index: Metadata | None
    """Of all ranks' parts; on rank 0."""
    room: str
    """Where in the job's store the ranks say that they are done; drawn anew for each run."""


def plan_save(engine: OverlappedDistributedOptimizer, mesh: Mesh) -> SavePlan:
    """Find out who writes what: of duplicates, one. Collective."""
    pieces = (
        piece for piece in chain(engine.pieces(), column_pieces(engine, mesh)) if piece.primary
    )
    parts = tuple(part for region in regions(pieces) for part in region.split())
    plans = gather_object([part.write_item() for part in parts], mesh.world)
    return SavePlan(
        parts,
        make_index(plans) if plans is not None else None,
        broadcast_object(f"save/{uuid4().hex}", mesh.world),
    )


def save(
    folder: str | Path,
    engine: OverlappedDistributedOptimizer,
    mesh: Mesh,
    state: TrainState,
    config: Config,
    *,
    validation_loss: float | None = None,
    keep: Retention | None = None,
) -> Path:
    """Write ``folder/iter_NNNNNNN`` and point the tracker at it. Collective; every rank returns the
    path.

    A failure on any rank raises the same CheckpointError on all, and leaves earlier checkpoints as
    they were. What killed saves left behind is removed first. ``keep``: which checkpoints stay;
    None: all, and no links.
    """
    target = checkpoint_path(folder, state.iteration)
    plan = plan_save(engine, mesh)
    meta = describe_state(engine, mesh, state, config, validation_loss)
    try:
        with raise_on_all_ranks(mesh.world), writing(target):
            if mesh.rank == 0:
                tidy(folder)
                fresh_staging(target)
        written = None
        with raise_on_all_ranks(mesh.world):
            written = write_parts(staging(target), mesh.rank, plan.parts)
        everybody = gather_object(written, mesh.world)
        with raise_on_all_ranks(mesh.world), writing(target):
            if everybody is not None:
                assert plan.index is not None
                finish(target, plan.index, everybody, meta, keep)
    finally:
        if mesh.rank == 0:
            discard(target)
    return target


def describe_state(
    engine: OverlappedDistributedOptimizer,
    mesh: Mesh,
    state: TrainState,
    config: Config,
    validation_loss: float | None,
) -> bytes:
    """The content of ``meta.json`` for the engine as it is, settled. Collective."""
    engine.settle()
    updates, agreed = all_reduce_max(
        max((int(count) for count in engine.step_counts()), default=0), mesh.world
    )
    agreed.wait()
    return meta_json(state, int(updates), engine.loss_scale.state(), config, validation_loss)


def finish(
    target: Path, index: Metadata, written: Sequence[Written], meta: bytes, keep: Retention | None
) -> None:
    """Give a checkpoint its name, when every rank has written its part; then renew the links and
    remove old ones.

    Raises CheckpointError."""
    folder = staging(target)
    sums = write_index(folder, index, written)
    with writing(folder / META):
        seal(folder, sums, META, meta)
    with writing(target):
        publish(target)
        if keep is not None:
            retain(target.parent, keep)


def _run(path: Path, mesh: Mesh, action: Callable[[bool], object]) -> None:
    """Run a function of torch.distributed.checkpoint, which fails on every rank if on one, with an
    error of ours."""
    problem = None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            action(mesh.world.size == 1)
        except CheckpointException as error:
            cause = next(
                (cause for rank, (cause, _) in error.failures.items() if rank == mesh.rank), None
            )
            if cause is not None:
                problem = (
                    cause
                    if isinstance(cause, CheckpointError)
                    else CheckpointError(f"{path}: {type(cause).__name__}: {cause}")
                )
    raise_error_on_all_ranks(problem, mesh.world)


def read_meta(path: str | Path) -> CheckpointMeta:
    """What a checkpoint (or the latest one in a folder) holds besides tensors. Raises
    CheckpointError."""
    return parse_meta(find(path))


def load(
    path: str | Path,
    engine: OverlappedDistributedOptimizer,
    mesh: Mesh,
    model: ModelConfig,
    *,
    optimizer: bool = True,
) -> TrainState:
    """Fill the engine from a checkpoint, or the latest one in a folder, whatever layout it was
    saved under. Collective.

    ``model``: the one the engine was built for, derived fields filled in. ``optimizer``: its state
    too, which else is that of a fresh one, at a loss scale as configured. Everything that can be
    checked without reading the tensors is checked first; a failure on any rank raises the same
    CheckpointError on all.
    """
    engine.settle()
    with raise_on_all_ranks(mesh.world):
        folder = find(path) if mesh.rank == 0 else storage_path(path)
    # Machines may see different states of a shared folder for a while; loading different iterations
    # would go unnoticed.
    folder = broadcast_object(folder, mesh.world)
    with raise_on_all_ranks(mesh.world):
        meta, reader, planner, columns = _open(folder, engine, mesh, model, optimizer)
    _run(
        folder,
        mesh,
        lambda no_dist: state_dict_loader.load(
            {}, storage_reader=reader, planner=planner, no_dist=no_dist
        ),
    )
    for count in engine.step_counts():
        count.fill_(meta.optimizer_step if optimizer else 0)
    columns.take_up(meta.optimizer_step if optimizer else 0, meta.config["optimizer"])
    if optimizer:
        engine.loss_scale.load(meta.loss_scale)
    else:
        engine.loss_scale.reset()
    engine.publish()
    return meta.state


def _open(
    folder: Path,
    engine: OverlappedDistributedOptimizer,
    mesh: Mesh,
    model: ModelConfig,
    optimizer: bool,
) -> tuple[CheckpointMeta, ChunkReader, LoadRegions, SavedColumns]:
    meta = parse_meta(folder)
    differences = model_differences(str(folder / META), meta.model, model, resumes=optimizer)
    refuse(f"{folder} is a checkpoint of another model:", differences)
    metadata = read_metadata(folder)
    columns = SavedColumns(engine, mesh, metadata)
    own = [*regions(engine.pieces()), *columns.regions]
    if not optimizer or not any(is_state(key) for key in metadata.state_dict_metadata):
        own = _without_state(own)
    reader = ChunkReader(folder, metadata)
    planner = LoadRegions(own, metadata)
    problems = planner.problems(str(folder), any_dtype=False) or reader.problems(
        planner.create_local_plan().items
    )
    refuse(f"{folder} is incomplete:", problems)
    return meta, reader, planner, columns


def _without_state(own: list[Region]) -> list[Region]:
    """The weights alone. A converted checkpoint has no more: the optimizer starts afresh, with
    moments of zero."""
    for part in own:
        if is_state(part.key):
            part.tensor.zero_()
    return [part for part in own if not is_state(part.key)]


class NativeWeights:
    """The weights of a checkpoint, without an engine: a source of HuggingFace rectangles that holds
    one chunk at a time.

    Low-rank additions are added to the weights; ``stored`` is what the files hold."""

    def __init__(self, path: str | Path) -> None:
        self.meta = read_meta(path)
        self._metadata = read_metadata(self.meta.folder)
        self._reader = ChunkReader(self.meta.folder, self._metadata)
        self.lora = saved_lora(self.meta.config)
        adapters = adapter_shapes(self.model, self.lora)
        self._check({**hf_shapes(self.model), **adapters})
        self._merged = (
            Merged(self.stored, self.stored, adapters, scaling_of(self.lora))
            if adapters
            else self.stored
        )

    @property
    def model(self) -> ModelConfig:
        """The saved model."""
        return self.meta.model

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        # Expanded scalars: only their sizes count.
        whole = [
            Region(n, s, (0,) * len(s), s, Tensor().new_empty(()).expand(s))
            for n, s in shapes.items()
        ]
        planner = LoadRegions(whole, self._metadata)
        problems = planner.problems(str(self.meta.folder), any_dtype=True) or self._reader.problems(
            planner.create_local_plan().items
        )
        refuse(f"{self.meta.folder} is incomplete:", problems)

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """Write the rectangle's values into ``out``, a tensor of its size. Raises CheckpointError
        naming a damaged file."""
        self._merged(rectangle, out)

    def stored(self, rectangle: Rectangle, out: Tensor) -> None:
        """The same for what is in the files, low-rank additions among it."""
        planner = LoadRegions([Region.of(rectangle, out)], self._metadata)
        self._reader.read_data(planner.create_local_plan(), planner)


def open_weights(path: str | Path) -> NativeWeights:
    """The weights of a checkpoint, or of the latest one in a folder. Raises CheckpointError."""
    return NativeWeights(path)
