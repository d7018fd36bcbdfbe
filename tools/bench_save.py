"""How long does training stop for a checkpoint? Ours and torch's own, waited for and in the
background, in turns. And how long does a start take to load one of ours?

    python tools/bench_save.py --hidden-size 512 --intermediate-size 1376 --num-layers 8
    --num-attention-heads 8 --vocab-size 8192 \\
        --seq-length 256 --micro-batch-size 2 --global-batch-size 2

Takes every option of ``pretrain`` except those of data: tokens are random. Each contender saves the
same tensors (masters and both moments) ``--rounds`` times; what it does not wait for goes on beside
the next ``--steps`` steps. A load has the checks of ``--load auto``, and the look for values that
are not finite; its checkpoint is in the page cache. Also under torchrun.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, and no other

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver as dcp

from megatron_llama.checkpoint import checkpoint_dir, native
from megatron_llama.checkpoint.background import BackgroundSaver
from megatron_llama.checkpoint.checkpoint_dir import Retention, checkpoint_path
from megatron_llama.checkpoint.folders import fresh_staging
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.config.help import help_text
from megatron_llama.config.megatron_names import MEGATRON
from megatron_llama.config.parse import parse
from megatron_llama.config.schema import Config
from megatron_llama.config.sections import config_sections
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.groups import close_mesh
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.plan.memory import sized
from megatron_llama.errors import UserError
from megatron_llama.launch.launcher import place_from_environment
from megatron_llama.launch.mesh import init_mesh
from megatron_llama.train.setup.build import find_not_finite_at_start, load_or_init
from megatron_llama.train.setup.start import Start
from tools.compare_sharding import Trial, checked, random_batches
from tools.processor import processor


@dataclass(frozen=True)
class BenchConfig:
    """How often, and how much training in between."""

    rounds: int = 5
    """How often contenders take turns; the first round does not count: buffers are made in it."""
    steps: int = 8
    """Steps after each save."""


Wait = Callable[[], object]
"""Waits until everything is on the disk."""


class Saves:
    """The contenders. Each begins a save into an empty folder and returns how to wait for the rest
    of it."""

    def __init__(self, trial: Trial, background: BackgroundSaver, folder: Path) -> None:
        self._trial = trial
        self._background = background
        self._folder = folder
        self._plan = native.plan_save(trial.engine, trial.mesh)
        self._group = dist.new_group(backend="gloo")
        self.bytes = sum(
            part.tensor.numel() * part.tensor.element_size() for part in self._plan.parts
        )
        self._parts = {
            f"{trial.mesh.rank}/{part.key}/{part.offset}": part.tensor for part in self._plan.parts
        }

    def contenders(self) -> Mapping[str, Callable[[], Wait]]:
        """By name; the first of them saves nothing."""
        return {
            "no save": lambda: _nothing,
            "torch dcp.save": self._torch,
            "ours, waited for": self._ours,
            "torch dcp.async_save": self._torch_async,
            "ours, --async-save": self._ours_async,
        }

    def load(self, folder: Path) -> None:
        """Load the checkpoint that ``_ours`` has saved in a folder, as a start does."""
        trial = self._trial
        path = checkpoint_path(folder, 1)
        checkpoint_dir.require_usable(path)
        options = replace(trial.config.checkpoint, load=str(path))
        config = replace(trial.config, checkpoint=options)
        start = Start(path, native.read_meta(path))
        load_or_init(config, trial.engine, trial.mesh, start)
        find_not_finite_at_start(config, trial.engine, trial.mesh, start)

    def save(self) -> None:
        """Save ours, and wait for it."""
        self._ours()

    def _torch(self) -> Wait:
        dcp.save(self._parts, checkpoint_id=self._folder / "torch", process_group=self._group)
        return _nothing

    def _torch_async(self) -> Wait:
        future = dcp.async_save(
            self._parts, checkpoint_id=self._folder / "torch", process_group=self._group
        )
        return future.result  # type: ignore[union-attr]

    def _ours(self) -> Wait:
        trial = self._trial
        native.save(self._folder, trial.engine, trial.mesh, TrainState(1, 1), trial.config)
        return _nothing

    def _ours_async(self) -> Wait:
        trial = self._trial
        target = checkpoint_path(self._folder, 1)
        meta = native.describe_state(trial.engine, trial.mesh, TrainState(1, 1), trial.config, None)
        if trial.mesh.rank == 0:
            fresh_staging(target)
        self._background.write(self._plan, target, meta, Retention())
        return lambda: self._background.collect(None)


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Row:
    """One save: milliseconds."""

    pause: float
    step: float
    """Mean of the steps that follow."""
    total: float
    """Until everything is on the disk."""


def measured(begin: Callable[[], Wait], trial: Trial, folder: Path, steps: int) -> Row:
    """One save of one contender, and the steps that follow."""
    batches = list(random_batches(trial.config, trial.mesh))
    trial.train(batches, 1)
    _meet(trial.mesh)
    start = time.perf_counter()
    wait = begin()
    devices.synchronize(trial.mesh.device)
    paused = time.perf_counter()
    trial.train(batches, steps)
    trained = time.perf_counter()
    wait()
    end = time.perf_counter()
    _meet(trial.mesh)
    if trial.mesh.rank == 0:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    _meet(trial.mesh)
    return Row((paused - start) * 1e3, (trained - paused) / steps * 1e3, (end - start) * 1e3)


def _meet(mesh: Mesh) -> None:
    dist.barrier(group=mesh.world.group)


def loads(saves: Saves, mesh: Mesh, folder: Path, rounds: int) -> list[float]:
    """Return the milliseconds of each load of one checkpoint."""
    saves.save()
    times = list[float]()
    for _ in range(rounds + 1):
        _meet(mesh)
        start = time.perf_counter()
        saves.load(folder)
        devices.synchronize(mesh.device)
        _meet(mesh)
        times.append((time.perf_counter() - start) * 1e3)
    return times[1:]


def run(
    config: Config, mesh: Mesh, background: BackgroundSaver, folder: Path, bench: BenchConfig
) -> tuple[dict[str, list[Row]], list[float], int]:
    """All rounds of all contenders, those of a load, and the bytes that one save writes."""
    trial = Trial(config, mesh)
    trial.train(list(random_batches(config, mesh)), 2)
    saves = Saves(trial, background, folder)
    rows = dict[str, list[Row]]()
    for number in range(bench.rounds + 1):
        for name, begin in saves.contenders().items():
            row = measured(begin, trial, folder, bench.steps)
            if number > 0:
                rows.setdefault(name, []).append(row)
    loaded = loads(saves, mesh, folder, bench.rounds)
    trial.engine.close()
    return rows, loaded, saves.bytes


def report(rows: Mapping[str, list[Row]], loaded: list[float], size: int) -> str:
    """The table: medians, and ratios to a step without a save."""
    step = statistics.median(row.step for row in rows["no save"])
    lines = [f"{sized(size)} a save on this rank; a step takes {step:.1f} ms", ""]
    lines += [
        "| contender | training stops, ms | in steps | a step beside it | on the disk after, ms |",
        "|---|---|---|---|---|",
    ]
    for name, found in rows.items():
        pause, beside, total = (
            statistics.median(getattr(row, field) for row in found)
            for field in ("pause", "step", "total")
        )
        if name != "no save":
            durable = f"{total:.0f}" if "async" in name else f"{pause:.0f}"
            lines.append(
                f"| {name} | {pause:.1f} | {pause / step:.2f} | {beside / step:.2f} | {durable} |"
            )
    lines += ["", f"a load takes {statistics.median(loaded):.1f} ms"]
    return "\n".join(lines)


def main(words: list[str]) -> None:
    """Measure, and print the table on rank 0. Raises UserError."""
    sections = (*config_sections(), BenchConfig)
    if {"-h", "--help"} & set(words):
        usage = "python tools/bench_save.py [--option value ...]"
        print(help_text(usage, __doc__ or "", sections), end="")
        return
    parsed = parse(words, sections, aliases=MEGATRON)
    place = place_from_environment()
    config = checked(parsed, place.world_size)
    with closing(BackgroundSaver(place)) as background, tempfile.TemporaryDirectory() as name:
        if place.world_size == 1:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        mesh = init_mesh(config, place)
        box = [name]
        dist.broadcast_object_list(box)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, on every save
            rows, loaded, size = run(
                config, mesh, background, Path(box[0]), parsed.get(BenchConfig)
            )
        if mesh.rank == 0:
            print(processor(), report(rows, loaded, size), sep="\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
    finally:
        close_mesh()
