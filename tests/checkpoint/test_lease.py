"""Who writes into a folder: several starts at once, holders here, elsewhere and gone. ``tests/e2e/test_lease.py`` has whole runs."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from megatron_llama.checkpoint import checkpoint_dir, native
from megatron_llama.checkpoint import lease as leases
from megatron_llama.checkpoint.checkpoint_dir import Retention
from megatron_llama.checkpoint.folders import fresh_staging
from megatron_llama.checkpoint.lease import Held, Holder, Lease, leasing
from megatron_llama.checkpoint.saver import Saver
from megatron_llama.config.schema import CheckpointConfig
from megatron_llama.distributed.axes import Mesh
from megatron_llama.distributed.processes import Process, process_of, this_process
from megatron_llama.errors import CheckpointError, LeaseError

from tests.checkpoint.cases import SINGLE, state_at, trained
from tests.harness import PRELOAD
from tests.parallel.cases import Layout

WORLD = Mesh.single().world
STARTS = 8


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def plant(folder: Path, process: Process, number: int = 1) -> Path:
    """The lease of a process."""
    folder.mkdir(exist_ok=True)
    path = folder / f"lease.{number}.json"
    path.write_bytes(Holder("theirs", process, "Slurm job 7", "pretrain", "yesterday").content(0))
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
    for name, seconds in {"RENEW_SECONDS": 0.02, "PERIOD_SECONDS": 0.5, "MEETING_SECONDS": 0.02, "STORE_PERIOD_SECONDS": 0.5}.items():
        monkeypatch.setattr(leases, name, seconds)


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


@pytest.mark.parametrize("before", ["nobody", "one that is gone"])
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
                file.write(Holder("theirs", replace(this_process(), boot="another"), "Slurm job 7", "pretrain", "yesterday").content(count))
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
    monkeypatch.setattr(leases, "PERIOD_SECONDS", 120.0)
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
    assert told == [""]


def stolen(folder: Path) -> Held:
    """Take the folder for another run, which removes what was left there and begins a save."""
    plant(folder, this_process(), 2)
    checkpoint_dir.tidy(folder)
    theirs = Held(folder, 2, Holder("7fe", this_process(), "", "pretrain", "now"))
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
    monkeypatch.setattr(leases, "PERIOD_SECONDS", 120.0)
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
