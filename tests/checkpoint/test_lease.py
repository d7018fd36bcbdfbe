"""Who writes into a folder: several starts at once, holders here, elsewhere and gone. ``tests/e2e/test_lease.py`` has whole runs."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from megatron_llama.checkpoint import checkpoint_dir, native
from megatron_llama.checkpoint import lease as leases
from megatron_llama.checkpoint.checkpoint_dir import Retention
from megatron_llama.checkpoint.folders import fresh_staging
from megatron_llama.checkpoint.lease import Held, Holder, Lease, Pace, leasing
from megatron_llama.checkpoint.saver import Saver
from megatron_llama.config.schema import CheckpointConfig
from megatron_llama.engine.mesh import Mesh
from megatron_llama.errors import CheckpointError, LeaseError
from megatron_llama.launch.processes import Process, process_of, this_process
from megatron_llama.metrics.log import MetricLog

from tests.checkpoint.cases import SINGLE, state_at, trained
from tests.harness import PRELOAD
from tests.parallel.cases import Layout

WORLD = Mesh.single().world
STARTS = 8


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def plant(folder: Path, process: Process, number: int = 1, count: int = 1) -> Path:
    """The lease of a process, renewed so often."""
    folder.mkdir(exist_ok=True)
    path = folder / f"lease.{number}.json"
    path.write_bytes(Holder("theirs", process, "Slurm job 7", "pretrain", "yesterday", 0.5).content(count))
    return path


def ended() -> Process:
    """A process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = process_of(child.pid)
    child.communicate()
    assert process is not None
    return process


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Periods of parts of a second."""
    for name in ("DISK", "STORE"):
        monkeypatch.setattr(leases, name, Pace(0.02, 0.5))
    monkeypatch.setattr(leases, "MEETING_SECONDS", 0.02)
    monkeypatch.setattr(leases, "CHECK_PAUSES", (0.01,) * 4)


def take(folder: str, barrier: Barrier, answers: SimpleQueue[str]) -> None:
    """What one of several starts does, and that it stays until all have seen it."""
    with leasing(folder) as lease:
        barrier.wait()
        try:
            lease.take(WORLD)
            answers.put("taken")
        except LeaseError as error:
            answers.put(str(error))
        barrier.wait()


@pytest.mark.few(1)
@pytest.mark.parametrize("before", ["one that is gone", "nobody"])
def test_of_several_starts_at_once_exactly_one_goes_on(before: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    if before != "nobody":
        plant(folder, ended(), 3)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "tests.checkpoint.test_lease"])
    barrier, answers = context.Barrier(STARTS), context.SimpleQueue()
    starts = [context.Process(target=take, args=(str(folder), barrier, answers)) for _ in range(STARTS)]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    said = [answers.get() for _ in starts]
    assert said.count("taken") == 1, said
    assert all("got a run that writes there (process " in words for words in said if words != "taken"), said
    assert not folder.exists() or files(folder) == []


def test_a_holder_that_runs_here_is_named_and_one_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    plant(tmp_path, this_process())
    with leasing(str(tmp_path)) as lease, pytest.raises(LeaseError) as caught:
        lease.take(WORLD)
    words = f"--save {tmp_path}: got a run that writes there ({this_process()}, since yesterday, Slurm job 7), expected a folder"
    assert str(caught.value).startswith(words)
    assert files(tmp_path) == ["lease.1.json"], "a start that is refused leaves the folder as it was"
    plant(tmp_path, replace(this_process(), start=1))  # an earlier process of the same number
    with leasing(str(tmp_path)) as lease:
        lease.take(WORLD)
        assert files(tmp_path) == ["lease.2.json"] and lease.notes == []
    assert files(tmp_path) == []


@pytest.mark.parametrize("field", ["boot", "namespace"])
def test_a_holder_elsewhere_is_gone_when_its_count_stands_still(field: str, hasty: None, tmp_path: Path) -> None:
    """Though a process of its number runs here: on another machine, or in another container of this one, it means nothing."""
    plant(tmp_path, replace(this_process(), **{field: "another"}))
    with leasing(str(tmp_path)) as lease:
        lease.take(WORLD)
        assert [note.endswith(", which gave no sign for 0.5 s") for note in lease.notes] == [True]


def test_a_holder_elsewhere_whose_count_goes_on_is_there(hasty: None, tmp_path: Path) -> None:
    path = plant(tmp_path, replace(this_process(), boot="another"))
    over = threading.Event()

    def renew() -> None:
        for count in range(1, 1000):
            with path.open("r+b") as file:
                file.write(Holder("theirs", replace(this_process(), boot="another"), "Slurm job 7", "pretrain", "yesterday", 0.5).content(count))
            if over.wait(0.1):
                return

    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        with leasing(str(tmp_path)) as lease, pytest.raises(LeaseError, match="got a run that writes there"):
            lease.take(WORLD)
    finally:
        over.set()
        renewing.join()


@pytest.mark.few(4)
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"process": {}}', b"\xff", b'{"id": 1, "process": {"host": 1}}', b"[" * 100_000])
def test_a_lease_that_nobody_can_read_counts_while_it_changes(content: bytes, hasty: None, tmp_path: Path) -> None:
    (tmp_path / "lease.1.json").write_bytes(content)
    with leasing(str(tmp_path)) as lease:
        lease.take(WORLD)
        assert "which names nobody, which gave no sign" in lease.notes[0]


@pytest.fixture
def first(hasty: None, tmp_path: Path) -> Iterator[Lease]:
    """A run that writes into ``tmp_path``."""
    with leasing(str(tmp_path)) as lease:
        lease.take(WORLD)
        yield lease


def test_whoever_is_taken_over_learns_who_did_it(first: Lease, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(leases, "DISK", Pace(0.02, 120.0))
    told: list[str] = []
    first.tell_loss(told.append)
    first.require()
    with leasing(str(tmp_path), steal=True) as thief:
        start = time.monotonic()
        thief.take(WORLD)
        assert time.monotonic() - start < 60.0, "the first one has not said that it has seen it"
        assert first.is_lost and files(tmp_path) == ["lease.2.json"]
        with pytest.raises(LeaseError, match=rf"got taken over by {this_process()}, since .*, with --steal-save or because"):
            first.require()
        assert [words.startswith(f"--save {tmp_path}: got taken over by ") for words in told] == [True]
        first.release()
        thief.require()
    assert files(tmp_path) == []


@pytest.mark.parametrize("how", ["removed", "another start has come and gone"])
def test_a_lease_that_is_not_there_is_lost(how: str, first: Lease, tmp_path: Path) -> None:
    (tmp_path / "lease.1.json").unlink()
    if how != "removed":
        plant(tmp_path, this_process())  # which counts anew
    with pytest.raises(LeaseError, match="expected this run alone to write there"):
        first.require()
    first.release()
    assert files(tmp_path) == ([] if how == "removed" else ["lease.1.json"]), "what is not its own stays"


def test_a_count_is_renewed_in_place(first: Lease, tmp_path: Path) -> None:
    path = tmp_path / "lease.1.json"
    inode, size, before = path.stat().st_ino, path.stat().st_size, path.read_bytes()
    while path.read_bytes() == before:
        first.require()
    assert (path.stat().st_ino, path.stat().st_size) == (inode, size)


def hold(folder: str, replaces: bool, connection: Connection) -> None:
    """Hold a folder as a process of another machine, where no file can be written over. Not ``replaces``: nor replaced."""
    capabilities, version = bytes(24), 0x20080522
    assert ctypes.CDLL(None).capset(struct.pack("Ii", version, 0), capabilities) == 0, "root writes what nobody may write"
    os.umask(0o222)
    with pytest.MonkeyPatch.context() as patch, leasing(folder) as lease:
        patch.setattr(leases, "this_process", lambda: replace(this_process(), boot="another"))
        patch.setattr(leases, "DISK", Pace(0.02, 120.0))
        if not replaces:
            patch.setattr(os, "replace", lambda *_: os.rmdir("/proc/self"))  # which is refused
        lease.take(WORLD)
        connection.send(lease.notes)
        connection.recv()
        try:
            lease.require()
            connection.send("held")
        except LeaseError as error:
            connection.send(str(error))


@contextmanager
def holding(folder: Path, *, replaces: bool) -> Iterator[Connection]:
    """A section beside a process that holds a folder."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "tests.checkpoint.test_lease"])
    here, there = context.Pipe()
    process = context.Process(target=hold, args=(str(folder), replaces, there))
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join()


