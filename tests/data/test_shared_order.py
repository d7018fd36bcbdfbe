"""The order of samples in a file that all processes of a machine map: made once, and never used if it is something else."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Never

import numpy as np
import pytest
from megatron_llama.config.schema import DataConfig
from megatron_llama.data import shared_order
from megatron_llama.data.datasets import open_dataset
from megatron_llama.data.indexed import IndexedDatasetWriter
from megatron_llama.data.megatron_order import MegatronBlend, MegatronStream
from megatron_llama.data.shared_order import Arrays, shared_arrays
from megatron_llama.data.stream import TokenStream
from megatron_llama.errors import DataError

KEY = {"seed": 1, "lengths": "abc"}
SIZE = 12 * 1000
STORED = 4096 + 8192 + 4096
"""Bytes of its file: a header and two arrays, each a multiple of 4,096."""


@pytest.fixture(autouse=True)
def every_order_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_order, "SHARED_ABOVE", 0)


def arrays(log: Path, factor: int = 1) -> Arrays:
    """Arrays of two kinds. Each time that they are made is a line of the log."""
    with log.open("a") as file:
        file.write("made\n")
    return np.arange(1000, dtype=np.int64) * factor, np.arange(1000, dtype=np.uint32)


def in_cache(folder: Path, *, of: int = 1000) -> DataConfig:
    """A cache that holds so many of these orders."""
    return DataConfig(data_cache_path=str(folder), data_cache_gib=of * STORED / 2**30)


def shared(folder: Path, key: dict[str, object] | None = None, factor: int = 1) -> list[list[int]]:
    found = shared_arrays("--option", in_cache(folder), key or KEY, SIZE, partial(arrays, folder / "log", factor))
    assert not any(array.flags.writeable for array in found)
    return [array.tolist() for array in found]


def made(folder: Path) -> int:
    return len((folder / "log").read_text().split())


def expected(factor: int = 1) -> list[list[int]]:
    return [[number * factor for number in range(1000)], list(range(1000))]


def test_processes_that_start_together_make_it_once(tmp_path: Path) -> None:
    with ProcessPoolExecutor(8, mp_context=get_context("fork")) as pool:
        assert list(pool.map(shared, [tmp_path] * 8)) == [expected()] * 8
    assert made(tmp_path) == 1
    assert shared(tmp_path, {**KEY, "seed": 2}, factor=3) == expected(3) and made(tmp_path) == 2


def cut(content: bytearray) -> bytes:
    return bytes(content[:-5000])


def flipped(at: int, content: bytearray) -> bytes:
    content[at] ^= 1
    return bytes(content)


def of_another_key(content: bytearray) -> bytes:
    """The header is whole, and says what the file is."""
    return bytes(content).replace(b"abc", b"abd")


@pytest.mark.parametrize(
    "damage", [cut, partial(flipped, 5), partial(flipped, 60), partial(flipped, -4000), of_another_key, lambda content: b"", lambda content: b"\0" * 9999]
)
def test_a_file_that_is_damaged_or_stale_is_made_anew(damage: Callable[[bytearray], bytes], tmp_path: Path) -> None:
    shared(tmp_path)
    (file,) = (tmp_path / "orders").glob("*.order")
    file.write_bytes(damage(bytearray(file.read_bytes())))
    os.utime(file, (0, time.time() - 2 * shared_order._SUMMED_SECONDS))
    assert shared(tmp_path) == expected() and made(tmp_path) == 2
    assert shared(tmp_path) == expected() and made(tmp_path) == 2


def test_a_header_of_another_key_under_this_name(tmp_path: Path) -> None:
    """As if two keys had the same digest, or somebody had renamed the file."""
    shared(tmp_path, {**KEY, "seed": 2}, factor=3)
    (other,) = (tmp_path / "orders").glob("*.order")
    shared(tmp_path)
    (own,) = set((tmp_path / "orders").glob("*.order")) - {other}
    os.replace(other, own)
    assert shared(tmp_path) == expected() and made(tmp_path) == 3


def test_what_a_killed_process_leaves_is_removed(tmp_path: Path) -> None:
    shared(tmp_path)
    (file,) = (tmp_path / "orders").glob("*.order")
    os.replace(file, file.with_name(f"{file.name}.tmp-1"))
    assert shared(tmp_path) == expected()
    assert [path.suffix for path in sorted((tmp_path / "orders").iterdir())] == [".lock", ".order"]


def test_a_folder_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--option: .* free space for an order of 1,000,000"):
        shared_arrays("--option", in_cache(tmp_path), KEY, 10**15, nobody_makes)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"Not a directory.*--data-cache-path"):
        shared_arrays("--option", in_cache(tmp_path / "file"), KEY, SIZE, nobody_makes)


def nobody_makes() -> Never:
    raise AssertionError("it is made before it is refused")


def opened(folder: Path, seed: int, *, of: int) -> Arrays:
    """An order in a cache of so many, which was opened at this second of long ago."""
    before = set((folder / "orders").glob("*.order"))
    found = shared_arrays("--option", in_cache(folder, of=of), {"seed": seed}, SIZE, partial(arrays, folder / "log", seed))
    for path in set((folder / "orders").glob("*.order")) - before:
        assert path.stat().st_size == STORED
        os.utime(path, (seed, seed))
    return found


def kept(folder: Path) -> list[int]:
    """The orders that are there, by the time at which they were opened."""
    return sorted(int(path.stat().st_mtime) for path in (folder / "orders").glob("*.order"))


@pytest.mark.tries("data_cache_gib")
def test_what_was_not_opened_for_longest_makes_room(tmp_path: Path) -> None:
    for seed in (3, 1, 2):
        opened(tmp_path, seed, of=3)
    assert kept(tmp_path) == [1, 2, 3]
    opened(tmp_path, 4, of=3)
    assert kept(tmp_path) == [2, 3, 4]
    opened(tmp_path, 4, of=1)
    assert kept(tmp_path)[:2] == [2, 3] and kept(tmp_path)[2] > time.time() - 300, "nothing was written, so nothing had to make room"
    opened(tmp_path, 5, of=0)
    assert kept(tmp_path) == [5], "a run has what it needs, however small the cache"


def test_what_any_process_maps_stays(tmp_path: Path) -> None:
    """Its other processes come later, and map the same file. The end of the process, also by SIGKILL, gives it free."""
    numbers = opened(tmp_path, 1, of=1)[0]
    here, there = Pipe()
    child = get_context("fork").Process(target=holds, args=(tmp_path, there))
    child.start()
    assert here.recv() == "mapped"
    opened(tmp_path, 3, of=1)
    assert kept(tmp_path) == [1, 2, 3]
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    opened(tmp_path, 4, of=1)
    assert kept(tmp_path) == [1, 4] and numbers.tolist() == expected(1)[0]
    del numbers
    gc.collect()
    opened(tmp_path, 5, of=1)
    assert kept(tmp_path) == [5]


def holds(folder: Path, connection: Connection) -> None:
    found = opened(folder, 2, of=1)
    connection.send("mapped")
    connection.poll(None)
    del found


def test_a_file_that_was_removed_while_it_was_mapped_has_its_values(tmp_path: Path) -> None:
    """As a file that an earlier version has mapped, without the lock."""
    found = opened(tmp_path, 1, of=1)
    for path in (tmp_path / "orders").glob("*.order"):
        path.unlink()
    assert [array.tolist() for array in found] == expected(1) and kept(tmp_path) == []


def stream(prefix: Path, cache: Path, lengths: Sequence[int], seed: int = 1) -> list[list[tuple[int, int]]]:
    """The places of all samples of a dataset of these documents."""
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in lengths:
            writer.add(np.zeros(length, np.uint16))
    tokens = TokenStream(open_dataset(str(prefix), DataConfig()), (0, len(lengths)), 8, 100)
    order = MegatronStream(tokens, seed=seed, num_samples=20, most_bytes=1 << 30, data=DataConfig(data_cache_path=str(cache)))
    return [order.ranges(index) for index in range(len(order))]


def test_the_order_is_that_of_a_process_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And documents of other lengths, as many with as many tokens, have an order of their own."""
    datasets = [(30, 2, 0, 3, 17), (2, 30, 0, 3, 17)]
    found = [stream(tmp_path / "data", tmp_path, lengths, seed) for lengths in datasets for seed in (1, 2)]
    assert len(list((tmp_path / "orders").glob("*.order"))) == 4
    assert found == [stream(tmp_path / "data", tmp_path, lengths, seed) for lengths in datasets for seed in (1, 2)]
    monkeypatch.setattr(shared_order, "SHARED_ABOVE", 1 << 30)
    assert found == [stream(tmp_path / "data", tmp_path / "other", lengths, seed) for lengths in datasets for seed in (1, 2)]
    assert not (tmp_path / "other").exists()


def test_a_blend_shares_its_order_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[object] = [range(70), range(40)]
    first, again = (MegatronBlend(parts, [0.6, 0.4], 90, in_cache(tmp_path)) for _ in range(2))  # type: ignore[arg-type]
    monkeypatch.setattr(shared_order, "SHARED_ABOVE", 1 << 30)
    alone = MegatronBlend(parts, [0.6, 0.4], 90, DataConfig())  # type: ignore[arg-type]
    for blend in (first, again):
        assert np.array_equal(blend._places, alone._places) and np.array_equal(blend._numbers, alone._numbers)
    (file,) = (tmp_path / "orders").glob("*.order")
    assert json.loads(file.read_bytes()[40:].split(b"]]}")[0] + b"]]}")["arrays"] == [["<i2", 90], ["<i8", 90], ["<i8", 2]]
