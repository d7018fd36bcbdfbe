"""What a step of ``shard`` costs: bytes that arrive on the sockets of the ranks, as the kernel counts them, and memory."""

from __future__ import annotations

import gc
import os
import socket
import stat
import struct
from collections.abc import Callable, Mapping
from typing import Any

import megatron_llama as ml
import pytest
import torch
import torch.distributed as dist
from megatron_llama.launch.launcher import Place
from torch.nn.parallel import DistributedDataParallel

from tests.engine.shard.training import CLIP, Run, adamw, built
from tests.engine.shard.twins import LlamaDecoderLayer, llama
from tests.harness import Cluster
from tests.parallel.cases import STRATEGIES

PARAMS, LAYERS = "optim_grads_params", 6
RECEIVED = 128
"""Where ``bytes_received`` stands in Linux's ``struct tcp_info``."""


def deep_llama() -> torch.nn.Module:
    return llama(num_hidden_layers=LAYERS)


def arrived() -> int:
    """Bytes that have come in on all TCP connections of this process, those of connections that are closed left out."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        if not os.path.exists(f"/proc/self/fd/{name}") or not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
            continue
        with socket.socket(fileno=os.dup(int(name))) as one:
            if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
                information = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", information, RECEIVED)[0]
    return total


def sum_of(value: int) -> int:
    """Over all ranks. Nobody goes on before all have come here."""
    tensor = torch.tensor(value)
    dist.all_reduce(tensor)
    return int(tensor)


def bytes_of_steps(place: Place, run: Run, options: Mapping[str, Any] | None) -> float:
    """Bytes on the wire in a step, all ranks together, in the mean of those from the third on. With DDP if there are no options."""
    model = built(deep_llama, place.rank)
    if options is None:
        called: Any = DistributedDataParallel(model)
        optimizer: Any = adamw(model)
    else:
        called = model
        optimizer = ml.shard(model, units=[LlamaDecoderLayer], clip=run.clip, microbatches=run.microbatches, **options)
    marks = []
    for step in range(run.steps):
        parts = run.parts(place.rank, step)
        for number, part in enumerate(parts):
            called.require_backward_grad_sync = number == len(parts) - 1
            loss = run.twin.loss(called, part) / run.microbatches
            if step in (2, run.steps - 1) and number == 0:
                # All that this forward pass needed has come, and nothing else is on its way.
                marks.append(sum_of(arrived()))
            loss.backward()
        optimizer.step()
        if options is None:
            optimizer.zero_grad()
    if options is not None:
        optimizer.close()
    return (marks[1] - marks[0]) / (run.steps - 3)


def elements(run: Run, options: Mapping[str, Any]) -> int:
    """What the least of messages is made of, in elements of collectives: a reduction of a gradient, or a gather of a parameter. An all-reduce
    is both. With few slots a layer is gathered for each pass, but those that the pass before has left in the slots."""
    model = deep_llama()
    total = sum(parameter.numel() for parameter in model.parameters())
    layer = sum(p.numel() for name, p in model.named_parameters() if ".layers.0." in name and p.dim() > 1)
    strategy, slots = options["strategy"], options.get("param_slots", 2)
    reductions = run.microbatches if strategy in ("optim_grads", PARAMS) else 1
    if strategy != PARAMS or slots == "all":
        return total * (reductions + 1)
    passes = 2 * run.microbatches
    return total * reductions + total - LAYERS * layer + layer * (LAYERS * passes - slots * (passes - 1))


CASES: list[tuple[Run, dict[str, Any]]] = [
    *((Run(dp=2, microbatches=2, clip=CLIP, steps=6), {"strategy": strategy}) for strategy in STRATEGIES),
    *((Run(dp=2, microbatches=m, steps=6), {"strategy": PARAMS, "param_slots": s}) for m, s in ((1, 2), (1, 3), (2, 3), (1, "all"))),
    *((Run(dp=4, steps=6), {"strategy": strategy}) for strategy in ("no_shard", PARAMS)),
]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"dp{case[0].dp} {case[0].microbatches} microbatches {list(case[1].values())}")
def test_no_strategy_sends_more_than_it_must(case: tuple[Run, dict[str, Any]], cluster: Cluster) -> None:
    """At least the minimum, and not a hundredth more: each message has a header, and buckets are filled up."""
    run, options = case
    least = 4 * (run.dp - 1) * elements(run, options)
    found = cluster.run(run.dp, bytes_of_steps, run, options)
    assert len(set(found)) == 1 and least <= found[0] <= 1.01 * least, found[0] / least


def test_replicas_send_what_ddp_sends(cluster: Cluster) -> None:
    """So the sockets count everything: DDP's bytes are known."""
    run = Run(dp=2, microbatches=2, steps=6)
    least = 4 * elements(run, {"strategy": "no_shard"})
    for options in (None, {"strategy": "no_shard"}):
        [found, _] = cluster.run(2, bytes_of_steps, run, options)
        assert least <= found <= 1.01 * least, (options, found / least)


def allocated_in(step: Callable[[], object]) -> tuple[int, int]:
    """Bytes that the thread that computes has allocated and not freed when a step ends, and the most of them at any moment of it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return live, peak


def held() -> int:
    """Bytes of all tensors that Python knows in this process."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in (each.untyped_storage() for each in tensors)}.values())


def memory_of_steps(place: Place, strategy: str | None) -> tuple[list[tuple[int, int]], list[int]]:
    """Of the third to the fifth step: what they allocate, and what is held after each. Without a strategy: of forward and backward alone."""
    run = Run(microbatches=2, clip=CLIP)
    model = built(deep_llama, place.rank)
    optimizer: Any = None
    if strategy is not None:
        optimizer = ml.shard(model, units=[LlamaDecoderLayer], clip=run.clip, microbatches=2, strategy=strategy)
    allocated, after = [], []
    parts = run.parts(place.rank, 0)

    def step() -> None:
        for part in parts:
            run.twin.loss(model, part).backward()  # type: ignore[no-untyped-call]
        if optimizer is not None:
            optimizer.step()

    for number in range(5):
        if number < 2:
            step()
        else:
            allocated.append(allocated_in(step))
            after.append(held())
    if optimizer is not None:
        optimizer.close()
    return allocated, after


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_step_after_the_second_allocates(strategy: str, cluster: Cluster) -> None:
    """Steps end with what they began with, and their peaks are equal to the byte, and no higher than those of a plain model that has its
    gradients already."""
    [plain, _] = cluster.run(2, memory_of_steps, None)
    for found, held_after in cluster.run(2, memory_of_steps, strategy):
        assert len(set(held_after)) == 1, held_after
        # A step's results are numbers of no dim, which live until the next ones.
        assert all(abs(left) <= 64 for left, _ in found), found
        assert len({peak for _, peak in found}) == 1 and found[0][1] <= plain[0][-1][1], (found, plain)
