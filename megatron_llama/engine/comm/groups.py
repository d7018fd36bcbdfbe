"""The process groups of this process, their first messages, and their end."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.mesh import Axis

SCALARS = 1
"""Thread blocks of a GPU for messages of a few bytes, as all that goes over all ranks is: more only
keep buffers that nothing fills."""


def present_groups() -> tuple[dist.ProcessGroup, ...]:
    """Return the process groups to which this process belongs, in the order of their creation."""
    return tuple(dist.distributed_c10d._world.pg_map)


def leave_group(*, abort: bool = False, kept: Collection[dist.ProcessGroup] = ()) -> None:
    """Leave the process group, if this process has joined it; with ``kept`` groups, all others. On
    a device that waits for everything that has been issued, so all ranks must have issued it:
    ``abort``, for a rank that leaves alone, waits for nothing."""
    if not dist.is_initialized():
        return
    if kept:
        for group in present_groups():
            if group in kept:
                continue
            if abort:
                dist.distributed_c10d._abort_process_group(group)
            else:
                dist.destroy_process_group(group)
    elif abort:
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def close_mesh() -> None:
    """Leave the process group. Call it when no variable holds a Mesh any more."""
    leave_group()
    # A group's threads end when the last reference to it goes. Reference cycles (a runtime holds
    # its own methods) would keep groups until the interpreter shuts down, and a gloo thread that
    # then frees a tensor aborts the process.
    gc.collect()


def communicator_options(
    device: torch.device, timeout: timedelta, *, urgent: bool, max_ctas: int = 0
) -> Any:
    """Return NCCL's options for a process group; None where it is not NCCL's. ``max_ctas`` is the
    most thread blocks of its kernels, each on a multiprocessor; 0: as many as NCCL takes."""
    if devices.is_host(device) or devices.sends_nothing():
        return None
    # A kernel of a stream with high priority starts before the waiting kernels of other streams. So
    # the compute stream does not hold up a message that other ranks wait for.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
    # torch warns of options whose timeout differs from the group's.
    options._timeout = timeout
    if max_ctas:
        options.config.max_ctas = max_ctas
    return options


def use_once(axes: Iterable[Axis], device: torch.device) -> None:
    """Make an all-reduce along each axis, so that its communicator exists. Collective, in one order
    on all ranks."""
    sent = torch.zeros(1, device=device)
    made: list[dist.ProcessGroup] = []
    for axis in axes:
        # On the host one group serves several axes.
        if axis.group is not None and axis.group not in made:
            with axis.recorder.waiting(f"the ranks of {axis.name}"):
                dist.all_reduce(sent, group=axis.group)
            made.append(axis.group)
