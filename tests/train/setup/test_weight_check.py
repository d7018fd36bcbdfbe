"""Files of weights that a list beside them names are compared while a run goes on: who reads which, who waits, and what is kept."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast
from unittest.mock import patch

import pytest
import torch
from megatron_llama.checkpoint import listed_files
from megatron_llama.engine.mesh import Axis
from megatron_llama.errors import CheckpointError
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.metrics.log import MetricLog
from megatron_llama.train.run.prefetch import Interrupts
from megatron_llama.train.setup import weight_check
from megatron_llama.train.setup.weight_check import WeightCheck, begin_weight_check, share_of

from tests.harness import Cluster
from tests.parallel.cases import Layout


def world_of(place: Place) -> Axis:
    return build_mesh(Layout(dp=2).sized(), rank=place.rank, world_size=place.world_size, device=torch.device("cpu")).world


def listed(folder: Path, files: Mapping[str, bytes]) -> Path:
    """A folder of files with the list of their sums."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "SHA256SUMS").write_text("".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in files.items()))
    return folder


def test_nothing_is_begun_where_another_rank_cannot_begin(cluster: Cluster, tmp_path: Path) -> None:
    """Nobody would end it: the process would hash all files before it is gone."""
    good = listed(tmp_path / "good", {f"consolidated.0{number}.pth": bytes(1000) for number in range(4)})
    bad = listed(tmp_path / "bad", {"consolidated.00.pth": b""})
    with (bad / "SHA256SUMS").open("a") as file:
        file.write(f"{'0' * 64}  consolidated.00.pth\n")
    found = cluster.run(2, begins, [good, bad])
    assert [said for said, _ in found] == [f"rank 1: {bad}/SHA256SUMS: got two sums of consolidated.00.pth, expected one; remove the line that is wrong"] * 2
    assert [started for _, started in found] == [0, 0]


def begins(place: Place, folders: list[Path]) -> tuple[str, int]:
    """What is raised on this rank, and how many threads were started."""
    world = world_of(place)
    with patch.object(listed_files, "thread_pool", wraps=listed_files.thread_pool) as pool, pytest.raises(CheckpointError) as error:
        begin_weight_check(folders[place.rank], world)
    return str(error.value), pool.call_count


def test_what_is_queued_is_not_read_after_the_end(tmp_path: Path) -> None:
    folder = listed(tmp_path, {f"consolidated.0{number}.pth": b"x" for number in range(8)})
    begun: list[Path] = []

    def slow(path: Path, kind: str, stopped: threading.Event) -> str:
        begun.append(path)
        stopped.wait()
        return ""

    with patch.object(listed_files, "file_sum", slow), listed_files.ListedFilesCheck(folder, workers=2) as check:
        while len(begun) < 2:
            time.sleep(0.01)
        assert not check.is_done(0) and check.problem is None
    assert len(begun) == 2 and check.problem is None, "damage is neither found nor made up"


def test_ranks_meet_while_one_of_them_reads_a_large_file(cluster: Cluster, tmp_path: Path) -> None:
    """A collective waits for minutes at most, and 140 GB take longer."""
    folder = listed(tmp_path, {"consolidated.00.pth": b"damaged", "consolidated.01.pth": b"sound"})
    (folder / "consolidated.00.pth").write_bytes(b"Damaged")
    (said, met), (other, _) = cluster.run(2, reads_slowly, folder)
    assert met >= 5
    assert said == other and f"{folder}/consolidated.00.pth: got sha256 " in said


def reads_slowly(place: Place, folder: Path) -> tuple[str, int]:
    """What is raised on this rank, and how often it has met the others."""
    hashed = listed_files.file_sum

    def slow(path: Path, kind: str, stopped: threading.Event) -> str:
        if place.rank == 0:
            time.sleep(1.0)
        return hashed(path, kind, stopped)

    world = world_of(place)
    with (
        patch.object(listed_files, "file_sum", slow),
        patch.object(weight_check, "MEETING_SECONDS", 0.1),
        patch.object(weight_check, "all_reduce_max", wraps=weight_check.all_reduce_max) as meetings,
        begin_weight_check(folder, world) as check,pytest.raises(CheckpointError) as error
    ):
        check.require()
    return str(error.value), meetings.call_count


def test_what_the_run_does_not_read_is_not_compared(tmp_path: Path) -> None:
    """Downloads have the weights in Meta's format, too, or in that of another program."""
    folder = listed(tmp_path, {"model.safetensors": b"x", "original/consolidated.00.pth": b"y", "consolidated.00.pth": b"y", "model.gguf": b"z"})
    for other in ("original/consolidated.00.pth", "consolidated.00.pth", "model.gguf"):
        (folder / other).write_bytes(b"damaged")
    world = world_of(Place(0, 1, 0))
    with patch.object(listed_files, "file_sum", wraps=listed_files.file_sum) as hashed, begin_weight_check(folder, world) as check:
        check.require()
    assert [call.args[0] for call in hashed.call_args_list] == [folder / "model.safetensors"]


def test_machines_that_share_a_disk_share_the_files(cluster: Cluster, tmp_path: Path) -> None:
    """Each of two machines reads half of a disk of the network, and all of a copy of its own."""
    folder = listed(tmp_path, {f"consolidated.0{number}.pth": bytes(9 - number) for number in range(4)})
    names = [f"consolidated.0{number}.pth" for number in range(4)]
    assert cluster.run(2, compares, folder, ["server", "server"]) == [names[::2], names[1::2]]
    assert cluster.run(2, compares, folder, ["a", "b"]) == [names, names]


