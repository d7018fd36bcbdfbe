"""The processes for which a run is set up, and their devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_llama.engine.comm.host_memory import free_bytes

if TYPE_CHECKING:
    from megatron_llama.engine.mesh import Axis
    from megatron_llama.launch.launcher import Place


@dataclass(frozen=True)
class RankDevice:
    """A rank's view of its device."""

    name: str
    host: bool
    """Whether the host itself computes."""
    memory: int
    """Bytes for this process."""
    node: int
    """Processes on this machine; 0: unknown."""
    host_memory: int
    """Bytes of host memory for this process, in addition to its device's; 0 if the device is the
    host."""


@dataclass(frozen=True)
class Processes:
    """The processes for which a run is set up."""

    world: Axis
    """The processes that decide together. In a dry run one stands for all."""
    count: int
    devices: tuple[RankDevice, ...]
    """The devices of all ranks in their order, or one if all are alike."""
    are_here: bool = True
    """Whether the run would be on this machine. Things that only its machine must have do not
    refuse a plan for another machine."""

    @property
    def memory(self) -> int:
        """Bytes that every process has: all decide by the same number."""
        return min(device.memory for device in self.devices)


def launched_processes(place: Place, world: Axis) -> Processes:
    """Return the processes that a launcher has started, after they have met as ``world``.
    Collective."""
    from megatron_llama.engine.comm.object_collectives import all_gather_object

    own = _device_at(place)
    return Processes(world, place.world_size, tuple(all_gather_object(own, world)))


def unmet_processes(place: Place) -> Processes:
    """Return the processes that a launcher has started, before they have met: this one decides
    alone."""
    from megatron_llama.engine.mesh import Mesh

    return Processes(Mesh.single().world, place.world_size, (_device_at(place),))


def imagined_processes(count: int, node: int, *, are_here: bool) -> Processes:
    """Return ``count`` processes with a device like this one's, ``node`` of them on one machine (0:
    unknown). This process decides for all."""
    from megatron_llama.engine.mesh import Mesh

    return Processes(Mesh.single().world, count, (this_device(0, count, node),), are_here)


def _device_at(place: Place) -> RankDevice:
    sharing = place.local_world_size or place.world_size
    return this_device(place.local_rank, sharing, place.local_world_size)


def this_device(local_rank: int, sharing: int, node: int) -> RankDevice:
    """Return this process's device. ``sharing`` processes divide the host's memory; ``node`` are on
    this machine."""
    from megatron_llama.engine.comm import device as devices

    device = devices.accelerator(local_rank)
    host = devices.is_host(device)
    return RankDevice(
        devices.name(device),
        host,
        devices.memory_bytes(device) // (sharing if host else 1),
        node,
        0 if host else free_bytes() // sharing,
    )