def test_where_no_file_can_be_written_over_the_count_goes_on(hasty: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(leases, "DISK", Pace(0.02, 120.0))
    with holding(tmp_path, replaces=True) as holder:
        assert holder.recv() == []
        assert Holder.was_renewed((tmp_path / "lease.1.json").read_bytes())
        with leasing(str(tmp_path)) as second, pytest.raises(LeaseError, match="got a run that writes there"):
            second.take(WORLD)
        holder.send("look")
        assert holder.recv() == "held"
    assert files(tmp_path) == []


def test_where_no_file_can_be_renewed_only_steal_save_takes_the_folder(hasty: None, tmp_path: Path) -> None:
    with holding(tmp_path, replaces=False) as holder:
        [note] = holder.recv()
        assert note.startswith(f"warning: --save {tmp_path} is not guarded: lease.1.json can neither be written over nor replaced there")
        path = tmp_path / "lease.1.json"
        content = path.read_bytes().replace(b'"period": 120.0', b'"period": 0.5')
        path.write_bytes(content)  # or this test would wait for two minutes
        with leasing(str(tmp_path)) as second, pytest.raises(LeaseError, match="got a run that may still write there, for its file was never "):
            second.take(WORLD)
        # The holder tries to renew it all the time: what it cannot put there is a draft until it is gone.
        assert [name for name in files(tmp_path) if not name.endswith(".draft")] == ["lease.1.json"] and path.read_bytes() == content
        with leasing(str(tmp_path), steal=True) as thief:
            thief.take(WORLD)
            holder.send("look")
            assert "got taken over by" in holder.recv()
            thief.require()


def test_a_count_is_renewed_while_the_folder_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in (str(tmp_path / "disk"), f"file://{tmp_path}/store"):
        with leasing(folder) as lease:
            lease.take(WORLD)
            assert lease.held is not None and Holder.was_renewed(lease.held.path.read_bytes())


def drawn(folder: Path, period: float) -> Held:
    """A lease that nobody renews."""
    path = plant(folder, this_process())
    holder = Holder.read(path.read_bytes())
    assert holder is not None
    return Held(folder, 1, replace(holder, period=period))


def test_a_file_that_is_gone_or_anothers_is_not_brought_back(tmp_path: Path) -> None:
    held = drawn(tmp_path, 120.0)
    held.path.unlink()
    with pytest.raises(FileNotFoundError):
        leases._write_and_rename(held, b"mine")
    assert files(tmp_path) == []
    held.path.write_bytes(b"theirs")
    with pytest.raises(FileNotFoundError):
        leases._write_and_rename(held, b"mine")
    assert held.path.read_bytes() == b"theirs" and files(tmp_path) == ["lease.1.json"]


def test_a_run_that_was_stopped_before_it_replaced_its_file_gives_it_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another start may have come and gone meanwhile."""
    held = drawn(tmp_path, 60.0)
    clock = iter([0.0, 61.0])
    monkeypatch.setattr(leases.time, "monotonic", lambda: next(clock))
    leases._write_and_rename(held, b"mine")
    assert files(tmp_path) == []


def test_renewals_that_fail_are_told_once(first: Lease, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed, goes_on = threading.Semaphore(0), threading.Semaphore(0)

    def fail(*_: object) -> int:
        failed.release()
        goes_on.acquire()
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(leases, "_newest", fail)
    said = []
    for _ in range(3 * leases.WARN_FAILURES):
        failed.acquire()
        said.append(capsys.readouterr().out)  # of the renewals before this one
        goes_on.release()
    monkeypatch.undo()
    goes_on.release(1_000)
    first.release()
    words = "could not be renewed 3 times in a row (OSError: [Errno 116] Stale file handle); after 0.5 s a start on another machine"
    assert [line for line in said if line] == [f" warning: --save {tmp_path}: lease.1.json {words} may take the folder over\n"]
    assert not any(said[: leases.WARN_FAILURES]), "of one or two nobody hears"


@pytest.mark.parametrize(
    ("kind", "period"),
    [("ext4", 15.0), ("nfs4", 15.0), ("fuse", 300.0), ("fuse.gcsfuse", 300.0), ("virtiofs", 300.0)],
)
def test_a_mount_that_shows_late_what_others_write_has_a_long_period(
    kind: str, period: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    # Other mounts are no matter, and neither are fields that only some lines have.
    mounts.write_text(
        "22 27 0:0 / /proc rw,relatime - fuse proc rw\n"
        f"28 27 {os.major(device)}:{os.minor(device)} / /run\\040s rw,noatime shared:7 master:1 - {kind} bucket - rw\n"
    )
    monkeypatch.setattr(leases, "MOUNTS", mounts)
    with leasing(str(tmp_path / "run")) as lease:
        lease.take(WORLD)
        assert lease.held is not None and lease.held.holder.period == period
        assert leases._pace(tmp_path) == (leases.DISK if period == 15.0 else leases.STORE)
    mounts.unlink()
    assert leases._pace(tmp_path) == leases.DISK, "without a list of mounts"


def test_the_longer_period_of_two_machines_counts(hasty: None, tmp_path: Path) -> None:
    """One mounts the folder, and the other has it on its disk."""
    path = plant(tmp_path, replace(this_process(), boot="another"))
    path.write_bytes(path.read_bytes().replace(b'"period": 0.5', b'"period": 0.75'))
    with leasing(str(tmp_path)) as lease:
        lease.take(WORLD)
        assert lease.notes[0].endswith(", which gave no sign for 0.75 s")


@pytest.mark.parametrize("period", ["0", "-1", "1e300", "NaN", "null", '"soon"'])
def test_a_lease_with_a_period_that_none_has_names_nobody(period: str, tmp_path: Path) -> None:
    content = plant(tmp_path, this_process()).read_bytes()
    assert Holder.read(content) is not None
    assert Holder.read(content.replace(b'"period": 0.5', f'"period": {period}'.encode())) is None


def test_folders_that_were_made_for_nothing_go(tmp_path: Path) -> None:
    with leasing(str(tmp_path / "a" / "b")) as lease:
        lease.take(WORLD)
        assert files(tmp_path / "a" / "b") == ["lease.1.json"]
    assert files(tmp_path) == []
    with leasing(str(tmp_path / "a" / "b")) as lease:
        lease.take(WORLD)
        (tmp_path / "a" / "b" / "log.jsonl").touch()
    assert files(tmp_path / "a" / "b") == ["log.jsonl"]


def test_an_object_store_has_leases_too(hasty: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(leases, "SETTLE_SECONDS", 0.01)
    url = f"file://{tmp_path}/run"
    with leasing(url) as lease:
        lease.take(WORLD)
        with leasing(url) as second, pytest.raises(LeaseError, match=f"process {os.getpid()} on "):
            second.take(WORLD)
        with leasing(url, steal=True) as thief:
            thief.take(WORLD)
            with pytest.raises(LeaseError, match="taken over by"):
                lease.require()
    assert files(tmp_path / "run") == []


NO_LINKS = [errno.EPERM, errno.EINVAL, errno.EXDEV, errno.ENOTSUP, errno.ENOSYS, 524]
"""What file systems without links say; the last one is the kernel's ENOTSUPP, which has no name outside of it."""


@pytest.mark.parametrize("number", NO_LINKS)
def test_a_file_system_without_links_has_leases_too(number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    with leasing(str(tmp_path)) as lease:
        lease.take(WORLD)
        lease.require()
        assert files(tmp_path) == ["lease.1.json"]
        with leasing(str(tmp_path)) as second, pytest.raises(LeaseError, match=f"process {os.getpid()} on "):
            second.take(WORLD)


def test_a_link_whose_answer_was_lost_is_a_lease(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    link = os.link

    def link_and_fail(*paths: Path) -> None:
        link(*paths)
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    monkeypatch.setattr(os, "link", link_and_fail)
    with leasing(str(tmp_path)) as lease:
        lease.take(WORLD)
        assert files(tmp_path) == ["lease.1.json"]


def test_a_folder_that_vanishes_while_it_is_looked_at_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another start made it, was refused, and removed what it had made for nothing."""
    folder = tmp_path / "run"
    look, vanished = leases._read, []

    def remove_once(place: Path, number: int) -> bytes:
        if not vanished:
            vanished.append(place.rmdir())
        return look(place, number)

    monkeypatch.setattr(leases, "_read", remove_once)
    with leasing(str(folder)) as lease:
        lease.take(WORLD)
        assert files(folder) == ["lease.1.json"]
    assert not folder.exists()


def test_a_run_whose_folder_was_taken_before_it_began_to_log_hears_of_it(first: Lease, tmp_path: Path) -> None:
    plant(tmp_path, this_process(), 2)
    with pytest.raises(LeaseError):
        first.require()
    told: list[str] = []
    first.tell_loss(told.append)
    assert told == [""]


def test_a_run_hears_of_its_loss_also_where_the_other_lease_cannot_be_read(first: Lease, tmp_path: Path) -> None:
    told: list[str] = []
    first.tell_loss(told.append)
    (tmp_path / "lease.2.json").mkdir()
    deadline = time.monotonic() + 60.0
    while not first.is_lost:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [words.startswith(f"--save {tmp_path}: got taken over by lease.2.json, which names nobody, with ") for words in told] == [True]
    with pytest.raises(LeaseError, match=r"taken over by lease\.2\.json"):
        first.require()


def stolen(folder: Path) -> Held:
    """Take the folder for another run, which removes what was left there and begins a save."""
    plant(folder, this_process(), 2)
    checkpoint_dir.tidy(folder)
    theirs = Held(folder, 2, Holder("7fe", this_process(), "", "pretrain", "now", 0.5))
    (fresh_staging(checkpoint_dir.checkpoint_path(folder, 3), theirs.run) / "half").touch()
    return theirs


def test_a_run_that_was_stopped_between_check_and_rename_publishes_nothing_of_another(
    first: Lease, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both are at the same iteration."""
    publish = native.publish

    def stop_and_publish(target: Path, run: str) -> None:
        stolen(tmp_path)
        publish(target, run)

    monkeypatch.setattr(native, "publish", stop_and_publish)
    run = trained(SINGLE, Layout(), steps=0)
    with pytest.raises(CheckpointError):
        native.save(tmp_path, run.optimizer, run.mesh, state_at(3), Layout().config(), held=first.held)
    assert files(tmp_path / "iter_0000003.7fe.incomplete") == ["half"]
    assert not list(tmp_path.glob("iter_*[0-9]")) and not list(tmp_path.glob("iter_*.replaced"))


def test_a_run_whose_folder_was_taken_while_it_loaded_removes_nothing(first: Lease, tmp_path: Path) -> None:
    theirs = stolen(tmp_path)
    run = trained(SINGLE, Layout(), steps=0)
    config = replace(Layout().config(), checkpoint=CheckpointConfig(save=str(tmp_path)))
    with pytest.raises(LeaseError, match="taken over by"):
        Saver(config, run.mesh, run.optimizer, None, lease=first)
    assert files(tmp_path / f"iter_0000003.{theirs.run}.incomplete") == ["half"]


def test_a_run_whose_folder_was_taken_removes_no_old_checkpoint(first: Lease, tmp_path: Path) -> None:
    """The other run may be loading it."""
    for iteration in (1, 2, 3):
        path = checkpoint_dir.checkpoint_path(tmp_path, iteration)
        path.mkdir()
        for file in (".metadata", "meta.json"):
            (path / file).write_text("{}")
    assert first.held is not None
    stolen(tmp_path)
    with pytest.raises(LeaseError):
        checkpoint_dir.retain(tmp_path, Retention(newest=1), first.held)
    assert list(checkpoint_dir.complete(tmp_path)) == [1, 2, 3]


def test_of_two_starts_in_an_object_store_the_last_one_written_goes_on(hasty: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first has looked, has seen none, and finds another one in its place when it reads it back."""
    wait = time.sleep

    def overwrite(seconds: float) -> None:
        if seconds == leases.SETTLE_SECONDS:
            plant(tmp_path / "run", this_process())
        else:
            wait(seconds)

    monkeypatch.setattr(leases.time, "sleep", overwrite)
    with leasing(f"file://{tmp_path}/run") as lease, pytest.raises(LeaseError, match="since yesterday, Slurm job 7"):
        lease.take(WORLD)
    assert files(tmp_path / "run") == ["lease.1.json"]


def test_a_start_that_steals_waits_until_the_other_has_gone(hasty: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is waited for is its file, whose removal is the last that it does there."""
    monkeypatch.setattr(leases, "DISK", Pace(0.02, 120.0))
    theirs = plant(tmp_path, this_process())
    with leasing(str(tmp_path), steal=True) as lease:
        taking = lease._taking(str(tmp_path))
        assert [next(taking, None) for _ in range(3)] == [True] * 3 and files(tmp_path) == ["lease.1.json", "lease.2.json"]
        theirs.unlink()
        assert next(taking, None) is None and files(tmp_path) == ["lease.2.json"]


def test_a_start_between_two_others_finds_the_one_that_counts_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While it writes the next number, the holder leaves and another start takes the first one."""
    plant(tmp_path, ended(), 3)
    write = leases._write_new

    def write_late(own: Held) -> bool:
        if own.number == 4:
            (tmp_path / "lease.3.json").unlink()
            plant(tmp_path, this_process())
        return write(own)

    monkeypatch.setattr(leases, "_write_new", write_late)
    with leasing(str(tmp_path)) as lease, pytest.raises(LeaseError, match="since yesterday, Slurm job 7"):
        lease.take(WORLD)
    assert files(tmp_path) == ["lease.1.json"]


def test_a_file_system_that_fails_for_a_moment_ends_no_lease(first: Lease, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Clients of object stores have errors of their own."""
    failed = threading.Event()

    def fail(*_: object) -> int:
        failed.set()
        raise RuntimeError("503 Slow Down")

    with monkeypatch.context() as failing:
        failing.setattr(leases, "_newest", fail)
        assert failed.wait(60.0)
    path = tmp_path / "lease.1.json"
    before = path.read_bytes()
    deadline = time.monotonic() + 60.0
    while path.read_bytes() == before:
        assert time.monotonic() < deadline, "it is renewed again"
    first.require()
    monkeypatch.setattr(leases, "_read", fail)
    first.release()
    monkeypatch.undo()


class Failing:
    """A file system of which some looks into a folder fail in this thread, and those of the renewals do not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        self._look, self._thread = leases._numbers, threading.current_thread()
        monkeypatch.setattr(leases, "_numbers", self._fail_or_look)

    def _fail_or_look(self, folder: Path) -> list[int]:
        if self.times and threading.current_thread() is self._thread:
            self.times -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return self._look(folder)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    return Failing(monkeypatch)


def test_a_check_that_fails_is_made_again(first: Lease, failing: Failing) -> None:
    failing.times = 3
    first.require()
    assert failing.times == 0
    failing.times = 1_000
    with pytest.raises(CheckpointError, match=os.strerror(errno.ESTALE)) as caught:
        first.require()
    assert not isinstance(caught.value, LeaseError) and not first.is_lost


def test_a_file_that_is_missing_for_a_moment_is_looked_for_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As while it is replaced, where that takes two steps."""
    path = plant(tmp_path, this_process())
    holder = Holder.read(path.read_bytes())
    assert holder is not None
    aside = path.rename(tmp_path / "aside")
    monkeypatch.setattr(leases.time, "sleep", lambda _: aside.exists() and aside.rename(path))
    Held(tmp_path, 1, holder).require()


def test_another_start_is_seen_at_the_first_look(first: Lease, failing: Failing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(tmp_path, this_process(), 2)
    monkeypatch.setattr(leases, "CHECK_PAUSES", (3600.0,))
    with pytest.raises(LeaseError, match="taken over by"):
        first.require()


@pytest.mark.parametrize("taken", [False, True])
def test_of_a_run_whose_saves_succeed_only_another_start_is_the_end(taken: bool, first: Lease, failing: Failing, tmp_path: Path) -> None:
    run = trained(SINGLE, Layout(), steps=0)
    config = replace(Layout().config(), checkpoint=CheckpointConfig(save=str(tmp_path)))
    saver = Saver(config, run.mesh, run.optimizer, None, lease=first)
    with MetricLog(None, prints=False, start_iteration=0, train_iters=4, progress_bar=False) as log:
        saver.save(state_at(3), log)
        if taken:
            plant(tmp_path, this_process(), 2)
            with pytest.raises(LeaseError, match="taken over by"):
                saver.finish(log)
        else:
            failing.times = 1_000
            saver.finish(log)
            assert failing.times < 1_000, "it was asked"
            failing.times = 0
            saver.save(state_at(4), log)
    assert list(checkpoint_dir.complete(tmp_path)) == ([3] if taken else [3, 4])