def compares(place: Place, folder: Path, disks: list[str]) -> list[str]:
    """Which files the only process of this machine has compared."""
    alone = Place(place.rank, place.world_size, 0, local_world_size=1)
    world = world_of(place)
    with (
        patch.object(weight_check, "place_from_environment", lambda: alone),
        patch.object(weight_check, "file_identity", lambda name: f"{disks[place.rank]} {name}"),
        patch.object(listed_files, "file_sum", wraps=listed_files.file_sum) as hashed,
        begin_weight_check(folder, world) as check,
    ):
        check.require()
    return sorted(call.args[0].name for call in hashed.call_args_list)


def test_the_shares_of_a_thousand_machines() -> None:
    """Each file is read once; the first, which are the largest, by machines of their own."""
    seen = [("server", rank % 8) for rank in range(8000)]
    shares = [share_of(rank, seen) for rank in range(0, 8000, 97)]
    assert {count for _, count in shares} == {8000} and len({share for share, _ in shares}) == len(shares)
    assert [share_of(8 * machine, seen)[0] for machine in range(0, 1000, 99)] == [*range(0, 1000, 99)]
    seen[5] = ("its own disk", 5)
    assert share_of(5, seen) == (0, 1) and share_of(6, seen)[1] == 7999


class Lines:
    """What a log is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.told: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    def event(self, what: str, *, words: str) -> None:
        self.told.append(f" warning: {words}")


@pytest.fixture
def reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[WeightCheck, threading.Event]]:
    """A check of two files, the second of which is damaged and is read when the event is set."""
    folder = listed(tmp_path / "weights", {"consolidated.00.pth": b"sound", "consolidated.01.pth": b"soun"})
    (folder / "consolidated.01.pth").write_bytes(b"soon")
    goes_on = threading.Event()
    hashed = listed_files.file_sum

    def slow(path: Path, kind: str, stopped: threading.Event) -> str:
        while path.name == "consolidated.01.pth" and not goes_on.wait(0.01) and not stopped.is_set():
            pass
        return hashed(path, kind, stopped)

    monkeypatch.setattr(listed_files, "file_sum", slow)
    monkeypatch.setattr(weight_check, "WEIGHT_CHECK_SECONDS", 0.5)
    with begin_weight_check(folder, world_of(Place(0, 1, 0))) as check:
        yield check, goes_on


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of every wait for the files."""
    seconds: list[float] = []
    is_done = listed_files.ListedFilesCheck.is_done

    def recording(check: listed_files.ListedFilesCheck, timeout: float) -> bool:
        seconds.append(timeout)
        return is_done(check, timeout)

    monkeypatch.setattr(listed_files.ListedFilesCheck, "is_done", recording)
    return seconds


def test_a_save_waits_once_and_not_for_ever(reading: tuple[WeightCheck, threading.Event], waits: list[float], tmp_path: Path) -> None:
    """What is found later ends the run, and its error names what was saved meanwhile and is there."""
    check, goes_on = reading
    log = Lines()
    for iteration in range(3):
        check.wait_before_save(cast(MetricLog, log), lambda: False, stopping=False)
        if iteration == 0:
            assert 0 < sum(waits) <= 0.5 * len(waits)
            waits.clear()
        check.remember_save(tmp_path / f"iter_{iteration}")
    (tmp_path / "iter_1").mkdir()
    assert waits and not any(waits)
    folder = tmp_path / "weights"
    assert log.said == log.told == [
        f" warning: 1 file of the weights in {folder}, 0.0 GiB, is not compared with {folder}/SHA256SUMS yet, so what the run keeps now may have "
        "begun with damaged weights; the comparison goes on, and damage ends the run"
    ]
    assert check.problem is None
    goes_on.set()
    with pytest.raises(CheckpointError) as error:
        check.wait_at_end(cast(MetricLog, log), lambda: False, stopped=False)
    assert f"{folder}/consolidated.01.pth: got sha256 " in str(error.value)
    names = f"remove it: {tmp_path}/iter_1, {tmp_path}/iter_2"
    assert str(error.value).endswith(f"what this run has saved meanwhile began with these weights; {names}"), "the first was removed, the last is coming"


def test_a_stop_waits_for_nothing(reading: tuple[WeightCheck, threading.Event], waits: list[float], tmp_path: Path) -> None:
    check, _ = reading
    log = Lines()
    check.wait_before_save(cast(MetricLog, log), lambda: False, stopping=True)
    assert not check.wait_at_end(cast(MetricLog, log), lambda: False, stopped=True)
    assert waits and not any(waits)
    assert len(log.said) == 1 and "it ends without comparing the rest, and exports nothing: compare the files" in log.said[0]


@pytest.mark.long
@pytest.mark.parametrize("at", ["save", "end"])
def test_a_signal_ends_the_wait(at: str, reading: tuple[WeightCheck, threading.Event], monkeypatch: pytest.MonkeyPatch) -> None:
    check, _ = reading
    log = Lines()
    monkeypatch.setattr(weight_check, "WEIGHT_CHECK_SECONDS", 60.0)
    with Interrupts() as interrupts:
        interrupts.listen()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        if at == "save":
            check.wait_before_save(cast(MetricLog, log), lambda: interrupts.stopped_by is not None, stopping=False)
        else:
            assert not check.wait_at_end(cast(MetricLog, log), lambda: interrupts.stopped_by is not None, stopped=False)
        assert interrupts.stopped_by == signal.SIGTERM
    assert len(log.said) == 1


def test_a_sound_folder_is_waited_for_at_the_end(reading: tuple[WeightCheck, threading.Event], tmp_path: Path) -> None:
    check, goes_on = reading
    (tmp_path / "weights" / "consolidated.01.pth").write_bytes(b"soun")
    log = Lines()
    threading.Timer(0.3, goes_on.set).start()
    assert check.wait_at_end(cast(MetricLog, log), lambda: False, stopped=False) and log.said == []
