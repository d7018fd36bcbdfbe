"""A process of the doctor's trial. It meets the others as in a run and sums a tensor with them, and
rank 0 prints the speed. ``trials.py`` starts it under torchrun."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from megatron_llama.engine.comm import device as devices
from megatron_llama.launch.join import join_launched
from megatron_llama.launch.launcher import launched_rank

NUMEL = 4 << 20
"""Elements of the tensor, in fp32: 16 MiB."""
ROUNDS = 3


def main() -> None:
    """Exchange, and print the speed, or why it failed, which none of the many lines of torchrun's
    own report says."""
    try:
        _exchange()
    except Exception as error:
        print(f"rank {launched_rank()}: {type(error).__name__}: {error}", flush=True)
        sys.exit(1)


def _exchange() -> None:
    """Sum a tensor with the other processes. Raises RuntimeError for a wrong sum."""
    device, _ = join_launched(None)
    ranks = dist.get_world_size()
    slowest = 0.0
    for _ in range(ROUNDS):
        values = torch.full((NUMEL,), float(dist.get_rank() + 1), device=device)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(values)
        devices.synchronize(device)
        slowest = max(slowest, time.perf_counter() - start)
        expected = ranks * (ranks + 1) / 2
        if not bool((values == expected).all()):
            raise RuntimeError(f"all_reduce of {ranks} ranks: got {values}, expected {expected}")
    if dist.get_rank() == 0:
        rate = NUMEL * 4 / slowest / 1e9
        print(f"exchange over {dist.get_backend()}: all-reduce of 16 MiB at {rate:.2f} GB/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
