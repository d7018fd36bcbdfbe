"""Checkpoints of LLaMA 3.1 405B, tensor parallel size 8, pipeline parallel size 16, and of LLaMA
3.1 8B that is only sharded: the plans that their ranks have, and the files of the index that they
write and read. Files of tensors have the size that they would have, and hold nothing. Seconds are
those of a processor: the machine may have other work, and the files are in its page cache."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron_llama.checkpoint.checksums import seal
from megatron_llama.checkpoint.chunks import Region, make_index, state_key
from megatron_llama.checkpoint.index import INDEX_TABLE, METADATA
from megatron_llama.checkpoint.index_writing import Outline, Sharing, plan_part, plan_table
from megatron_llama.checkpoint.native_folder import open_native, read_small_files, require_regions
from megatron_llama.checkpoint.storage import WrittenParts, write_index
from megatron_llama.config.schema import Config, ParallelConfig, TrainingConfig
from megatron_llama.model.presets import PRESETS
from megatron_llama.pipeline.plan.run_engine import rank_bucket_plan
from megatron_llama.train.setup.resolve import resolve
from tools.scaling.rows import COMPUTED, MEASURED, Row

T = TypeVar("T")
TP, PP = 8, 16
STATES = ("master", "exp_avg", "exp_avg_sq")
ARCHIVE_BYTES = 1_300
"""Bytes of a chunk's file besides its values."""


@dataclass(frozen=True)
class Grid:
    """How the model is spread."""

    tp: int
    pp: int
    dp: int
    model: str = "llama3.1-405b"

    def rank(self, stage: int, data: int, tensor: int) -> int:
        """Return the global rank at a place."""
        return (stage * self.dp + data) * self.tp + tensor

    def sharing(self, stage: int, tensor: int) -> list[Sharing]:
        """Return the ranks at a place of the pipeline and tensor axes by their part."""
        dp = [self.rank(stage, data, tensor) for data in range(self.dp)]
        of_ranks = (
            Sharing.of(dp, data, (stage, self.pp), (tensor, self.tp)) for data in range(self.dp)
        )
        return list(dict.fromkeys(of_ranks))

    def config(self) -> Config:
        """Return the resolved configuration."""
        # 405B has 126 layers for 16 stages: the embedding and the head count as one each.
        counts_ends = PRESETS[self.model].num_hidden_layers % self.pp != 0
        parallel = ParallelConfig(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            sequence_parallel=self.tp > 1,
            data_parallel_sharding_strategy="optim"
            if self.tp * self.pp > 1
            else "optim_grads_params",
            account_for_embedding_in_pipeline_split=counts_ends,
            account_for_loss_in_pipeline_split=counts_ends,
        )
        training = TrainingConfig(bf16=True, global_batch_size=16 * self.dp, seq_length=8192)
        config = Config(model=PRESETS[self.model], parallel=parallel, training=training)
        return resolve(config, self.tp * self.pp * self.dp)


