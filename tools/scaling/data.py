"""The order of samples in Megatron's order: what each process of a machine holds, and the machine.

A dataset of short documents is made once. Each process opens it as a run does.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from megatron_llama.config.schema import DataConfig
from megatron_llama.data import shared_order
from megatron_llama.data.datasets import open_dataset
from megatron_llama.data.indexed import IndexedDatasetWriter
from megatron_llama.data.megatron_order import (
    DOCUMENT_BYTES,
    PLACE_BYTES,
    SAMPLE_BYTES,
    MegatronStream,
    sample_dtype,
)
from megatron_llama.data.stream import TokenStream
from tools.scaling.rows import COMPUTED, MEASURED, Row

DOCUMENTS = 20_000_000
SEQ_LENGTH = 8
PROCESSES = 4
TOKENS = 15_600_000_000_000
"""Of LLaMA 3's training, in documents of a thousand tokens and samples of 8,192."""


def data(world: int) -> list[Row]:
    """Return what a process holds. It does not depend on the number of processes."""
    rows = [*_opened(DOCUMENTS)]
    documents, samples = TOKENS // 1000, TOKENS // 8192
    order = PLACE_BYTES * documents + sample_dtype(samples).itemsize * samples
    making = DOCUMENT_BYTES * documents + SAMPLE_BYTES * samples
    words = f"order of {TOKENS / 1e12:g} T tokens"
    return [
        *rows,
        Row("data", f"{words}: a file", "a machine", None, order, COMPUTED),
        Row("data", f"{words}: while it is made", "one process", None, None, COMPUTED, making),
        Row("data", f"{words}: without sharing", "each process", None, None, COMPUTED, order),
    ]


@cache
def _opened(documents: int) -> tuple[Row, ...]:
    """Open a dataset with and without sharing, in processes one after the other that all stay."""
    rows = []
    with TemporaryDirectory() as folder:
        prefix = Path(folder) / "documents"
        _write(prefix, documents)
        for shares in (False, True):
            first, *others = _processes(prefix, Path(folder) / "cache", documents, shares=shares)
            words = f"order of {documents:,} documents, {'shared' if shares else 'of its own'}"
            seconds = max(seconds for seconds, _ in others)
            held = max(held for _, held in others)
            rows += [
                Row("data", words, "the first", first[0], None, MEASURED, first[1]),
                Row("data", words, "others", seconds, None, MEASURED, held),
            ]
        files = sum(file.stat().st_size for file in (Path(folder) / "cache").rglob("*.order"))
        rows.append(Row("data", "its file", "a machine", None, files, MEASURED))
    return tuple(rows)


def _write(prefix: Path, documents: int) -> None:
    lengths = np.random.default_rng(1).integers(1, 4, documents)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_many(np.zeros(int(lengths.sum()), np.uint16), lengths)


def _processes(
    prefix: Path, cache: Path, documents: int, *, shares: bool
) -> list[tuple[float, int]]:
    """Return, of each process, the seconds that it took to open the samples, and the private bytes
    that it holds afterwards."""
    found = []
    for _ in range(PROCESSES):
        # A forked one would begin with this process's memory.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
            found.append(apart.submit(_open, prefix, cache, documents, shares=shares).result())
    return found


def _open(prefix: Path, cache: Path, documents: int, *, shares: bool) -> tuple[float, int]:
    if not shares:
        shared_order.SHARED_ABOVE = 1 << 60
    before = _private()
    begun = time.perf_counter()
    data = DataConfig(data_cache_path=str(cache))
    tokens = TokenStream(open_dataset(str(prefix), data), (0, documents), SEQ_LENGTH, 1 << 16)
    order = MegatronStream(tokens, seed=1, num_samples=None, most_bytes=1 << 60, data=data)
    seconds = time.perf_counter() - begun
    order.ranges(len(order) // 2)
    return seconds, _private() - before


def _private() -> int:
    """Return the bytes of this process's memory that are in no file."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))
