"""What is not what preprocess wrote is found: at the opening, in the background, or when asked."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_llama.config.schema import DataConfig
from megatron_llama.data import mounts, verification
from megatron_llama.data import sums as sums_module
from megatron_llama.data.datasets import open_dataset
from megatron_llama.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron_llama.data.meta import read_meta, write_meta
from megatron_llama.data.page_cache import absent_ranges, forget, read_nothing_ahead
from megatron_llama.data.sums import FileSums, RunningSums
from megatron_llama.data.tokenizer.fingerprint import Fingerprint
from megatron_llama.data.verification import BLOCK_BYTES, DatasetCheck, PieceReader, seen_files, share_of, verify_dataset
from megatron_llama.errors import DataError
from megatron_llama.train.commands.inspect import inspect

from tests.flipped import flip
from tests.machines import Machine, run_on

PIECE = 1 << 12


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums_module, "PIECE_BYTES", PIECE)


def write_dataset(prefix: Path, documents: int = 300) -> None:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for document in range(documents):
            writer.add(np.arange(40) + document % 100)
    write_meta(
        str(prefix), tokenizer=prefix.parent / "tokenizer.model", fingerprint=Fingerprint("0" * 64, "1" * 64), vocab_size=500, eod=2,
        documents=writer.num_documents, tokens=writer.num_tokens, sums=writer.sums,
    )


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE])
def test_sums_are_those_of_the_pieces(size: int, small_pieces: None) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    content = content[:size]
    running = RunningSums()
    for start in range(0, size, 1000):
        running.add(memoryview(content[start : start + 1000]))
    pieces = [content[start : start + PIECE] for start in range(0, size, PIECE)]
    assert running.result() == FileSums(size, tuple(hashlib.sha256(piece).hexdigest() for piece in pieces))


def test_a_small_file_has_the_sum_that_others_compute(tmp_path: Path) -> None:
    write_dataset(tmp_path / "c")
    entry = json.loads((tmp_path / "c.meta.json").read_text())["sums"]
    for suffix in (".bin", ".idx"):
        content = (tmp_path / f"c{suffix}").read_bytes()
        assert entry[suffix] == {"bytes": len(content), "sha256": [hashlib.sha256(content).hexdigest()]}


def test_what_was_written_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str], small_pieces: None) -> None:
    write_dataset(tmp_path / "c")
    assert len(verify_dataset(str(tmp_path / "c")).bin.pieces) == 6
    verify_dataset(f"file://{tmp_path}/c")
    inspect(["dataset", str(tmp_path / "c"), "--verify"])
    assert "verified: " in capsys.readouterr().out


@pytest.mark.parametrize("place", ["disk", "server"])
def test_every_damaged_piece_is_named(place: str, tmp_path: Path, small_pieces: None) -> None:
    write_dataset(tmp_path / "c")
    flip(tmp_path / "c.bin", 2 * PIECE + 1)
    prefix = str(tmp_path / "c") if place == "disk" else f"file://{tmp_path}/c"
    with pytest.raises(DataError, match=rf"c\.bin: bytes {2 * PIECE} to {3 * PIECE}: got the SHA-256 \w+, expected \w+, as they were"):
        verify_dataset(prefix)
    (tmp_path / "c.idx").write_bytes((tmp_path / "c.idx").read_bytes()[:-8])
    with pytest.raises(DataError, match=r"c is damaged:\n  - .*c\.bin: bytes(.|\n)*c\.idx: got \d+ bytes, expected \d+ bytes, as it was"):
        verify_dataset(prefix)


def test_without_sums_nothing_is_verified(tmp_path: Path) -> None:
    write_dataset(tmp_path / "c")
    (tmp_path / "c.meta.json").unlink()
    with pytest.raises(DataError, match=r"c\.meta\.json: got no sums"):
        inspect(["dataset", str(tmp_path / "c"), "--verify"])
    open_dataset(str(tmp_path / "c"), DataConfig())


def exchange(folder: Path) -> None:
    write_dataset(folder / "other", 299)
    for suffix in (".bin", ".idx"):
        shutil.copy(folder / f"other{suffix}", folder / f"c{suffix}")


@pytest.mark.parametrize("place", ["disk", "server"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: flip(folder / "c.idx", 34 + 4 * 7), r"c\.idx: got an offset of 640 for sequence 8"),
        (exchange, r"c\.bin: got 23920 bytes, expected 24000 bytes, as it was written; copy the dataset again"),
    ],
    ids=["flip", "exchange"],
)
def test_damage_is_found_at_the_opening(damage: Callable[[Path], None], words: str, place: str, tmp_path: Path) -> None:
    write_dataset(tmp_path / "c")
    damage(tmp_path)
    data = DataConfig(data_cache_path=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=words):
        open_dataset(str(tmp_path / "c") if place == "disk" else f"file://{tmp_path}/c", data)


def test_an_index_that_another_dataset_might_have_is_found_by_its_sum(tmp_path: Path) -> None:
    """Lengths and offsets agree with each other and with the .bin, and are not what was written."""
    write_dataset(tmp_path / "c")
    with IndexedDatasetWriter(tmp_path / "c2", np.uint16) as writer:
        for document in range(300):
            writer.add(np.arange(40 + (document == 7) - (document == 8)))
    shutil.copy(tmp_path / "c2.idx", tmp_path / "c.idx")
    IndexedDataset(tmp_path / "c")
    with pytest.raises(DataError, match=r"c\.idx: bytes 0 to \d+: got the SHA-256"):
        open_dataset(str(tmp_path / "c"), DataConfig())


def test_the_check_beside_a_run_names_the_file(tmp_path: Path, small_pieces: None) -> None:
    for name in ("a", "b"):
        write_dataset(tmp_path / name)
    prefixes = [str(tmp_path / name) for name in ("a", "b", "absent")]
    said: list[str] = []
    with DatasetCheck([*prefixes, "https://nowhere/c"], say=said.append) as check:
        check.finish()
    assert check.problem is None
    flip(tmp_path / "b.bin", 23000)
    for shares in ([(0, 1)], [(rank, 4) for rank in range(4)]):
        problems = []
        for share in shares:
            with DatasetCheck(prefixes, share=share, say=said.append) as check:
                check.finish()
            problems += [str(check.problem)] if check.problem is not None else []
        (problem,) = problems
        assert problem.startswith(f"{tmp_path}/b.bin: bytes 20480 to 24000: got the SHA-256 ")
    assert said == []


def check_alone(prefix: Path) -> DatasetCheck:
    with DatasetCheck([str(prefix)], say=lambda line: pytest.fail(line)) as check:
        check.finish()
    return check


@pytest.fixture
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "RETRY_SECONDS", (0.0, 0.0))


@pytest.mark.parametrize("call", ["stat", "open", "fstat", "preadv", "posix_fadvise"])
@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO])
def test_a_read_that_the_system_refuses_once_is_tried_again(
    call: str, code: int, tmp_path: Path, no_rest: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_dataset(tmp_path / "c")
    refused = iter([OSError(code, os.strerror(code))])
    system_call = getattr(os, call)

    def refuse_once(*arguments: Any, **options: Any) -> Any:
        for error in refused:
            raise error
        return system_call(*arguments, **options)

    monkeypatch.setattr(os, call, refuse_once)
    assert check_alone(tmp_path / "c").problem is None
    assert next(refused, None) is None
    flip(tmp_path / "c.bin", 100)
    assert "c.bin: bytes 0 to 24000" in str(check_alone(tmp_path / "c").problem)
    assert capfd.readouterr().err == ""


def test_what_cannot_be_read_is_said_and_ends_no_run(tmp_path: Path, no_rest: None, capfd: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "c")
    (tmp_path / "c.bin").unlink()
    assert check_alone(tmp_path / "c").problem is None
    (line,) = capfd.readouterr().err.splitlines()
    words = "c.bin: bytes 0 to 24000: not compared with their sums, since they cannot be read: No such file or directory; 0.0 GiB were"
    assert line.startswith("note: ") and words in line
    with pytest.raises(DataError, match=r"c\.bin: got No such file or directory, expected a readable file"):
        verify_dataset(str(tmp_path / "c"))


def test_without_free_descriptors_nothing_is_damaged(tmp_path: Path, no_rest: None, capfd: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "c")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        check = check_alone(tmp_path / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert check.problem is None
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"note: {tmp_path}/c is not compared with its sums: ") and "Too many open files" in line


def test_what_nobody_expects_in_the_check_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_dataset(tmp_path / "c")
    monkeypatch.setattr(PieceReader, "require", lambda *arguments: 1 // 0)
    assert check_alone(tmp_path / "c").problem is None
    assert "note: the check of --data-path has ended with ZeroDivisionError: " in capfd.readouterr().err


def test_the_check_ends_when_its_time_is_up_and_says_so(tmp_path: Path) -> None:
    write_dataset(tmp_path / "c")
    flip(tmp_path / "c.bin", 100)
    said: list[str] = []
    with DatasetCheck([str(tmp_path / "c")], say=said.append, seconds=0.0) as check:
        check.finish()
    assert check.problem is None
    (line,) = said
    words = "the 0.0 GiB of --data-path that have sums and are on disks are compared with their sums, and are as they were written; the next"
    assert line.startswith(f" after 0 minutes 0.0 GiB of {words} start begins at another place of chance; inspect dataset ")


def test_the_check_says_what_it_has_read_of_what(tmp_path: Path) -> None:
    """Its own share is a quarter of a .bin of 3 GiB, which takes none on the disk."""
    write_dataset(tmp_path / "c")
    os.truncate(tmp_path / "c.bin", 3 << 30)
    meta = json.loads((tmp_path / "c.meta.json").read_text())
    meta["sums"][".bin"] = {"bytes": 3 << 30, "sha256": ["0" * 64] * 48}
    (tmp_path / "c.meta.json").write_text(json.dumps(meta))
    said: list[str] = []
    with DatasetCheck([str(tmp_path / "c")], share=(1, 4), say=said.append, seconds=0.0) as check:
        check.finish()
    (line,) = said
    assert line.startswith(" after 0 minutes 0.0 GiB of this machine's share of 0.8 GiB of the 3.0 GiB of --data-path that have sums")


def test_each_start_of_the_check_begins_at_another_place(
    tmp_path: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts that all end too soon read everything together; one that does not end reads everything."""
    write_dataset(tmp_path / "c", 1000)
    read: list[tuple[str, int]] = []

    class RecordingReader(PieceReader):
        def require(self, piece: int, pause: Callable[[float], bool] = lambda _: False) -> bool:
            read.append((self._name, piece))
            return super().require(piece, pause)

    monkeypatch.setattr(verification, "PieceReader", RecordingReader)

    def order(**options: Any) -> list[tuple[str, int]]:
        read.clear()
        with DatasetCheck([str(tmp_path / "c")], say=lambda _: None, **options) as check:
            check.finish()
        assert check.problem is None
        return list(read)

    usual = order(first=0.0)
    assert len(usual) == 25 and len(set(usual)) == 25
    assert order(first=0.5) == usual[12:] + usual[:12]
    assert order(first=1.0) == usual[-1:] + usual[:-1]
    firsts = {tuple(order(seconds=0.0)) for _ in range(400)}
    assert firsts == {(piece,) for piece in usual}  # by chance one is missing in 2 of 1,000,000 runs


