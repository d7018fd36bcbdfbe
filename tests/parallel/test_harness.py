"""The worker pool reports every way in which a job can fail, and goes on."""

from __future__ import annotations

import multiprocessing
import os
import threading

import pytest
import torch
import torch.distributed as dist
from megatron_llama.launch.launcher import Place

from tests.harness import Cluster, WorkerError


def total(place: Place, factor: int) -> tuple[int, float]:
    value = torch.tensor(float(place.rank * factor))
    dist.all_reduce(value)
    return os.getpid(), value.item()


class Kept:
    """What somebody keeps beyond a job."""

    groups: list[object] = []


def keep_groups(place: Place) -> None:
    for _ in range(5):
        group = dist.new_group()
        dist.all_reduce(torch.zeros(1), group=group)
        Kept.groups.append(group)


def one_raises(place: Place) -> None:
    if place.rank == 1:
        raise ValueError("rank one has had enough")
    dist.all_reduce(torch.zeros(1))


def one_dies(place: Place) -> None:
    if place.rank == 2:
        os._exit(17)
    dist.all_reduce(torch.zeros(1))


def not_picklable(place: Place) -> object:
    return threading.Lock()


def one_hangs(place: Place) -> None:
    if place.rank == 0:
        threading.Event().wait()


class NeverJoins:
    """When it comes to a worker, rank 2 dies, so that the others cannot join it."""

    def __reduce__(self) -> tuple[object, ...]:
        return fail_to_join, ()


def fail_to_join() -> None:
    if multiprocessing.current_process().name == "rank 2":
        os._exit(17)

    def refused(*args: object, **options: object) -> None:
        torch.distributed.distributed_c10d._new_process_group_helper = helper
        raise RuntimeError("Connection closed by peer")

    helper = torch.distributed.distributed_c10d._new_process_group_helper
    torch.distributed.distributed_c10d._new_process_group_helper = refused


def test_workers_are_reused_and_groups_are_fresh(cluster: Cluster) -> None:
    first = cluster.run(8, total, 2)
    second = cluster.run(3, total, 5)
    assert [value for _, value in first] == [56.0] * 8
    assert [value for _, value in second] == [15.0] * 3
    assert [pid for pid, _ in second] == [pid for pid, _ in first][:3]


def test_a_worker_whose_groups_somebody_keeps_is_replaced(cluster: Cluster) -> None:
    """Their threads would take the processors from all tests that follow."""
    before = [pid for pid, _ in cluster.run(2, total, 1)]
    cluster.run(2, keep_groups)
    after = [pid for pid, _ in cluster.run(2, total, 1)]
    assert not set(before) & set(after)
    assert [pid for pid, _ in cluster.run(2, total, 1)] == after


def test_exception_comes_back_with_its_traceback(cluster: Cluster) -> None:
    story = r"(?s)one_raises failed on 2 of 2.*--- rank 1:.*in one_raises.*rank one has had enough.*--- rank 0"
    with pytest.raises(WorkerError, match=story):
        cluster.run(2, one_raises)
    assert cluster.run(2, total, 1)[0][1] == 1.0


def test_dead_worker_is_named_and_replaced(cluster: Cluster) -> None:
    with pytest.raises(WorkerError, match=r"rank 2: died with exit code 17"):
        cluster.run(3, one_dies)
    assert cluster.run(3, total, 1)[0][1] == 3.0


def test_workers_that_could_not_join_a_dead_one_serve_again(cluster: Cluster) -> None:
    """As on a loaded machine, where one is gone before the others have connected."""
    with pytest.raises(WorkerError, match=r"(?s)total failed on 3 of 3.*rank 2: died with exit code 17"):
        cluster.run(3, total, NeverJoins())
    assert cluster.run(3, total, 1, timeout=30.0)[0][1] == 3.0


@pytest.mark.long
def test_hanging_worker_is_named_and_replaced(cluster: Cluster) -> None:
    with pytest.raises(WorkerError, match=r"one_hangs failed on 1 of 2.*\n--- rank 0: did not come back in time"):
        cluster.run(2, one_hangs, timeout=3.0)
    assert cluster.run(2, total, 1)[0][1] == 1.0


def test_result_that_cannot_be_sent_is_explained(cluster: Cluster) -> None:
    with pytest.raises(WorkerError, match=r"(?s)not_picklable failed on 1 of 1.*cannot pickle"):
        cluster.run(1, not_picklable)
