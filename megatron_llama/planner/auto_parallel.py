"""``--auto-parallel``: the planner chooses a layout for the devices of a run. The first rank
searches, and all take its answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING

from megatron_llama.api.common.configs import AutoParallelConfig
from megatron_llama.api.common.layout import Choice
from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import Config, LaunchConfig
from megatron_llama.distributed.host_memory import free_bytes
from megatron_llama.errors import ConfigError
from megatron_llama.planner.calibration import Calibration, calibration_of
from megatron_llama.planner.choice import SEARCHED, choose, given_of, value_of
from megatron_llama.planner.hardware import CPU, GPUS, gpu_of_device
from megatron_llama.planner.inputs import machine_with

if TYPE_CHECKING:
    from megatron_llama.distributed.comm.watch import Watch
    from megatron_llama.distributed.launcher import Place
    from megatron_llama.loop.start import Start


@dataclass(frozen=True)
class RankDevice:
    """What a rank sees of its device."""

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


def chosen(
    parsed: Parsed, config: Config, place: Place, start: Start | None, watch: Watch
) -> Choice:
    """Return the configuration with the layout that the first rank finds; ``start`` is what the run
    loads. Joins the process group, under ``watch``; collective. Raises ConfigError."""
    from megatron_llama.distributed.comm.object_collectives import all_gather_object, on_rank0
    from megatron_llama.distributed.join import join

    world, _ = join(config.parallel, place, watch)
    sharing = place.local_world_size or place.world_size
    here = this_device(place.local_rank, sharing, place.local_world_size)
    devices = all_gather_object(here, world)

    def decide() -> Choice:
        choice = planned(parsed, with_tokens(config), place.world_size, devices)
        return replace(choice, notes=(*choice.notes, *_changes_since(choice.config, start)))

    return on_rank0(decide, world)


def imagined(parsed: Parsed, config: Config, world: int, node: int) -> Choice:
    """Return the choice for ``world`` processes with a device as this process has, ``node`` of them
    on one machine (0: unknown). Raises ConfigError."""
    return planned(parsed, with_tokens(config), world, [this_device(0, world, node)])


def _changes_since(config: Config, start: Start | None) -> Iterator[str]:
    """Say what of the layout is not as it was when the checkpoint was saved."""
    from megatron_llama.checkpoint import native

    if start is None or not start.native:
        return
    saved = native.read_meta(start.path).config
    before = {**saved.get("parallel", {}), **saved.get("training", {})}
    changed = [
        f"{name} was {before[name]}"
        for name in SEARCHED
        if name in before and before[name] != value_of(config, name)
    ]
    if changed:
        yield (
            f"  {start.path} was saved in another layout ({', '.join(changed)}): sums are added in "
            f"another order from here on"
        )


def this_device(local_rank: int, sharing: int, node: int) -> RankDevice:
    """Return this process's device. ``sharing`` processes divide the host's memory; ``node`` are on
    this machine."""
    from megatron_llama.distributed import device as devices

    device = devices.accelerator(local_rank)
    host = devices.is_host(device)
    return RankDevice(
        devices.name(device),
        host,
        devices.memory_bytes(device) // (sharing if host else 1),
        node,
        0 if host else free_bytes() // sharing,
    )


def with_tokens(config: Config) -> Config:
    """Return the configuration with the vocabulary of the tokenizer. Raises DataError."""
    from megatron_llama.loop.vocabulary import find_vocabulary, with_vocabulary

    return with_vocabulary(config, find_vocabulary(config))


def planned(parsed: Parsed, config: Config, world: int, devices: list[RankDevice]) -> Choice:
    """Return the choice for ``world`` processes with the least of what ``devices`` have. Raises
    ConfigError."""
    options = parsed.get(AutoParallelConfig)
    if config.training.global_batch_size <= 0:
        do = "give --global-batch-size, so that what is learned does not depend on the layout"
        expected = "samples in a step, with --auto-parallel"
        raise ConfigError("--global-batch-size", got="nothing", expected=expected, do=do)
    known = known_device(options, devices)
    gpu = known.gpu
    if options.gpu is None and options.coefficients is None:
        memory = min(device.memory for device in devices)
        host_memory = min(device.host_memory for device in devices)
        gpu = replace(gpu, memory=memory, host_memory=host_memory)
    node = min(device.node for device in devices)
    node = node or parsed.get(LaunchConfig).gpus_per_node or gpu.node
    node = gcd(world, node) if world > node else world
    machine = machine_with(gpu, world, node, options.nic_gbit)
    choice = choose(config, machine, known.fit, given_of(config, parsed.explicit))
    return replace(choice, notes=(*choice.notes, *(f"  {line}" for line in known.notes)))


def known_device(options: AutoParallelConfig, devices: list[RankDevice]) -> Calibration:
    """Return the device as the planner knows it: the one that is named or was calibrated, else the
    slowest of ``devices``. Raises ConfigError for one that it does not know."""
    if options.gpu is not None or options.coefficients is not None:
        return calibration_of(options.gpu, options.coefficients)
    if any(device.host for device in devices):
        return calibration_of(CPU.name, None)
    found = [gpu_of_device(device.name, device.memory) for device in devices]
    unknown = sorted(
        {device.name for device, gpu in zip(devices, found, strict=True) if gpu is None}
    )
    if unknown:
        do = (
            "name the nearest with --gpu, "
            "or measure yours with plan calibrate and give --coefficients FILE"
        )
        got = f"a {', a '.join(unknown)}"
        raise ConfigError("--auto-parallel", got=got, expected=f"one of {', '.join(GPUS)}", do=do)
    slowest = min((gpu for gpu in found if gpu is not None), key=lambda gpu: gpu.peak)
    return calibration_of(slowest.name, None)
