"""Checkpoints to resume from. All ranks write one together; it is read under any layout, and
appears whole or not at all.

SAVE/iter_0000100/      meta.json, .metadata and *.distcp (torch.distributed.checkpoint), SHA256SUMS

Tensors have the names and shapes of the HuggingFace model. The saved weight is the fp32 master.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from megatron_llama.checkpoint.adapters import MergedWeights, saved_lora, scaling_of
from megatron_llama.checkpoint.checkpoint_dir import (
    Retention,
    Standing,
    checkpoint_path,
    find,
    publish,
    retain,
    tidy,
)
from megatron_llama.checkpoint.checksums import seal
from megatron_llama.checkpoint.chunks import (
    Region,
    is_state,
    make_index,
    parse_state_key,
    regions,
    state_key,
)
from megatron_llama.checkpoint.columns import SavedColumns, column_pieces
from megatron_llama.checkpoint.container import Container
from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.finite import NotFinite, merge_not_finite
from megatron_llama.checkpoint.folders import discard, fresh_staging, staging
from megatron_llama.checkpoint.index import INDEX_TABLE
from megatron_llama.checkpoint.lease import Held
from megatron_llama.checkpoint.meta import (
    FORMAT_VERSION,
    META,
    PARTED_VERSION,
    CheckpointMeta,
    TrainState,
    marked_meta,
    meta_json,
    model_differences,
    parse_meta,
)
from megatron_llama.checkpoint.native_folder import (
    open_native,
    read_regions,
    read_small_files,
    require_regions,
)
from megatron_llama.checkpoint.storage import WrittenParts, refuse, write_index, write_parts
from megatron_llama.checkpoint.storage_paths import storage_path
from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.engine.comm.object_collectives import (
    all_gather_float,
    broadcast_object,
    gather_object,
    on_rank0,
    raise_on_all_ranks,
)
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.options import EIGHT_BIT, FP32, SCHEDULE_FREE
from megatron_llama.engine.pieces import in_blocks, shard_pieces, step_counts, weight_sums
from megatron_llama.engine.plan.buckets import BucketKind
from megatron_llama.engine.plan.limits import keeps_fp32
from megatron_llama.engine.plan.specs import HFSlice, ParamSpec, Rectangle
from megatron_llama.errors import CheckpointError, describe
from megatron_llama.model.plan.lora import adapter_shapes
from megatron_llama.model.plan.params import hf_shapes
from megatron_llama.model.plan.run_params import whole_model_units
from megatron_llama.pipeline.build import compute_dtype

if TYPE_CHECKING:
    from megatron_llama.checkpoint.index_writing import PartedIndex, PartPlan


LARGEST_WHOLE_INDEX = 2**16
"""Chunks of an index in one file, which torch and earlier versions read: 12 MB, and a second. An
index of more is in parts, of which a rank reads its own."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """Result of a save that raised no error."""

    path: Path
    not_finite: tuple[NotFinite, ...]
    """The tensors with infinite values or NaN."""
    published: bool
    """Whether ``path`` is there."""


@dataclass(frozen=True)
class RankSavePlan:
    """The part of a rank in every save of a run. The ranks agree on it once."""

    parts: tuple[Region, ...]
    """The chunks that this rank writes, with the tensors that hold their values."""
    index: Metadata | PartedIndex | None
    """The index of all ranks' chunks, or the table of its parts, on rank 0; None on the others."""
    room: str
    """Prefix of the keys in the job's store under which the ranks report that they are done. It is
    drawn anew for each run."""
    part: PartPlan | None = None
    """This rank's parts of the index, if it writes some."""
    writers: tuple[int, ...] = ()
    """The ranks that write parts of the index; none of one that rank 0 writes alone."""


def plan_save(engine: OverlappedDistributedOptimizer, mesh: Mesh) -> RankSavePlan:
    """Agree on the chunks that each rank writes. Collective."""
    pieces = chain(shard_pieces(engine), column_pieces(engine, mesh))
    # Several ranks may hold the same piece, such as a norm under tensor parallelism. Only one of
    # them writes it: torch refuses an index whose chunks overlap.
    primary = (piece for piece in pieces if piece.primary)
    parts = tuple(part for region in regions(primary) for part in region.split())
    room = broadcast_object(f"save/{uuid4().hex}", mesh.world)
    if sum(all_gather_float(len(parts), mesh.world)) > LARGEST_WHOLE_INDEX:
        from megatron_llama.checkpoint.index_writing import plan_parts

        return RankSavePlan(parts, room=room, **plan_parts(parts, mesh))
    plans = gather_object([part.write_item() for part in parts], mesh.world)
    return RankSavePlan(parts, make_index(plans) if plans is not None else None, room)


