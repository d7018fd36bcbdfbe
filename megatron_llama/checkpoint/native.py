"""Checkpoints to resume from: written by all ranks together, read under any layout, never half there.

    SAVE/iter_0000100/                          meta.json, .metadata and *.distcp (torch.distributed.checkpoint)
    SAVE/latest_checkpointed_iteration.txt      100

Tensors have the names and shapes of the HuggingFace model, and the saved weight is the fp32 master.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from megatron_llama.checkpoint.chunks import LoadRegions, Region, SaveRegions, regions
from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.folders import INCOMPLETE, REPLACED, commit, fresh_staging, recover, staging, sync, write_synced
from megatron_llama.checkpoint.meta import META, CheckpointMeta, TrainState, meta_json, model_differences, parse_meta
from megatron_llama.checkpoint.storage import METADATA, ChunkReader, ChunkWriter, read_metadata, refuse
from megatron_llama.comm.agreement import largest, raise_together, together
from megatron_llama.config import Config, ModelConfig
from megatron_llama.errors import CheckpointError, describe
from megatron_llama.mesh import Mesh
from megatron_llama.optim.distributed import OverlappedDistributedOptimizer
from megatron_llama.params import Rectangle, hf_shapes

TRACKER = "latest_checkpointed_iteration.txt"


def save(folder: str | Path, engine: OverlappedDistributedOptimizer, mesh: Mesh, state: TrainState, config: Config) -> Path:
    """Write ``folder/iter_NNNNNNN`` and point the tracker at it. Collective; every rank returns the path.

    A failure on any rank raises the same CheckpointError on all, and leaves earlier checkpoints as they were. What
    killed saves left behind is removed first.
    """
    target = Path(folder) / f"iter_{state.iteration:07d}"
    engine.settle()
    try:
        with together(mesh.world), writing(target):
            if mesh.rank == 0:
                _prepare(target)
        updates, agreed = largest(max((int(count) for count in engine.step_counts()), default=0), mesh.world)
        agreed.wait()
        own = [part for region in regions(piece for piece in engine.pieces() if piece.primary) for part in region.split()]
        writer, planner = ChunkWriter(staging(target)), SaveRegions(own)
        _run(target, mesh, lambda no_dist: state_dict_saver.save({}, storage_writer=writer, planner=planner, no_dist=no_dist))
        with together(mesh.world), writing(target):
            if mesh.rank == 0:
                _finish(target, meta_json(state, int(updates), engine.loss_scale.state(), config), state.iteration)
    finally:
        if mesh.rank == 0:
            shutil.rmtree(staging(target), ignore_errors=True)
    return target


def _prepare(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    for entry in list(target.parent.iterdir()):
        if re.fullmatch(r"iter_\d{7,}" + re.escape(INCOMPLETE), entry.name):
            shutil.rmtree(entry)
        elif re.fullmatch(r"iter_\d{7,}" + re.escape(REPLACED), entry.name):
            recover(entry.with_suffix(""))
    fresh_staging(target)


def _finish(target: Path, meta: bytes, iteration: int) -> None:
    """Write all that is left before the first rename: a full disk must not strike between the two."""
    tracker = target.parent / TRACKER
    write_synced(staging(target) / META, meta)
    try:
        write_synced(staging(tracker), f"{iteration}\n".encode())
        commit(target)
        staging(tracker).replace(tracker)
        sync(target.parent)
    finally:
        staging(tracker).unlink(missing_ok=True)


def _run(path: Path, mesh: Mesh, action: Callable[[bool], object]) -> None:
    """Run a function of torch.distributed.checkpoint, which fails on every rank if on one, with an error of ours."""
    problem = None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            action(mesh.world.size == 1)
        except CheckpointException as error:
            cause = next((cause for rank, (cause, _) in error.failures.items() if rank == mesh.rank), None)
            if cause is not None:
                problem = cause if isinstance(cause, CheckpointError) else CheckpointError(f"{path}: {type(cause).__name__}: {cause}")
    raise_together(problem, mesh.world)


def latest(folder: str | Path) -> Path | None:
    """The checkpoint that the tracker names, or the newest one if it names none that is there; None without checkpoints.

    Only complete ones count: a checkpoint has its name since the moment in which everything was on the disk.
    """
    found: dict[int, Path] = {}
    entries = Path(folder).iterdir() if Path(folder).is_dir() else ()
    # NAME.replaced counts only without NAME, which sorts before it: a save was killed between two renames.
    for entry in sorted(entries):
        match = re.fullmatch(rf"iter_(\d{{7,}})({re.escape(REPLACED)})?", entry.name)
        if match and (entry / META).is_file() and (entry / METADATA).is_file():
            found.setdefault(int(match[1]), entry)
    if not found:
        return None
    try:
        named = int((Path(folder) / TRACKER).read_text())
    except (OSError, ValueError):
        named = max(found)
    return found.get(named, found[max(found)])


def find(path: str | Path) -> Path:
    """The checkpoint at ``path``: itself an ``iter_...`` folder, or the latest one in it. Raises CheckpointError."""
    path = Path(path)
    if (re.match(r"iter_\d{7}", path.name) and path.is_dir()) or (path / META).is_file():
        return path
    found = latest(path)
    if found is None:
        got = "a folder without complete checkpoints" if path.is_dir() else "no such folder"
        do = "check the path"
        if (path / "config.json").is_file():
            do = "it is a HuggingFace folder: give it as --init-from-hf"
        raise CheckpointError(describe(str(path), got=got, expected="iter_NNNNNNN, or a folder of them", do=do))
    return found


def read_meta(path: str | Path) -> CheckpointMeta:
    """What a checkpoint (or the latest one in a folder) holds besides tensors. Raises CheckpointError."""
    return parse_meta(find(path))


def load(path: str | Path, engine: OverlappedDistributedOptimizer, mesh: Mesh, model: ModelConfig) -> TrainState:
    """Fill the engine from a checkpoint, or the latest one in a folder, whatever layout it was saved under. Collective.

    ``model``: the one the engine was built for, derived fields filled in. Everything that can be checked without reading
    the tensors is checked first; a failure on any rank raises the same CheckpointError on all.
    """
    engine.settle()
    with together(mesh.world):
        folder = find(path) if mesh.rank == 0 else Path(path)
    folder = _of_rank_0(mesh, folder)
    with together(mesh.world):
        own = list(regions(engine.pieces()))
        meta, reader, planner = _open(folder, own, model)
    _run(folder, mesh, lambda no_dist: state_dict_loader.load({}, storage_reader=reader, planner=planner, no_dist=no_dist))
    for count in engine.step_counts():
        count.fill_(meta.optimizer_step)
    engine.loss_scale.load(meta.loss_scale)
    engine.publish()
    return meta.state


def _of_rank_0(mesh: Mesh, folder: Path) -> Path:
    """Machines may see different states of a shared folder for a while; loading different iterations would go unnoticed."""
    box = [folder]
    if mesh.world.size > 1:
        dist.broadcast_object_list(box, src=0, group=mesh.world.group)
    return box[0]


def _open(folder: Path, own: list[Region], model: ModelConfig) -> tuple[CheckpointMeta, ChunkReader, LoadRegions]:
    meta = parse_meta(folder)
    refuse(f"{folder} is a checkpoint of another model:", model_differences(meta, model))
    metadata = read_metadata(folder)
    reader, planner = ChunkReader(folder, metadata), LoadRegions(own, metadata)
    problems = planner.problems(str(folder), any_dtype=False) or reader.problems(planner.create_local_plan().items)
    refuse(f"{folder} is incomplete:", problems)
    return meta, reader, planner


class NativeWeights:
    """The weights of a checkpoint, without an engine: a source of HuggingFace rectangles that holds one chunk at a time."""

    def __init__(self, path: str | Path) -> None:
        self.meta = read_meta(path)
        self._metadata = read_metadata(self.meta.folder)
        self._reader = ChunkReader(self.meta.folder, self._metadata)
        self._check()

    @property
    def model(self) -> ModelConfig:
        """The saved model."""
        return self.meta.model

    def _check(self) -> None:
        # Expanded scalars: only their sizes count.
        whole = [Region(n, s, (0,) * len(s), s, Tensor().new_empty(()).expand(s)) for n, s in hf_shapes(self.model).items()]
        planner = LoadRegions(whole, self._metadata)
        problems = planner.problems(str(self.meta.folder), any_dtype=True) or self._reader.problems(planner.create_local_plan().items)
        refuse(f"{self.meta.folder} is incomplete:", problems)

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """Write the rectangle's values into ``out``, a tensor of its size. Raises CheckpointError naming a damaged file."""
        planner = LoadRegions([Region.of(rectangle, out)], self._metadata)
        self._reader.read_data(planner.create_local_plan(), planner)


def open_weights(path: str | Path) -> NativeWeights:
    """The weights of a checkpoint, or of the latest one in a folder. Raises CheckpointError."""
    return NativeWeights(path)
