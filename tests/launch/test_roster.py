"""Who trains after a meeting, and what is retriable."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from megatron_llama.errors import CheckpointError, ConfigError, DataError, LostRankError, TrainingError
from megatron_llama.launch.roster import Arrival, Member, Roster, cause, reason, seats
from megatron_llama.launch.verdict import Verdict, verdict_of_error, verdict_of_status, with_report
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError  # type: ignore[attr-defined]


def machine(name: str, first: int, slots: range | tuple[int, ...], faults: int = 0) -> list[Member]:
    return [Member(first + slot, name, slot, faults) for slot in slots]


def machines_of(members: list[Member], count: int, group: int) -> list[tuple[str, int]]:
    """Machine and slot by rank, after what each place says of itself has been looked at."""
    found = seats(members, count, group, "node0", 1)
    by_rank = {seat.place.rank: (member, seat) for member in members if (seat := found.get(member.rank)) is not None}
    assert sorted(by_rank) == list(range(count)) and len(found) == count
    for member, seat in by_rank.values():
        place = seat.place
        there = [rank for rank, (other, _) in by_rank.items() if other.machine == member.machine]
        assert (place.world_size, place.local_world_size) == (count, len(there))
        assert place.rank - place.local_rank == min(there), "ranks of a machine are neighbours"
        assert seat.slots[place.local_rank] == member.slot
    return [(by_rank[rank][0].machine, by_rank[rank][0].slot) for rank in range(count)]


def test_ranks_are_counted_machine_by_machine() -> None:
    members = machine("a", 0, range(2)) + machine("b", 2, range(2))
    assert machines_of(members, 4, 1) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_a_machine_that_has_lost_a_rank_is_spare_first() -> None:
    members = machine("a", 0, range(4)) + machine("b", 4, (0, 1, 3)) + machine("c", 8, range(4))
    assert machines_of(members, 8, 4) == [*(("a", slot) for slot in range(4)), *(("c", slot) for slot in range(4))]


def test_a_device_with_faults_is_spare_first() -> None:
    members = machine("a", 0, (0,), faults=1) + machine("a", 0, (1, 2))
    assert machines_of(members, 2, 1) == [("a", 1), ("a", 2)]


def test_a_group_spans_machines_last() -> None:
    """Of 7 and 8 ranks 12 train in groups of 4: the machine of the store comes first, and takes part with whole groups."""
    members = machine("a", 0, (0, 1, 2, 3, 5, 6, 7)) + machine("b", 8, range(8))
    assert machines_of(members, 12, 4) == [*(("a", slot) for slot in range(4)), *(("b", slot) for slot in range(8))]


def test_a_roster_is_what_was_written() -> None:
    roster = Roster(tuple(machine("a", 0, range(2))), 2, ("rank 1: was killed by SIGKILL",), (3,), "")
    assert Roster.read(roster.text().encode()) == roster


def test_the_rank_to_blame_is_named() -> None:
    one, two, three = machine("a", 0, range(3))
    follows, fault, final = Arrival(one, Verdict("follows")), Arrival(two, Verdict("fault")), Arrival(three, Verdict("final"))
    assert cause([follows, fault, final]) == final and cause([follows, fault]) == fault and cause([follows]) == follows
    assert cause([Arrival(one, Verdict("waited")), Arrival(two, Verdict("done"))]) is None
    assert Arrival.read(fault.line()) == fault
    killed = Arrival(two, Verdict("fault", "was killed by SIGKILL"))
    assert reason(killed, ()) == "rank 1: was killed by SIGKILL"
    assert reason(killed, (2, 3)) == "rank 1: was killed by SIGKILL; no sign of rank 2, 3"
    assert reason(follows, (2,)) == reason(None, (2,)) == "no sign of rank 2"


def fail(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), "fault"),
        (RuntimeError("CUDA error: uncorrectable NVLink error detected during the execution"), "fault"),
        (DistBackendError("NCCL error in ProcessGroupNCCL.cpp: ncclRemoteError"), "follows"),
        (RuntimeError("NCCL error: ncclSystemError: System call failed"), "follows"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"), "follows"),
        (DistNetworkError("Connection reset by peer"), "follows"),
        (DistStoreError("wait timeout"), "follows"),
        (ConnectionResetError(104, "Connection reset by peer"), "follows"),
        (LostRankError("rank 1: got no answer"), "follows"),
        (torch.OutOfMemoryError("CUDA out of memory"), "final"),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), "final"),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), "final"),
        (ConfigError("--lr: ECC"), "final"),
        (DataError("x: Connection reset"), "final"),
        (CheckpointError("x"), "final"),
        (TrainingError("the loss is nan"), "final"),
        (ValueError("gloo"), "final"),
        (KeyboardInterrupt(), "stopped"),
    ],
    ids=lambda value: str(value) or "interrupt",
)
def test_only_faults_of_machines_begin_again(error: BaseException, kind: str) -> None:
    """A process reports its error itself."""
    assert verdict_of_error(error).kind == kind
    reading, writing = os.pipe()
    with pytest.raises(type(error)):
        with_report(writing, lambda: fail(error))
    with os.fdopen(reading, "rb") as pipe:
        assert verdict_of_status(1 << 8, pipe.read()).kind == kind


def test_long_words_of_an_error_are_cut() -> None:
    reading, writing = os.pipe()
    with pytest.raises(ValueError):
        with_report(writing, lambda: fail(ValueError("ü" * 1_000_000)))
    with os.fdopen(reading, "rb") as pipe:
        assert len(verdict_of_status(1 << 8, pipe.read()).words) == 2000


def test_what_comes_behind_a_run_is_no_part_of_it() -> None:
    reading, writing = os.pipe()
    assert with_report(writing, lambda: 143) == 143
    with os.fdopen(reading, "rb") as pipe:
        assert verdict_of_status(int(signal.SIGSEGV), pipe.read()) == Verdict("done", status=143)


def test_a_process_without_a_report_is_judged_by_its_end() -> None:
    assert verdict_of_status(int(signal.SIGKILL), b"") == Verdict("fault", "was killed by SIGKILL")
    assert verdict_of_status(1 << 8, b"").kind == "follows", "its watch has ended it"
    assert verdict_of_status(0, b"").kind == "final", "a program that ends in the midst of its run"