def save(
    folder: str | Path,
    engine: OverlappedDistributedOptimizer,
    mesh: Mesh,
    state: TrainState,
    config: Config,
    *,
    validation_loss: float | None = None,
    keep: Retention | None = None,
    held: Held | None = None,
) -> Path:
    """Write ``folder/iter_NNNNNNN``, point the tracker at it, and return its path, even if values
    are not finite. See ``save_checked``."""
    saved = save_checked(
        folder,
        engine,
        mesh,
        state,
        config,
        validation_loss=validation_loss,
        keep=keep,
        publishes_not_finite=True,
        held=held,
    )
    return saved.path


def save_checked(
    folder: str | Path,
    engine: OverlappedDistributedOptimizer,
    mesh: Mesh,
    state: TrainState,
    config: Config,
    *,
    validation_loss: float | None,
    keep: Retention | None,
    publishes_not_finite: bool,
    held: Held | None = None,
    known: dict[str, Standing] | None = None,
    plan: RankSavePlan | None = None,
) -> SavedCheckpoint:
    """Write ``folder/iter_NNNNNNN`` and point the tracker at it. Collective. All ranks return the
    same. ``plan`` is that of an earlier save of this engine.

    A checkpoint with values that are not finite is marked, or, without ``publishes_not_finite``,
    removed before it gets its name. A failure on any rank raises the same CheckpointError on all,
    and leaves earlier checkpoints as they were. ``keep`` says which checkpoints stay; without it
    all stay, and no links are made. ``held`` is the run's lease on the folder: LeaseError is raised
    if it is lost. Without one, the remains of killed saves are removed first; a run with a lease
    has removed them when it began. ``known`` is for ``retain``, the same at each save of a run."""
    target = checkpoint_path(folder, state.iteration)
    plan = plan or plan_save(engine, mesh)
    meta = describe_state(engine, mesh, state, config, validation_loss)
    run = held.run if held is not None else ""
    try:
        with raise_on_all_ranks(mesh.world), writing(target):
            if mesh.rank == 0:
                if held is not None:
                    held.require()
                else:
                    tidy(folder)
                fresh_staging(target, run)
        written = None
        with raise_on_all_ranks(mesh.world):
            written = write_parts(staging(target, run), mesh.rank, plan.parts)
        of_all_ranks = _collect(written, plan, staging(target, run), mesh)
        saved = None
        with raise_on_all_ranks(mesh.world), writing(target):
            if of_all_ranks is not None:
                assert plan.index is not None
                saved = finish(
                    target,
                    plan.index,
                    of_all_ranks,
                    meta,
                    keep,
                    held,
                    publishes_not_finite=publishes_not_finite,
                    known=known,
                )
    finally:
        if mesh.rank == 0:
            discard(target, run)
    saved = broadcast_object(saved, mesh.world)
    assert saved is not None, "rank 0 has finished the save"
    return saved


def _collect(
    written: WrittenParts | None, plan: RankSavePlan, folder: Path, mesh: Mesh
) -> Sequence[WrittenParts] | None:
    """Return on rank 0 what all ranks have written, or the writers of the index's parts for them;
    None on the others. Collective."""
    assert written is not None, "no rank has failed"
    if not plan.writers:
        return gather_object(written, mesh.world)
    from megatron_llama.checkpoint.index_writing import collect_written

    return collect_written(written, plan.part, plan.writers, folder, mesh)


def describe_state(
    engine: OverlappedDistributedOptimizer,
    mesh: Mesh,
    state: TrainState,
    config: Config,
    validation_loss: float | None,
) -> bytes:
    """Wait for the engine's last update, and return the content of ``meta.json`` for its state.
    Collective."""
    engine.settle()
    # A rank without parameters has no counts or sums of its own.
    updates, weight_sum = (
        max(all_gather_float(max(map(float, values), default=0.0), mesh.world))
        for values in (step_counts(engine), weight_sums(engine))
    )
    return meta_json(
        state, int(updates), engine.loss_scale.state(), config, validation_loss, weight_sum
    )


