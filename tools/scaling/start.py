"""A start: how the ranks find each other through the one store of a job, the groups that each
makes, and what they tell each other before the first step."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

# Registers torch's backend without messages.
import torch.testing._internal.distributed.fake_pg as fake

from megatron_llama.config.schema import Config, ModelConfig, ParallelConfig
from megatron_llama.launch import network, rendezvous
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.launch.open_files import OTHERS, PER_RANK
from megatron_llama.train.setup.communicators import most_communicators, total_bytes
from tools.scaling.rows import COMPUTED, MEASURED, Row
from tools.scaling.store import PATIENCE, Counted, request_seconds

RANKS_OF_A_MACHINE = 8
OBJECTS = 4
"""Messages of Python values before the first step (``tests/train/api/test_start_messages.py``)."""
SHAPE = ModelConfig(
    vocab_size=128256,
    hidden_size=16384,
    intermediate_size=53248,
    num_hidden_layers=126,
    num_attention_heads=128,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)
"""LLaMA 3.1 405B."""
PARALLEL = ParallelConfig(
    tensor_model_parallel_size=8,
    pipeline_model_parallel_size=16,
    data_parallel_sharding_strategy="optim",
)


def start(world: int) -> list[Row]:
    """Return what the steps of a start cost."""
    return [*_rendezvous(world), *_interface(world), *_groups(world), *_agreements(world)]


class Answering(Counted):
    """The store as rank 0 sees it while the others come: as soon as rank 0 has answered a rank's
    number, that rank reads it and says that it is there."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self._numbers = {f"number {rank}": rank for rank in range(1, world)}
        for number, rank in self._numbers.items():
            self.store.set(rendezvous._hello(rank), number)
            self.requests[rank] += 1

    def set(self, key: str, value: str) -> None:
        self.requests[0] += 1
        self.store.set(key, value)
        if key in self._numbers:
            rank = self._numbers[key]
            self.store.set(rendezvous._here(value, rank), "")
            self.requests[rank] += 3  # it waits, reads, and says so


def _rendezvous(world: int) -> list[Row]:
    store = Answering(world)
    begun = time.perf_counter()
    rendezvous._answer_all(
        store,  # type: ignore[arg-type]
        "attempt",
        range(1, world),
        time.monotonic() + 600.0,
    )
    host = time.perf_counter() - begun
    served = store.requests.total() * request_seconds()
    first, second = store.requests[0], store.requests[1]
    connections = PER_RANK * world
    return [
        Row("start", "a request to the store", "all", request_seconds(), None, MEASURED),
        Row("start", f"rendezvous: {first} requests", "rank 0", host, None, MEASURED),
        Row("start", f"rendezvous: {second} requests each", "others", None, None, MEASURED),
        Row("start", "rendezvous: the store answers all", "all", served, None, COMPUTED),
        Row("start", f"{connections:,} connections to the store", "its host", None, None, COMPUTED),
        Row("start", f"ulimit -n {connections + OTHERS}", "its host", None, None, COMPUTED),
    ]


def _interface(world: int) -> list[Row]:
    """The agreement of several machines on an interface: one value of each rank, twice."""
    store = Counted()
    machines = [f"10.0.{rank // RANKS_OF_A_MACHINE // 250}.1" for rank in range(world)]
    for rank in range(1, world):
        store.store.set(f"source/{rank}", json.dumps(machines[rank]))
    begun = time.perf_counter()
    network._agreed(
        store,  # type: ignore[arg-type]
        Place(0, world, 0),
        "source",
        machines[0],
        network._other_machine,
    )
    host = 2 * (time.perf_counter() - begun)
    read = 2 * sum(len(json.dumps(machine)) for machine in machines)
    served = 2 * 3 * world * request_seconds()
    return [
        Row("start", "interface: values of all", "rank 0", host, read, MEASURED),
        Row("start", "interface: the store answers all", "all", served, None, COMPUTED),
    ]


def _groups(world: int) -> list[Row]:
    """The process groups of a layout, with torch's own functions and no messages."""
    groups = PARALLEL.tensor_model_parallel_size * PARALLEL.pipeline_model_parallel_size
    parallel = PARALLEL if world % groups == 0 else ParallelConfig()
    config = Config(model=SHAPE, parallel=parallel)
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=world)
    try:
        begun = time.perf_counter()
        build_mesh(config, rank=0, world_size=world, device=torch.device("cpu"))
        seconds = time.perf_counter() - begun
    finally:
        dist.destroy_process_group()
    axes = most_communicators(config, world)
    count = sum(axis.count for axis in axes)
    memory = total_bytes(axes)
    exchanged = world * count * 2 * request_seconds()
    return [
        Row("start", "process groups of all lines", "each", seconds, None, MEASURED),
        Row("start", f"{count} NCCL communicators", "each", None, None, COMPUTED, memory),
        Row("start", "their ids through the store", "all", exchanged, None, COMPUTED),
    ]


def _agreements(world: int) -> list[Row]:
    """Messages over all ranks. gloo passes them on from rank to rank: an all-reduce of one number
    and an all-gather of values, which are two of tensors, both 2 (n - 1) times. What a pass takes
    is measured on two processes of this machine, as long as it takes in a fast network."""
    times = _times()
    one = times["one"] * (world - 1)
    gather = times["gather"] + times["one"] * (world - 2)
    return [
        Row("start", "a message of values, two ranks", "all", times["gather"], None, MEASURED),
        Row("start", f"{OBJECTS} messages of values", "all", OBJECTS * gather, None, COMPUTED),
        Row("step", "agreement, two ranks", "all", times["one"], None, MEASURED),
        Row("step", "agreement, hidden behind the step", "all", one, None, COMPUTED),
    ]


@cache
def _times() -> dict[str, float]:
    """Return the seconds of each message between two processes."""
    with TemporaryDirectory() as folder:
        spawn = multiprocessing.get_context("spawn")
        children = [
            spawn.Process(target=_be_rank, args=(Path(folder), rank, 2), daemon=True)
            for rank in range(2)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join()
        times: dict[str, float] = json.loads((Path(folder) / "times").read_text())
    return times


def _be_rank(folder: Path, rank: int, size: int) -> None:
    """Be one of the processes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=PATIENCE
    )
    value = torch.tensor(0)
    values: list[Any] = [None] * size
    times = {
        "gather": _median(lambda: dist.all_gather_object(values, (None, rank)), 50),
        "one": _median(lambda: dist.all_reduce(value, dist.ReduceOp.MAX), 200),
    }
    if rank == 0:
        (folder / "times").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def _median(message: Callable[[], object], count: int) -> float:
    seconds = []
    for _ in range(count):
        begun = time.perf_counter()
        message()
        seconds.append(time.perf_counter() - begun)
    return sorted(seconds)[count // 2]
