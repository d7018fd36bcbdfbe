"""Joining the world: from a launcher's variables to the process group of all ranks.

The engine needs none of this: it takes a mesh. The trainer joins through ``mesh.py``; ``shard``
comes here only if its user has not joined a group."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_llama.config.schema import ParallelConfig
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.groups import SCALARS, communicator_options
from megatron_llama.engine.comm.recorder import Recorder
from megatron_llama.engine.mesh import Axis
from megatron_llama.launch import flight_recorder
from megatron_llama.launch.launcher import (
    Place,
    launcher_hosts_store,
    place_from_environment,
    separate_queues,
)
from megatron_llama.launch.network import (
    GLOO,
    GLOO_LAZY,
    NCCL,
    choose_interface,
    interface_of,
    require_master,
)
from megatron_llama.launch.open_files import require_open_files
from megatron_llama.launch.rendezvous import meet
from megatron_llama.launch.store import host_named, open_store

if TYPE_CHECKING:
    # Loaded only by callers that turn it on.
    from megatron_llama.launch.watch import Watch

GRACE = timedelta(seconds=30)
"""The time that the backend waits longer than the watch."""
_ALLOCATOR_VARIABLES = frozenset({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"})


def join(
    parallel: ParallelConfig, place: Place, watch: Watch | None = None
) -> tuple[Axis, torch.device]:
    """Join the process group, unless this process has. Returns the axis of all processes, and the
    device of this one. Nothing here depends on the layout. ``watch`` starts as soon as this process
    has found the others. Collective. Raises ClusterError."""
    # Growing segments keep gaps between allocations of different sizes from adding up. A user who
    # sets one of these variables has decided otherwise.
    if not _ALLOCATOR_VARIABLES & os.environ.keys():
        devices.use_allocator("expandable_segments:True")
    device = devices.accelerator(place.local_rank)
    recorder = watch.recorder if watch is not None else Recorder()
    if place.world_size == 1:
        return world_axis(place.rank, 1, recorder, None), device
    if place.joined:
        # The program's group may have no backend for values of the host, or none for the device.
        timeout = backend_timeout(parallel)
        group = dist.new_group(
            timeout=timeout,
            backend=devices.backend(device),
            pg_options=world_options(device, timeout),
            group_desc="world",
        )
        return world_axis(place.rank, place.world_size, recorder, group), device
    if not dist.is_initialized():
        with recorder.waiting("the other ranks"):
            join_group(parallel, place, device, watch)
    return world_axis(place.rank, place.world_size, recorder, dist.group.WORLD), device


def meet_on_loopback() -> None:
    """Let gloo connect this process with others of this machine only. Called before it joins a
    group."""
    interface = interface_of("127.0.0.1")
    if interface is not None:
        os.environ[GLOO] = interface


def this_place() -> Place:
    """Return the place of this process: in the program's own group, else among the processes of a
    launcher. Raises ClusterError."""
    if not dist.is_initialized():
        return place_from_environment()
    rank = dist.get_rank()
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return Place(rank, dist.get_world_size(), local_rank, joined=True)


def join_group(
    parallel: ParallelConfig, place: Place, device: torch.device, watch: Watch | None = None
) -> None:
    """Join the process group of a ``place`` that is one of several. Collective. Raises
    ClusterError. ``join`` is for callers whose program may have joined already."""
    patience = timedelta(minutes=parallel.distributed_timeout_minutes)
    timeout = backend_timeout(parallel)
    rank = place.rank
    world_size = place.world_size
    require_master(place)
    by_launcher = launcher_hosts_store()
    require_open_files(world_size, rank=rank, in_launcher=by_launcher)
    store = open_store(place, patience, hosts=rank == 0 and not by_launcher)
    start = None
    if watch is not None:
        watch.keep(store)
        start = watch.start
    with host_named():
        store = meet(store, rank, world_size, timeout.total_seconds(), found=start)
    store.set_timeout(timeout)
    interface = choose_interface(store, place, os.environ)
    if interface is not None:
        os.environ.setdefault(GLOO, interface)
        os.environ.setdefault(NCCL, f"={interface}")  # NCCL reads a bare name as a prefix
    if not devices.is_host(device):
        # Values of the host cross this group only now and then. A socket for each pair of ranks,
        # 16,000 in every process of a job of 16,000, would mostly stay unused.
        os.environ.setdefault(GLOO_LAZY, "1")
    flight_recorder.turn_on(os.environ)
    dist.init_process_group(
        devices.backend(device),
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        pg_options=world_options(device, timeout),
    )


def world_options(device: torch.device, timeout: timedelta) -> Any:
    """Return NCCL's options for the process group of all ranks; on a host None."""
    return communicator_options(device, timeout, urgent=False, max_ctas=SCALARS)


def world_axis(
    rank: int, world_size: int, recorder: Recorder, group: dist.ProcessGroup | None
) -> Axis:
    """Return the axis of all processes."""
    return Axis("world", rank, tuple(range(world_size)), group, recorder)


def backend_timeout(parallel: ParallelConfig) -> timedelta:
    """Return a timeout later than the watch's, so that the watch can name the missing ranks and
    where the others are."""
    return timedelta(minutes=parallel.distributed_timeout_minutes) + GRACE


def join_launched(device: torch.device | None) -> tuple[torch.device, bool]:
    """Join the processes that a launcher has started, if there are several. Returns the device of
    this one (``device``, if it is given) and whether it has joined. Collective. Raises
    ClusterError."""
    separate_queues()
    place = place_from_environment()
    device = device or devices.accelerator(place.local_rank)
    if place.world_size == 1:
        return device, False
    join_group(ParallelConfig(), place, device)
    return device, True


def launched_device() -> torch.device:
    """Return the accelerator of this process by the launcher's variables."""
    separate_queues()
    return devices.accelerator(place_from_environment().local_rank)