def finish(
    target: Path,
    index: Metadata | PartedIndex,
    written: Sequence[WrittenParts],
    meta: bytes,
    keep: Retention | None,
    held: Held | None = None,
    *,
    publishes_not_finite: bool,
    known: dict[str, Standing] | None = None,
) -> SavedCheckpoint:
    """Complete a checkpoint after every rank has written its part: write index, checksums and
    ``meta.json``, give it its name, then renew the links and remove old checkpoints. Raises
    CheckpointError; LeaseError if the folder is no longer this run's. ``known``: see ``retain``.

    ``meta.json`` names the values that are not finite. If there are some, without
    ``publishes_not_finite`` the staged folder stays as it is, and the caller has to remove it."""
    not_finite = merge_not_finite(entry for rank in written for entry in rank.not_finite)
    if not_finite and not publishes_not_finite:
        return SavedCheckpoint(target, not_finite, published=False)
    is_whole = isinstance(index, Metadata)
    meta = marked_meta(meta, not_finite, FORMAT_VERSION if is_whole else PARTED_VERSION)
    run = held.run if held is not None else ""
    folder = staging(target, run)
    if held is not None:
        held.require()
    sums = (
        write_index(folder, index, written)
        if isinstance(index, Metadata)
        else index.write(folder, written)
    )
    with writing(folder / META):
        seal(folder, sums, META, meta)
    if held is not None:
        held.require()
    with writing(target):
        publish(target, run)
        if keep is not None:
            retain(target.parent, keep, held, known)
    return SavedCheckpoint(target, not_finite, published=True)


def read_meta(path: str | Path) -> CheckpointMeta:
    """Return the ``meta.json`` of a checkpoint, or of the latest one in a folder. Raises
    CheckpointError."""
    return parse_meta(find(path))


def load(
    path: str | Path,
    engine: OverlappedDistributedOptimizer,
    mesh: Mesh,
    model: ModelConfig,
    *,
    optimizer: bool = True,
    small: Mapping[str, bytes] | None = None,
) -> TrainState:
    """Fill the engine from a checkpoint, or the latest one in a folder, whatever layout it was
    saved under. Collective.

    ``model`` is the one that the engine was built for, with its derived fields. Without
    ``optimizer`` the optimizer's state becomes that of a fresh one, and the loss scale as
    configured. ``small``: the ``read_small_files`` of the checkpoint ``path``, if all ranks have
    them from one. A rank makes all checks that need no tensors before it reads some. A failure on
    any rank raises the same CheckpointError on all, which hear of it when all have read.
    """
    engine.settle()
    # Machines may see different states of a shared folder for a while. Loads of different
    # iterations would go unnoticed, so all ranks take the folder that rank 0 has found.
    folder, small = (
        on_rank0(lambda: _look_up(path), mesh.world)
        if small is None
        else (storage_path(path), small)
    )
    with raise_on_all_ranks(mesh.world):
        opened = _open(folder, small, engine, mesh, model, optimizer)
        meta, container, wanted, columns, resumes = opened
        try:
            read_regions(container, wanted)
        except CheckpointError:
            raise
        except Exception as error:
            # Damage may raise anything, and a rank that left alone would make the others hang.
            raise CheckpointError(f"{folder}: {type(error).__name__}: {error}") from error
    updates = meta.optimizer_step if resumes else 0
    for count in step_counts(engine):
        count.fill_(updates)
    for weight_sum in weight_sums(engine):
        weight_sum.fill_(meta.weight_sum if resumes else 0.0)
    columns.take_up(updates, meta.config["optimizer"])
    # A run without --fp16 writes a scale of 1, which an fp16 run may also reach: the scale itself
    # does not tell them apart.
    if resumes and meta.config["training"].get("fp16"):
        engine.loss_scale.load(meta.loss_scale)
    else:
        engine.loss_scale.reset()
    engine.publish()
    return meta.state


def require_complete(folder: Path, config: Config, *, optimizer: bool) -> None:
    """Raise CheckpointError unless a checkpoint has every tensor that a run with this resolved
    configuration loads, whatever its layout, and all files are there. ``optimizer``: the run takes
    up the optimizer's state."""
    container = open_native(folder)
    # A converted checkpoint has no optimizer state.
    optimizer = optimizer and any(is_state(key) for key in container.tensors)
    wanted = [
        region
        for unit in whole_model_units(config)
        for spec in unit.params
        for part in {part.name: part for part in spec.slices}.values()
        for region in _whole_tensors(spec, part, config, optimizer=optimizer and spec.trainable)
    ]
    _refuse_other_optimizer(container, wanted)
    require_regions(container, wanted, any_dtype=False, all_files=True)


def _whole_tensors(
    spec: ParamSpec, part: HFSlice, config: Config, *, optimizer: bool
) -> Iterator[Region]:
    """Yield a tensor of a checkpoint without values; with ``optimizer`` its state too."""
    options = config.optimizer
    dtype = torch.float64 if config.training.fp64 else torch.float32
    # A frozen weight has no master besides the weight that the model computes with.
    weight = dtype if spec.trainable else compute_dtype(config)
    yield Region.without_values(part.name, part.shape, weight)
    if not optimizer:
        return
    kept: dict[str, str] = {
        "exp_avg": options.exp_avg_dtype,
        "exp_avg_sq": options.exp_avg_sq_dtype,
    }
    if options.optimizer == SCHEDULE_FREE:
        kept = {"z": FP32, "exp_avg_sq": FP32}
    elif spec.muon:
        kept = {"momentum_buffer": FP32}
    for state, precision in kept.items():
        if precision != EIGHT_BIT or keeps_fp32(BucketKind.of(spec)):
            yield Region.without_values(state_key(state, part.name), part.shape, dtype)
            continue
        blocks = in_blocks(Rectangle(part.name, part.shape, (0, 0), part.shape, 0))
        codes, scales = (state_key(f"{state}_{kind}", part.name) for kind in ("codes", "scales"))
        yield Region.without_values(codes, part.shape, torch.uint8)
        yield Region.without_values(scales, blocks.shape)