def of_world(world: int) -> Grid:
    """Return the grid of so many processes."""
    return Grid(TP, PP, world // (TP * PP))


def group_parts(
    grid: Grid, stage: int, tensor: int, ranks: Iterable[int], *, primary: bool = True
) -> list[list[Region]]:
    """Return the regions of data-parallel ranks at a place of the pipeline and tensor axes, as
    ``native.plan_save`` makes them of the engine's tensors: with ``primary`` the chunks that each
    rank writes, without it what it loads."""
    plan = rank_bucket_plan(grid.config(), dp=grid.dp, tp_rank=tensor, rank=stage)
    of_ranks = []
    for rank in ranks:
        own: list[Region] = []
        for bucket in plan.buckets:
            if primary and tensor % bucket.kind.copies:
                continue
            for rectangle, _ in plan.rectangles(bucket.index, rank):
                values = torch.empty(()).expand(rectangle.size)
                for state in STATES:
                    region = Region.of(rectangle, values, state_key(state, rectangle.name))
                    own += region.split() if primary else [region]
        of_ranks.append(own)
    return of_ranks


def written_by(folder: Path, rank: int, parts: list[Region]) -> WrittenParts:
    """Make the file of a rank without its values, and return what ``write_parts`` would."""
    name = f"__{rank}_0.distcp"
    places = {}
    end = 0
    for part in parts:
        length = part.tensor.numel() * part.tensor.element_size() + ARCHIVE_BYTES
        place = _StorageInfo(name, end, length)
        place.crc32 = hash((part.key, part.offset)) % 2**32  # type: ignore[attr-defined]
        places[part.index] = place
        end += length
    (folder / name).touch()
    os.truncate(folder / name, end)
    return WrittenParts(places, {name: f"{rank:064x}"})


@dataclass
class Most:
    """The slowest of several ranks that work at the same time."""

    seconds: float = 0.0
    bytes: float = 0.0

    def time(self, work: Callable[[], T]) -> T:
        """Do the work of one rank."""
        start = time.process_time()
        done = work()
        self.seconds = max(self.seconds, time.process_time() - start)
        return done


def saved(folder: Path, grid: Grid) -> list[Row]:
    """Save in a folder, and return what the ranks took."""
    held, written = [], []
    plan_time, write_time, gathered = Most(), Most(), Most()
    rank_time = Most()
    for stage in range(grid.pp):
        of_line = []
        for tensor in range(grid.tp):
            start = time.process_time()
            of_line.append(group_parts(grid, stage, tensor, range(grid.dp)))
            rank_time.seconds = max(rank_time.seconds, (time.process_time() - start) / grid.dp)
        for tensor, of_dp in enumerate(of_line):
            first = 0
            for place in grid.sharing(stage, tensor):
                same = slice(first, first + len(place.ranks))
                first = same.stop
                outlines = [[Outline.of(part) for part in parts] for parts in of_dp[same]]
                gathered.bytes = max(
                    gathered.bytes, sum(len(pickle.dumps(own)) for own in outlines)
                )
                common = set() if tensor or grid.tp == 1 else _keys(of_line[:1], same)
                common -= _keys(of_line[1:], same)
                plan, boxes = plan_time.time(lambda: plan_part(place, outlines, common))  # noqa: B023
                of_ranks = [
                    written_by(folder, number, parts)
                    for number, parts in zip(place.ranks, of_dp[same], strict=True)
                ]
                held.append(boxes)
                gathered.bytes = max(
                    gathered.bytes, sum(len(pickle.dumps(own)) for own in of_ranks)
                )
                written.append(write_time.time(lambda: plan.write(folder, of_ranks)))  # noqa: B023
    table_time, seal_time = Most(), Most()
    index = table_time.time(lambda: plan_table(held))
    sums = seal_time.time(lambda: index.write(folder, written))
    seal_time.time(lambda: seal(folder, sums, "meta.json", b"{}"))
    parts = [(folder / name).stat().st_size for name in index.parts]
    on_top = (folder / INDEX_TABLE).stat().st_size
    from_writers = sum(len(pickle.dumps(boxes)) for boxes in held)
    files = f"{len(parts)} parts and the table"
    return [
        Row("save", "chunks of one rank", "others", rank_time.seconds, None, MEASURED),
        Row("save", "messages to a writer", "writers", None, gathered.bytes, MEASURED),
        Row("save", "plan of a part, first save", "writers", plan_time.seconds, None, MEASURED),
        Row(
            "save",
            "plan of the table, first save",
            "rank 0",
            table_time.seconds,
            from_writers,
            MEASURED,
        ),
        Row("save", "plan, later saves", "all", 0.0, 0.0, COMPUTED),
        Row("save", "write a part", "writers", write_time.seconds, max(parts), MEASURED),
        Row("save", "write table and checksums", "rank 0", seal_time.seconds, on_top, MEASURED),
        Row("save", f"index: {files}", "all", None, sum(parts) + on_top, MEASURED),
    ]


def _keys(of_line: Iterable[list[list[Region]]], ranks: slice) -> set[str]:
    return {part.key for of_dp in of_line for parts in of_dp[ranks] for part in parts}


def save(world: int) -> list[Row]:
    """Return what a save takes beside the tensors."""
    with tempfile.TemporaryDirectory() as name:
        return saved(Path(name), of_world(world))


def resume(world: int) -> list[Row]:
    """Return what a start takes before it reads tensors: in the same layout, and in others."""
    return [row for row in resumed(of_world(world)) if row.part == "resume"]


def sharded(world: int) -> list[Row]:
    """Return what save and start take of a model that is only sharded."""
    return resumed(Grid(1, 1, world, "llama3.1-8b"))


def resumed(grid: Grid) -> list[Row]:
    """Save in a folder, and return what that takes, and starts in this grid and in others."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = saved(folder, grid)
        with used() as start:
            small = read_small_files(folder)
            open_native(folder, small[INDEX_TABLE]).missing_files()
        size = len(small[INDEX_TABLE])
        rows += [
            Row("resume", "all is there", "rank 0", start.seconds, start.bytes, MEASURED),
            Row("resume", "table, sent by rank 0", "others", None, size, MEASURED),
        ]
        # A process of its own shows what a rank holds; the others only repeat it.
        rows.append(_in_fresh_process(_read_by_a_rank, folder, small, "the same layout", grid))
        for what, layout in {
            f"dp {grid.dp // 2}": replace(grid, dp=grid.dp // 2),
            f"dp {grid.dp * 2}, tp 4": replace(grid, dp=grid.dp * 2, tp=4),
            f"dp {grid.dp * 2}, pp 8": replace(grid, dp=grid.dp * 2, pp=8),
        }.items():
            row = _read_by_a_rank(folder, small, what, layout)
            rows.append(replace(row, memory=None))
    return rows


def _in_fresh_process(work: Callable[..., Row], *arguments: object) -> Row:
    """Do the work in a process whose memory is its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def _read_by_a_rank(folder: Path, small: Mapping[str, bytes], what: str, layout: Grid) -> Row:
    """Return what a rank in the middle of a layout takes to know where its tensors are."""
    stage, tensor, data = layout.pp // 2, layout.tp - 1, layout.dp // 2
    [wanted] = group_parts(layout, stage, tensor, [data], primary=False)
    with used() as load:
        container = open_native(folder, small.get(INDEX_TABLE))
        require_regions(container, wanted, any_dtype=False)
    what = f"index, {what}"
    return Row("resume", what, "each rank", load.seconds, load.bytes, MEASURED, load.memory)


def one_index(world: int) -> list[Row]:
    """Return what one index for all ranks takes, as every checkpoint had it before."""
    grid = of_world(world)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        items, written = [], []
        for stage, tensor in product(range(grid.pp), range(grid.tp)):
            for data, parts in enumerate(group_parts(grid, stage, tensor, range(grid.dp))):
                items.append([part.write_item() for part in parts])
                written.append(written_by(folder, grid.rank(stage, data, tensor), parts))
        with used() as plan:
            index = make_index(items)
        del items
        with used() as write:
            sums = write_index(folder, index, written)
        del index, written
        seal(folder, sums, "meta.json", b"{}")
        rows = [
            Row(
                "one index", "plan, each save", "rank 0", plan.seconds, None, MEASURED, plan.memory
            ),
            Row(
                "one index",
                "write",
                "rank 0",
                write.seconds,
                (folder / METADATA).stat().st_size,
                MEASURED,
            ),
        ]
        row = _in_fresh_process(_read_by_a_rank, folder, {}, "the same layout", grid)
        return [*rows, replace(row, part="one index")]


@dataclass
class Used:
    """What a section has taken."""

    seconds: float = 0.0
    bytes: float = 0.0
    """Bytes that it has read from files, in the page cache or not."""
    memory: float = 0.0


@contextmanager
def used() -> Iterator[Used]:
    """A section of which it is measured what it takes."""
    measured = Used()
    before, held, start = _bytes_read(), _resident(), time.process_time()
    yield measured
    measured.seconds = time.process_time() - start
    measured.bytes = _bytes_read() - before
    measured.memory = _resident() - held


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
