"""How fast bus and host of a machine with a GPU are, for the bounds."""

from __future__ import annotations

import time

import torch

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.worker import Task
from megatron_llama.engine.offload.pinned_buffer import PinnedBuffer
from megatron_llama.engine.offload.worker import HostWorker, rank_cores
from megatron_llama.engine.options import UpdateOptions
from megatron_llama.engine.rules.update_rule import adamw_step

SAMPLE = 1 << 26
"""Elements that are copied and updated: more than caches hold."""
TIMES = 3


def bus_seconds(device: torch.device) -> float:
    """For four bytes in one direction, the slower one."""
    buffer, slowest = (
        PinnedBuffer(SAMPLE, torch.float32, device, "a sample"),
        0.0,
    )  # pinned as long as it lives
    there = torch.empty(SAMPLE, device=device)
    here = buffer.take(SAMPLE)
    for target, source in ((here, there), (there, here)):
        target.copy_(source, non_blocking=True)
        begin = devices.timed_event(device)
        for _ in range(TIMES):
            target.copy_(source, non_blocking=True)
        end = devices.timed_event(device)
        devices.synchronize(device)
        slowest = max(slowest, begin.elapsed_time(end) / 1e3)
    return slowest / TIMES / SAMPLE


def update_seconds(cores: str) -> float:
    """For one element, on the processors of --offload-cores."""
    chosen = rank_cores(cores, 0, 1)
    worker = HostWorker(chosen, len(chosen))
    found = list[float]()

    def measure() -> None:
        master, grad, first, second = (torch.zeros(SAMPLE) for _ in range(4))
        state = {"exp_avg": first, "exp_avg_sq": second, "step": torch.zeros(())}
        one = torch.ones(())
        for _ in range(TIMES):
            begin = time.perf_counter()
            adamw_step(
                master,
                grad,
                state,
                UpdateOptions(),
                decay=0.0,
                scale=one,
                skip=torch.zeros(()),
                lr=1e-3,
            )
            found.append(time.perf_counter() - begin)

    job = Task(measure)
    worker.put(job, priority=0)
    job.wait()
    worker.close()
    return min(found) / SAMPLE