def read_as(path: Path, sums: FileSums, *, user: int | None) -> None:
    if user is not None and os.getuid() == 0:  # another user cannot become one
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        assert not os.access(path, os.W_OK)
    with PieceReader(str(path), sums) as reader:
        assert reader.require(0)


@pytest.mark.parametrize(("user", "inside"), [(None, 8192), (65534, 0)], ids=["owner", "nobody"])
def test_the_check_leaves_in_memory_what_was_there_and_nothing_else(user: int | None, inside: int) -> None:
    """Also that of a user who may only read, but for parts of the blocks in which something was. On a file system that keeps everything in memory, nothing is absent before and after."""
    folder = Path(tempfile.mkdtemp())  # pytest's folders are closed to other users
    try:
        path = folder / "c.bin"
        folder.chmod(0o755)
        with open(path, "w+b") as file:
            file.write(os.urandom(4 * BLOCK_BYTES))
            os.fdatasync(file.fileno())
            running = RunningSums()
            running.add(memoryview(path.read_bytes()))
            forget(file.fileno(), [(0, 4 * BLOCK_BYTES)])
            dropped = absent_ranges(file.fileno(), 0, 4 * BLOCK_BYTES)
            read_nothing_ahead(file.fileno())
            os.pread(file.fileno(), BLOCK_BYTES, BLOCK_BYTES + inside)
            before = absent_ranges(file.fileno(), 0, 4 * BLOCK_BYTES)
            expected = [(0, BLOCK_BYTES + inside), (2 * BLOCK_BYTES + inside, 4 * BLOCK_BYTES)]
            assert (dropped, before) in (([(0, 4 * BLOCK_BYTES)], expected), ([], []))
            child = multiprocessing.get_context("fork").Process(target=read_as, args=(path, running.result()), kwargs={"user": user})
            child.start()
            child.join()
            assert child.exitcode == 0
            assert absent_ranges(file.fileno(), 0, 4 * BLOCK_BYTES) == before
    finally:
        shutil.rmtree(folder)


