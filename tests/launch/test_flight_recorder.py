"""What torch's flight recorder says of a hang: numbers, sizes, and who is missing. ``comm/test_watch.py`` has real ranks that hang."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_llama.launch import flight_recorder
from megatron_llama.launch.flight_recorder import GroupNotes, Issued, decode, encode, stuck_collectives, summarize
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.watch import read_within

from tests.harness import Cluster


def reduce_in_a_group(place: Place) -> tuple[list[GroupNotes], list[GroupNotes]]:
    """The notes before and after two collectives on a group of three ranks."""
    group = dist.new_group([0, 1, 2], group_desc="triple")
    before = flight_recorder.read()
    dist.all_reduce(torch.zeros(5, 2), group=group)
    dist.broadcast(torch.zeros(3, dtype=torch.bfloat16), src=0, group=group)
    after = read_within(60.0, 60.0)
    end = time.monotonic() + 60.0
    # A thread of gloo marks a collective a moment after it is done, and on a busy machine the second before the first.
    while any(notes.description == "triple" and notes.pending for notes in after) and time.monotonic() < end:
        after = read_within(60.0, 60.0)
    dist.destroy_process_group(group)
    return before, after


def test_what_a_rank_has_issued(cluster: Cluster) -> None:
    for before, after in cluster.run(3, reduce_in_a_group):
        assert "triple" not in {notes.description for notes in before}
        [notes] = [notes for notes in after if notes.description == "triple"]
        assert (notes.ranks, notes.done, notes.pending) == ((0, 1, 2), Issued(2, "broadcast", "BFloat16 3"), None)
        assert decode(encode(after)) == after


@pytest.mark.parametrize("given", [{"TORCH_FR_BUFFER_SIZE": "0"}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}])
def test_a_user_may_turn_it_off(given: dict[str, str]) -> None:
    environ = dict(given)
    flight_recorder.turn_on(environ)
    assert environ == given


def entry(number: int, state: str, *, retired: bool, operation: str = "nccl:all_gather", is_p2p: bool = False, pg_id: int = 3) -> dict[str, Any]:
    """As NCCL writes them: several inputs may travel together."""
    sizes = {"input_sizes": [[8], [4]], "input_dtypes": ["Float", "Float"], "output_sizes": [[16]], "output_dtypes": ["Float"]}
    place = {"collective_seq_id": number, "is_p2p": is_p2p, "process_group": ["7", "dp"], "profiling_name": operation, "pg_id": pg_id}
    return {**sizes, **place, "record_id": number, "state": state, "retired": retired}


def test_what_is_done_and_what_is_not() -> None:
    """The watchdog of NCCL retires what is completed a moment later; messages between two ranks have numbers of their own."""
    entries = [
        entry(5, "scheduled", retired=False),
        entry(4, "started", retired=False),
        entry(3, "completed", retired=False),
        entry(2, "completed", retired=True),
        entry(9, "started", retired=False, operation="nccl:send 0->1", is_p2p=True),
        entry(1, "scheduled", retired=True, operation="gloo:all_reduce"),
    ]
    sizes = "Float 8 and others to Float 16"
    assert summarize({"entries": entries}, {"7": (0, 1)}) == [
        GroupNotes("7 gloo", "dp", (0, 1), Issued(1, "all_reduce", sizes), None),
        GroupNotes("7 nccl", "dp", (0, 1), Issued(3, "all_gather", sizes), Issued(4, "all_gather", sizes)),
    ]
    assert summarize({}, {}) == []  # a build without NCCL, or a recorder that is turned off


def test_a_group_is_not_taken_for_an_older_one_of_its_name() -> None:
    """Names are numbers that begin anew when torch.distributed is initialized again; what is recorded stays."""
    older = [entry(number, "scheduled", retired=number < 3, pg_id=2) | {"record_id": number} for number in (1, 2, 3)]
    newer = [entry(1, "scheduled", retired=True, pg_id=5) | {"record_id": 4}]
    [notes] = summarize({"entries": [*newer, *older]}, {"7": (0, 1)})
    assert notes.done is not None and (notes.done.number, notes.pending) == (1, None)


def on(group: str, done: int, pending: int | None, operation: str = "all_reduce", ranks: tuple[int, ...] = (0, 1, 2, 3)) -> GroupNotes:
    begun = None if pending is None else Issued(pending, operation, "Float 8")
    return GroupNotes(group, group, ranks, Issued(done, "broadcast", "Float 8"), begun)


def test_who_is_where() -> None:
    notes = {0: [on("dp", 4, 5)], 1: [on("dp", 4, 5, "all_gather")], 2: [on("dp", 6, 7)]}
    assert stuck_collectives(notes) == [
        "collective 5 of dp does not end: rank 0 in all_reduce of Float 8, rank 1 in all_gather of Float 8, rank 2 behind it, "
        "nothing is known of rank 3; these do not fit together"
    ]
    assert stuck_collectives({0: [on("dp", 0, 1)], 1: [], 2: [on("dp", 1, None)], 3: []}) == [
        "collective 1 of dp does not end: rank 0 in all_reduce of Float 8, not ranks 1, 3 (nothing yet), rank 2 behind it"
    ]
    assert stuck_collectives({0: [on("dp", 4, None)], 1: []}) == []
    many = [on(f"group {i}", 1, 2, ranks=(0,)) for i in range(9)]
    assert stuck_collectives({0: many})[-1] == "3 more collectives do not end"


def test_a_recorder_that_does_not_answer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace_json", lambda *_: time.sleep(3.0), raising=False)
    assert read_within(0.1, 60.0) == []


HOLDS_THE_INTERPRETER = """
import ctypes, torch, torch.distributed as dist
from megatron_llama.launch.watch import read_within
libc = ctypes.PyDLL(None)  # unlike CDLL it keeps the interpreter while it calls
torch._C._distributed_c10d._dump_fr_trace_json = lambda *_: libc.sleep(600)
read_within(0.1, 1.0)
"""


@pytest.mark.long
def test_a_recorder_that_keeps_the_interpreter_ends_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", HOLDS_THE_INTERPRETER], timeout=120, capture_output=True, text=True)
    assert ended.returncode == 1 and "Timeout (0:00:01)!" in ended.stderr and "in read_within" in ended.stderr
