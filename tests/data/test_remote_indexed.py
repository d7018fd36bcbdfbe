"""Indexed datasets behind a URL: the samples of the file, by the blocks that they touch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty

import fsspec
import numpy as np
import pytest
from megatron_llama.config.schema import DataConfig
from megatron_llama.data import block_cache, byte_ranges
from megatron_llama.data.block_cache import SLICE_BYTES, BlockCache, cache_folder
from megatron_llama.data.byte_ranges import SourceFile, find_file
from megatron_llama.data.datasets import open_dataset
from megatron_llama.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron_llama.data.loader import STEPS_AHEAD, BatchLoader, BlendedSamples, Samples, StreamSamples
from megatron_llama.data.megatron_order import MegatronStream
from megatron_llama.data.meta import read_meta
from megatron_llama.data.remote_indexed import RemoteIndexedDataset
from megatron_llama.data.stream import TokenStream
from megatron_llama.data.words import is_stream
from megatron_llama.errors import ConfigError, DataError
from tools.range_server import RangeServer, serving

from tests.data.conftest import VOCAB_SIZE

BLOCK = 4096
SEQ_LENGTH = 64


@pytest.fixture
def server(dataset: IndexedDataset) -> Iterator[RangeServer]:
    with serving(Path(dataset.prefix).parent) as found:
        yield found


@pytest.fixture
def fast_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_ranges, "FIRST_PAUSE", 0.001)


def remote(prefix: str, folder: Path, limit: int = 1 << 30) -> RemoteIndexedDataset:
    return RemoteIndexedDataset(prefix, BlockCache(folder, limit, block_bytes=BLOCK))


def stream(dataset: IndexedDataset) -> TokenStream:
    return TokenStream(dataset, (0, dataset.num_documents), SEQ_LENGTH, VOCAB_SIZE)


def asked(server: RangeServer, name: str = "corpus.bin") -> list[tuple[int, int]]:
    """The ranges of a file that were asked for since the last call, without the first byte that says its size."""
    found = []
    try:
        while True:
            path, start, stop = server.requests.get_nowait()
            found += [(start, stop)] * (path == name and (start, stop) != (0, 1))
    except Empty:
        return found


def blocks_of(samples: TokenStream, indices: range | list[int]) -> set[tuple[int, int]]:
    size, item = os.path.getsize(f"{samples.dataset.prefix}.bin"), samples.dataset.dtype.itemsize
    numbers = {
        number
        for index in indices
        for first, last in samples.ranges(index)
        for number in range(first * item // BLOCK, (last * item - 1) // BLOCK + 1)
    }
    return {(number * BLOCK, min((number + 1) * BLOCK, size)) for number in numbers}


def finished(samples: RemoteIndexedDataset) -> None:
    """Wait for the blocks that were asked for ahead."""
    for future in list(samples._cache._pending.values()):
        future.result()


@pytest.mark.parametrize("store", ["http", "file", "memory"])
def test_the_samples_are_those_of_the_file(store: str, dataset: IndexedDataset, server: RangeServer, tmp_path: Path) -> None:
    place = {"http": f"{server.url}/corpus", "file": f"file://{dataset.prefix}", "memory": "memory://bucket/corpus"}[store]
    if store == "memory":
        for suffix in (".bin", ".idx"):
            fsspec.filesystem("memory").pipe_file(f"/bucket/corpus{suffix}", Path(dataset.prefix + suffix).read_bytes())
    assert not is_stream(place) and is_stream(place + "/") and is_stream(f"{place}.jsonl") and is_stream(place + "-none")
    found = remote(place, tmp_path)
    ours, theirs = stream(found), stream(dataset)
    assert ours.identity() == theirs.identity() and len(ours) == len(theirs) > 1000
    assert all(np.array_equal(ours.sample(index), theirs.sample(index)) for index in range(len(theirs)))
    ordered = [MegatronStream(each, seed=3, num_samples=300, most_bytes=1 << 20, data=DataConfig()) for each in (ours, theirs)]
    for index in range(300):
        ordered[0].fetch(index)
        assert np.array_equal(ordered[0].sample(index), ordered[1].sample(index))


def test_only_touched_blocks_are_read_and_only_once(dataset: IndexedDataset, server: RangeServer, tmp_path: Path) -> None:
    chosen = [3, 40, 41, 400, 1001]
    for restart in range(2):
        ours = stream(remote(f"{server.url}/corpus", tmp_path))
        for _ in range(2):
            for index in chosen:
                assert np.array_equal(ours.sample(index), stream(dataset).sample(index))
        ranges = asked(server)
        assert sorted(ranges) == ([] if restart else sorted(blocks_of(stream(dataset), chosen)))
    remote(f"{server.url}/corpus", tmp_path / "other")
    assert asked(server, "corpus.idx") == [(0, os.path.getsize(dataset.prefix + ".idx"))], "the index is read whole"
    remote(f"{server.url}/corpus", tmp_path / "other")
    assert asked(server, "corpus.idx") == [], "and once"


def loader(samples: Samples, rank: int, size: int) -> BatchLoader:
    return BatchLoader(samples, shuffled=True, micro_batch_size=2, global_batch_size=8, seed=7, dp_rank=rank, dp_size=size)


def test_every_layout_reads_the_samples_of_the_file(dataset: IndexedDataset, server: RangeServer, tmp_path: Path) -> None:
    """Of a blend of a remote and a local dataset, too; dp changes on the way."""

    def samples(first: IndexedDataset) -> Samples:
        return BlendedSamples([StreamSamples(stream(each), DataConfig(), None) for each in (first, dataset)], (3, 1))

    for rank, size, steps in ((0, 1, range(0, 3)), (1, 2, range(3, 6)), (3, 4, range(6, 9))):
        ours = loader(samples(remote(f"{server.url}/corpus", tmp_path)), rank, size)
        theirs = loader(samples(dataset), rank, size)
        for step in steps:
            for mine, other in zip(ours.microbatches(step * 8), theirs.microbatches(step * 8), strict=True):
                assert (mine.tokens == other.tokens).all() and (mine.labels == other.labels).all()


def test_steps_are_asked_for_ahead(dataset: IndexedDataset, server: RangeServer, tmp_path: Path) -> None:
    """The next steps come from the folder while the server is away, and a rank asks for its own samples alone."""
    found = remote(f"{server.url}/corpus", tmp_path)
    ours, local = (
        loader(StreamSamples(stream(found), DataConfig(), None), 1, 2),
        loader(StreamSamples(stream(dataset), DataConfig(), None), 1, 2),
    )
    ours.microbatches(0)
    finished(found)
    steps = range(0, 8 * (1 + STEPS_AHEAD), 8)
    touched = blocks_of(stream(dataset), [index for step in steps for index in local._indices(local._starts(step))])
    assert Counter(asked(server)) == Counter(touched)
    server.forbidden = True
    for step in steps[1:]:
        for mine, other in zip(ours.microbatches(step), local.microbatches(step), strict=True):
            assert (mine.tokens == other.tokens).all()


def held(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.parent.name != "locks"
    }


def test_the_folder_is_bounded_and_the_oldest_go(dataset: IndexedDataset, server: RangeServer, tmp_path: Path) -> None:
    limit = 32 * BLOCK
    cache = BlockCache(tmp_path, limit, block_bytes=BLOCK)
    file = find_file(f"{server.url}/corpus.bin")
    assert file is not None and file.size > 2 * limit
    whole = Path(dataset.prefix + ".bin").read_bytes()
    for start in range(0, file.size - BLOCK, BLOCK):
        assert cache.read(file, start, start + BLOCK) == whole[start : start + BLOCK]
        assert cache.read(file, 0, 8) == whole[:8]  # it stays in use
        assert sum(held(tmp_path).values()) <= limit
    first = asked(server)
    assert first.count((0, BLOCK)) == 1, "what is used stays"
    assert len(held(tmp_path)) > 24, "no more goes than has to"
    cache.read(file, BLOCK, 2 * BLOCK)
    assert asked(server) == [(BLOCK, 2 * BLOCK)], "what was not used is gone"
    # A process that was killed left this long ago, one that runs has just begun that.
    folder = next(path for path in tmp_path.iterdir() if path.name != "locks")
    for name, age in (("0-4096.tmp-a", 2 * block_cache._ABANDONED), ("0-4096.tmp-b", 0.0)):
        (folder / name).write_bytes(b"x")
        then = (folder / name).stat().st_mtime - age
        os.utime(folder / name, (then, then))
    cache._make_room()
    assert [path.name for path in folder.glob("*.tmp-*")] == ["0-4096.tmp-b"]


READER = """
import sys
from pathlib import Path
from megatron_llama.data.block_cache import BlockCache
from megatron_llama.data.byte_ranges import find_file
url, folder, whole = sys.argv[1:]
cache, file = BlockCache(Path(folder), 1 << 30, block_bytes=4096), find_file(url)
content = cache.whole(file).read_bytes() if whole == "whole" else b"".join(
    cache.read(file, at, min(at + 4096, file.size)) for at in range(0, file.size, 4096))