META: dict[str, Any] = {"tokenizer": "t", "vocab_size": 500, "eod": 2, "documents": 3, "tokens": 9}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer": 7}, "tokenizer: got 7, expected a string"),
        ({"vocab_size": "abc"}, "vocab_size: got 'abc', expected an integer from 1 to 2147483647"),
        ({"vocab_size": -5}, "vocab_size: got -5"),
        ({"vocab_size": 1e400}, "vocab_size: got inf"),
        ({"eod": 2.5}, "eod: got 2.5, expected an integer from 0 to 499"),
        ({"eod": 500}, "eod: got 500, expected an integer from 0 to 499"),
        ({"eod": True}, "eod: got True"),
        ({"documents": float("nan")}, "documents: got nan, expected an integer of at least 0"),
        ({"tokens": 10**30}, "tokens: got 1000000"),
        ({"fingerprint": "x"}, "fingerprint: got 'x', expected an object"),
        ({"fingerprint": {"version": 1, "tokens": 3, "probe": "0" * 64}}, "fingerprint tokens: got 3, expected a string"),
        ({"fingerprint": {"version": 1, "tokens": "0" * 63, "probe": "0" * 64}}, "fingerprint tokens: got '0000"),
        ({"sums": []}, r"sums: got \[\], expected an object"),
        ({"sums": {"piece_bytes": 3}}, "sums piece_bytes: got 3, expected an integer from 67108864 to 67108864"),
    ],
)
def test_fields_of_another_kind_are_named(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "c.meta.json").write_text(json.dumps(META | changes))
    with pytest.raises(DataError, match=rf"c\.meta\.json {words}"):
        read_meta(tmp_path / "c")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda file: file.pop("bytes"), r"sums \.bin bytes: got no such field"),
        (lambda file: file.update(bytes=10**12), r"sums \.bin sha256: got 1 sums, expected 14902, a sum for each"),
        (lambda file: file.update(sha256=["x"]), r"sums \.bin sha256: got 'x', expected sums of 64 hexadecimal digits"),
        (lambda file: file.update(sha256=[1]), r"sums \.bin sha256: got \[1\], expected an array of strings"),
        (lambda file: file.update(sha256=[]), r"sums \.bin sha256: got 0 sums, expected 1"),
    ],
)
def test_damaged_sums_are_named(change: Callable[[dict[str, Any]], object], words: str, tmp_path: Path) -> None:
    write_dataset(tmp_path / "c")
    content = json.loads((tmp_path / "c.meta.json").read_text())
    change(content["sums"][".bin"])
    (tmp_path / "c.meta.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=words):
        verify_dataset(str(tmp_path / "c"))


def test_a_read_that_gave_less_than_was_asked_for_is_gone_on_with(tmp_path: Path) -> None:
    """Network file systems do that. What follows begins inside a page."""
    (tmp_path / "file").write_bytes(bytes(100_000))
    with (tmp_path / "file").open("rb") as file:
        assert list(absent_ranges(file.fileno(), 17, 1000)) == []


def test_machines_that_share_a_disk_share_the_work(tmp_path: Path) -> None:
    """One with other files reads them all; ranks that read nothing count for nobody."""
    write_dataset(tmp_path / "c")
    for suffix in (".bin", ".idx", ".meta.json"):
        shutil.copy2(tmp_path / f"c{suffix}", tmp_path / f"copy{suffix}")
    shared, own = seen_files([str(tmp_path / "c")]), seen_files([str(tmp_path / "copy")])
    seen = [shared, "", own, "", shared, ""]
    assert [share_of(rank, seen) for rank in (0, 2, 4)] == [(0, 2), (0, 1), (1, 2)]


COPIED = (".bin", ".idx", ".meta.json")


def see_own_copy(machine: int, folder: Path) -> None:
    disk = folder / "disk"
    subprocess.run(["mount", "-t", "tmpfs", "own", str(disk)], check=True)
    for suffix in COPIED:
        shutil.copy2(folder / f"c{suffix}", disk / f"c{suffix}")
    status = [os.stat(disk / f"c{suffix}") for suffix in COPIED]
    numbers = [(found.st_ino, found.st_size, found.st_mtime_ns) for found in status]
    (folder / f"seen-{machine}").write_text(json.dumps([seen_files([str(disk / "c")]), numbers]))


def test_copies_on_disks_of_each_machine_are_no_shared_disk(tmp_path: Path) -> None:
    """``cp -p`` onto fresh file systems gives them inodes and times alike: each machine reads all of its own."""
    write_dataset(tmp_path / "c")
    (tmp_path / "disk").mkdir()
    machines = [Machine(name, {"eth0": [f"10.0.0.{number}/24"]}, "127.0.0.1 localhost\n") for number, name in enumerate("ab", 1)]
    run_on(machines, partial(see_own_copy, folder=tmp_path), tmp_path)
    (seen_a, numbers_a), (seen_b, numbers_b) = (json.loads((tmp_path / f"seen-{machine}").read_text()) for machine in range(2))
    assert numbers_a == numbers_b
    assert [share_of(rank, [seen_a, seen_b]) for rank in range(2)] == [(0, 1), (0, 1)]


@pytest.mark.parametrize(
    ("kind", "same_inode", "other_inode"),
    [
        *((kind, True, False) for kind in ("nfs4", "lustre", "gpfs", "cifs", "ceph", "beegfs", "9p", "afs", "wekafs")),
        *((kind, True, True) for kind in ("fuse", "fuse.gcsfuse", "fuse.juicefs")),
        *((kind, False, False) for kind in ("ext4", "xfs", "tmpfs", "overlay", "fuseblk", "fuse.bindfs", "unheard-of", None)),
    ],
)
def test_only_file_systems_of_a_network_are_shared(
    kind: str | None, same_inode: bool, other_inode: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second inode is that of a file with size and time of the first, in its place."""
    path = tmp_path / "c.bin"
    path.write_bytes(bytes(100))
    status = path.stat()
    table = tmp_path / "mountinfo"
    number = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    table.write_text(f"1 0 0:0 / /proc rw - proc proc rw\n2 0 {number} /x /y z rw shared:3 - {kind} server:/x rw\n" if kind else "")
    seen = []
    for name in ("a", "b", "b"):
        monkeypatch.setattr(mounts, "machine_name", lambda name=name: name)
        seen.append(mounts.file_identity(str(path), table))
        if len(seen) == 2:
            path.rename(tmp_path / "kept")  # so that its inode is not given again
            path.write_bytes(bytes(100))
            os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    assert (seen[0] == seen[1], seen[0] == seen[2]) == (same_inode, other_inode)