def _refuse_other_optimizer(container: Container, wanted: Sequence[Region]) -> None:
    """Raise CheckpointError if a tensor has optimizer state of another kind in the files than is
    wanted. State that is merely missing is reported by ``require_regions``."""
    saved = _states_by_tensor(container.tensors)
    for name, states in _states_by_tensor(region.key for region in wanted).items():
        saved_states = saved.get(name, set())
        if states - saved_states and saved_states - states:
            problem = describe(
                name,
                got=f"the optimizer's {' and '.join(sorted(saved_states))}",
                expected=" and ".join(sorted(states)),
                do="go on with the --optimizer and the precision of moments that saved it, or give "
                "--no-load-optim",
            )
            refuse(f"{container.folder} has the state of another optimizer:", [problem])


def _states_by_tensor(keys: Iterable[str]) -> dict[str, set[str]]:
    """Return the optimizer state of each tensor among the keys of a checkpoint."""
    states: dict[str, set[str]] = {}
    for key in filter(is_state, keys):
        state, name = parse_state_key(key)
        states.setdefault(name, set()).add(state)
    return states


def _look_up(path: str | Path) -> tuple[Path, dict[str, bytes]]:
    folder = find(path)
    return folder, read_small_files(folder)


def _open(
    folder: Path,
    small: Mapping[str, bytes],
    engine: OverlappedDistributedOptimizer,
    mesh: Mesh,
    model: ModelConfig,
    optimizer: bool,
) -> tuple[CheckpointMeta, Container, list[Region], SavedColumns, bool]:
    """Check everything that can be checked without reading tensors. The last value returned is
    whether the optimizer goes on with its saved state."""
    meta = parse_meta(folder, small[META])
    differences = model_differences(str(folder / META), meta.model, model, resumes=optimizer)
    refuse(f"{folder} is a checkpoint of another model:", differences)
    container = open_native(folder, small.get(INDEX_TABLE))
    columns = SavedColumns(engine, mesh, container.tensors)
    wanted = [*regions(shard_pieces(engine)), *columns.regions]
    # A converted checkpoint has no optimizer state: then the optimizer starts afresh.
    resumes = optimizer and any(is_state(key) for key in container.tensors)
    if not resumes:
        for region in wanted:
            if is_state(region.key):
                region.tensor.zero_()
        wanted = [region for region in wanted if not is_state(region.key)]
    _refuse_other_optimizer(container, wanted)
    require_regions(container, wanted, any_dtype=False)
    return meta, container, wanted, columns, resumes


class NativeWeights:
    """The weights of a checkpoint, without an engine: a WeightSource that holds one chunk in memory
    at a time.

    Low-rank additions are added to the weights. ``stored`` returns the values in the files."""

    def __init__(self, path: str | Path) -> None:
        """Open a checkpoint, or the latest one in a folder. Raises CheckpointError."""
        self.meta = read_meta(path)
        self._container = open_native(self.meta.folder)
        self.lora = saved_lora(self.meta.config)
        adapters = adapter_shapes(self.model, self.lora)
        self._check({**hf_shapes(self.model), **adapters})
        self._merged = (
            MergedWeights(self.stored, self.stored, adapters, scaling_of(self.lora))
            if adapters
            else self.stored
        )

    @property
    def model(self) -> ModelConfig:
        """The saved model, derived fields filled in."""
        return self.meta.model

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        whole = [Region.without_values(name, shape) for name, shape in shapes.items()]
        require_regions(self._container, whole, any_dtype=True)

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """Write the rectangle's values into ``out``, a tensor of its size. Raises CheckpointError
        naming a damaged file."""
        self._merged(rectangle, out)

    def stored(self, rectangle: Rectangle, out: Tensor) -> None:
        """Write the values of a tensor as the files have it, low-rank additions among them."""
        read_regions(self._container, [Region.of(rectangle, out)])


def open_weights(path: str | Path) -> NativeWeights:
    """Open the weights of a checkpoint, or of the latest one in a folder. Raises
    CheckpointError."""
    return NativeWeights(path)