sys.stdout.buffer.write(content)
"""


def reader(url: str, folder: Path, what: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", READER, url, str(folder), what], stdout=subprocess.PIPE)


@pytest.mark.long
def test_two_processes_share_a_folder(dataset: IndexedDataset, server: RangeServer, tmp_path: Path) -> None:
    """Both read all, and the server is asked once for each block."""
    whole = Path(dataset.prefix + ".bin").read_bytes()
    both = [reader(f"{server.url}/corpus.bin", tmp_path, "blocks") for _ in range(2)]
    assert [each.communicate()[0] == whole for each in both] == [True, True]
    assert sorted(asked(server)) == [(at, min(at + BLOCK, len(whole))) for at in range(0, len(whole), BLOCK)]
    assert all("tmp" not in name for name in held(tmp_path))


@pytest.mark.long
def test_a_process_that_is_killed_in_a_download_is_in_nobodys_way(dataset: IndexedDataset, tmp_path: Path) -> None:
    whole = Path(dataset.prefix + ".bin").read_bytes()
    with serving(Path(dataset.prefix).parent, bytes_per_second=2e5) as server:
        killed = reader(f"{server.url}/corpus.bin", tmp_path, "whole")
        while server.requests.get(timeout=60)[2] == 1:
            pass
        os.kill(killed.pid, signal.SIGKILL)
        killed.communicate()
    left = held(tmp_path)
    assert len(left) == 1 and "whole.tmp-" in next(iter(left)), "it was killed before its end"
    with serving(Path(dataset.prefix).parent) as server:
        file = find_file(f"{server.url}/corpus.bin")
        assert file is not None
        again = BlockCache(tmp_path, 1 << 30, block_bytes=BLOCK)
        assert again.whole(file).read_bytes() == whole
        assert again.read(file, 10, 20000) == whole[10:20000]
        # A disk that was full, or lost power, may leave less than was written.
        again._path(file, 0).write_bytes(b"half")
        assert again.read(file, 10, 20000) == whole[10:20000]


@pytest.mark.long
def test_one_process_sums_a_copy_for_all_that_start_with_it(dataset: IndexedDataset, server: RangeServer, tmp_path: Path) -> None:
    """A bit that flips without a trace shows who has summed what it read."""
    url = f"{server.url}/corpus.idx"
    content = Path(dataset.prefix + ".idx").read_bytes()
    flipped = bytes([content[0] ^ 1]) + content[1:]

    def read() -> bytes:
        return reader(url, tmp_path, "whole").communicate()[0]

    def age(seconds: float) -> None:
        (stamp,) = tmp_path.rglob("summed")
        then = time.time() - seconds
        os.utime(stamp, (then, then))

    def flip() -> None:
        (copy,) = tmp_path.rglob("whole-*")
        before = copy.stat()
        with copy.open("r+b") as file:
            file.write(flipped)
        os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert read() == content
    age(1000)
    assert read() == content  # and has left a new stamp
    flip()
    assert read() == flipped
    age(1000)
    assert read() == content  # which the server had to give again
    flip()
    (copy,) = tmp_path.rglob("whole-*")
    copy.touch()
    assert read() == content


@pytest.mark.parametrize("store", ["http", "file"])
def test_a_file_that_changes_is_refused_and_its_blocks_are_not_used(store: str, tmp_path: Path, fast_retries: None) -> None:
    def write(id: int) -> None:
        with IndexedDatasetWriter(tmp_path / "there" / "docs", np.uint16) as writer:
            for _ in range(30):
                writer.add(np.full(300, id, np.uint16))

    write(5)
    with serving(tmp_path / "there") as server:
        prefix = f"{server.url}/docs" if store == "http" else f"file://{tmp_path}/there/docs"
        found = remote(prefix, tmp_path / "cache")
        assert set(found.tokens(0, 100)) == {5}
        write(6)
        with pytest.raises(DataError, match=rf"{prefix}.bin: bytes 4096 to 8192: got another file of 18000 bytes \(.*it was .*begin a run"):
            found.tokens(2100, 2200)
        assert set(remote(prefix, tmp_path / "cache").tokens(0, 9000)) == {6}
        (tmp_path / "there" / "docs.bin").write_bytes(b"")
        with pytest.raises(DataError, match=rf"{prefix}.bin: .*a file that ends before byte 8192 instead of 18000 bytes|ends there"):
            found.tokens(4200, 4300)


def test_a_server_that_fails_for_a_while(dataset: IndexedDataset, server: RangeServer, tmp_path: Path, fast_retries: None) -> None:
    server.failing = 2
    found = remote(f"{server.url}/corpus", tmp_path)
    server.failing = 2
    assert np.array_equal(found.tokens(0, 9000), dataset.tokens(0, 9000)) and server.failing == 0
    server.failing = 1000
    with pytest.raises(DataError, match=r"corpus.bin: bytes 1\d+ to \d+: got HTTP status 503 .* after 8 tries"):
        found.tokens(60000, 60010)
    server.failing = 0
    assert np.array_equal(found.tokens(60000, 60010), dataset.tokens(60000, 60010)), "an error is not kept"


def test_files_that_cannot_be_used(dataset: IndexedDataset, tmp_path: Path, fast_retries: None) -> None:
    good = {suffix: Path(dataset.prefix + suffix).read_bytes() for suffix in (".bin", ".idx")}
    for name, files in {
        "alone": {".idx": good[".idx"]},
        "short": {**good, ".bin": good[".bin"][:-2]},
        "text": {**good, ".idx": b"no index at all" * 9},
        "cut": {**good, ".idx": good[".idx"][:-8]},
    }.items():
        for suffix, content in files.items():
            (tmp_path / (name + suffix)).write_bytes(content)
    with serving(tmp_path) as server:
        for name, message in {
            "none": r"none\.idx: got no such file, expected PREFIX\.bin and PREFIX\.idx; give the common URL",
            "alone": r"alone\.bin: got no such file",
            "short": rf"short\.bin: got {len(good['.bin']) - 2} bytes, expected {len(good['.bin'])} bytes, as {server.url}/short\.idx says",
            "text": rf"{server.url}/text\.idx: got the first bytes b'no index ', expected b'MMIDIDX",
            "cut": rf"{server.url}/cut\.idx: got \d+ bytes, expected \d+ bytes for its \d+ sequences",
        }.items():
            with pytest.raises(DataError, match=message):
                remote(f"{server.url}/{name}", tmp_path / "cache")
        server.versions = False
        with pytest.raises(DataError, match=r"short\.idx: got a file without version.*expected one of them"):
            remote(f"{server.url}/short", tmp_path / "cache")
        server.forbidden = True
        with pytest.raises(DataError, match=r"short\.idx: got HTTP status 403 .*check the URL, the server and your rights"):
            is_stream(f"{server.url}/short")
    with pytest.raises(DataError, match=r"expected packages that read such a URL; pip install"):
        is_stream("s3://bucket/docs")
    with serving(tmp_path, ranges=False) as server, pytest.raises(DataError, match="the server sends whole files only"):
        remote(f"{server.url}/short", tmp_path / "cache")


@pytest.mark.tries("data_cache_path", "data_cache_gib")
def test_options_of_the_cache(dataset: IndexedDataset, server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{server.url}/corpus"
    data = DataConfig(data_cache_path=str(tmp_path / "here"), data_cache_gib=0.5)
    found = open_dataset(url, data)
    assert isinstance(found, RemoteIndexedDataset) and found._cache._limit == 1 << 29
    assert np.array_equal(found.tokens(0, 5000), dataset.tokens(0, 5000)) and held(tmp_path / "here")
    assert type(open_dataset(dataset.prefix, data)) is IndexedDataset
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / ".cache/megatron_llama/data"
    for word in ("~nobody-has-this-name/cache", None):
        with pytest.raises(ConfigError, match=r"--data-cache-path: got ~.*cache.*, of a user without a home, expected a folder on a disk"):
            cache_folder(word)
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(os, "getuid", lambda: 2**31)
    with pytest.raises(ConfigError, match="--data-cache-gib: got 0, expected more than 0 GiB"):
        open_dataset(url, DataConfig(data_cache_gib=0.0))
    with pytest.raises(ConfigError, match="--data-cache-path: got s3://bucket/cache, expected a folder on a disk"):
        open_dataset(url, DataConfig(data_cache_path="s3://bucket/cache"))
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataError, match=r"file/blocks: got .*, expected a folder that keeps blocks of remote files; give another --data-cache-path"
    ):
        open_dataset(url, DataConfig(data_cache_path=str(tmp_path / "file")))


def test_what_was_not_said_of_a_remote_tokenizer(tmp_path: Path) -> None:
    """PREFIX.meta.json is read from its server; the tokenizer beside it has a URL."""
    with serving(tmp_path) as server:
        assert read_meta(f"{server.url}/docs") is None
        (tmp_path / "docs.meta.json").write_text('{"tokenizer": "docs-tokenizer", "vocab_size": 300}')
        assert read_meta(f"{server.url}/docs") == {"tokenizer": f"{server.url}/docs-tokenizer", "vocab_size": 300}
        (tmp_path / "docs.meta.json").write_text("[]")
        with pytest.raises(DataError, match=re.escape(f"{server.url}/docs.meta.json: got a JSON list, expected a JSON object")):
            read_meta(f"{server.url}/docs")


def test_versions_of_a_file_have_folders_of_their_own(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 1 << 30)
    files = [
        SourceFile("http://a/b", 10, "1"), SourceFile("http://a/b", 10, "2"), SourceFile("http://a/b", 11, "1"),
        SourceFile("http://a/c", 10, "1"),
    ]
    assert len({cache._folder(file) for file in files}) == 4


def test_damage_in_the_cache_is_read_again(dataset: IndexedDataset, server: RangeServer, tmp_path: Path) -> None:
    """A flipped bit of a block, of its checksum, of a whole file; a cut, an append; and blocks of a version without checksums."""
    file = find_file(f"{server.url}/corpus.bin")
    assert file is not None
    content = Path(dataset.prefix + ".bin").read_bytes()
    block = 5 * SLICE_BYTES // 2

    def damaged(damage: Callable[[bytearray], object], pattern: str) -> None:
        for path in tmp_path.rglob(pattern):
            changed = bytearray(path.read_bytes())
            damage(changed)
            path.write_bytes(changed)

    def flip(at: int) -> Callable[[bytearray], object]:
        return lambda changed: changed.__setitem__(at, changed[at] ^ 16)

    cache = BlockCache(tmp_path, 1 << 30, block_bytes=block)
    assert cache.read(file, 0, len(content)) == content and cache.whole(file).read_bytes() == content
    assert asked(server)
    first = f"0-{block}"
    for damage in (
        flip(3),
        flip(block - 1),
        flip(block),
        flip(-1),
        bytearray.pop,
        lambda c: c.append(0),
        lambda c: c.__delitem__(slice(block, None)),
    ):
        damaged(damage, first)
        assert cache.read(file, 1, block) == content[1:block]
        assert asked(server) == [(0, block)], "it is read again, once"
    damaged(flip(3), first)
    assert cache.read(file, SLICE_BYTES, SLICE_BYTES + 9) == content[SLICE_BYTES : SLICE_BYTES + 9]
    assert asked(server) == [], "slices that are whole are used"
    damaged(flip(77), "whole-*")
    assert cache.whole(file).read_bytes() == content and asked(server)
    assert cache.whole(file).read_bytes() == content and not asked(server)
    assert len(list(tmp_path.rglob("whole*"))) == 1
