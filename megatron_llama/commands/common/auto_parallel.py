"""``--auto-parallel``: what a run has, put before the planner. All ranks get the first one's
answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any

from megatron_llama.commands.common.configs import AutoParallelConfig
from megatron_llama.config.parse import Parsed, flag
from megatron_llama.config.schema import Config, LaunchConfig
from megatron_llama.distributed.host_memory import free_bytes
from megatron_llama.errors import ConfigError, describe
from megatron_llama.planner.calibration import Calibration, calibration_of
from megatron_llama.planner.choice import SEARCHED, Choice, choose, given_of, value_of
from megatron_llama.planner.hardware import CPU, GPUS, gpu_of_device
from megatron_llama.planner.job import Machine
from megatron_llama.planner.published import BITS

if TYPE_CHECKING:
    from megatron_llama.distributed.mesh import Place
    from megatron_llama.loop.start import Start


@dataclass(frozen=True)
class Seen:
    """What a rank sees of its device."""

    name: str
    host: bool
    memory: int
    """Bytes for this process."""
    node: int
    """Processes on this machine; 0: unknown."""
    beside: int
    """Bytes of host memory for this process beside its device."""


def wanted(parsed: Parsed) -> bool:
    """Whether the layout is to be chosen. Raises ConfigError for options that say how, without
    it."""
    options = parsed.instances.get(AutoParallelConfig, AutoParallelConfig())
    without = [
        flag(name) for name in ("gpu", "nic_gbit", "coefficients") if name in parsed.explicit
    ]
    if not options.auto_parallel and without:
        do = "give --auto-parallel too, or leave them out"
        raise ConfigError(
            describe(
                " ".join(without), got="no --auto-parallel", expected="a layout to choose", do=do
            )
        )
    return bool(options.auto_parallel)


def chosen(parsed: Parsed, config: Config, place: Place, start: Start | None) -> Choice:
    """The configuration with the layout that the first rank finds; ``start``: what the run loads.
    Joins the process group; collective. Raises ConfigError."""
    from megatron_llama.distributed.comm.object_collectives import all_gather_object, on_rank0
    from megatron_llama.distributed.mesh import join

    world, _ = join(config.parallel, place)
    everybody = all_gather_object(
        seen_here(
            place.local_rank, place.local_world_size or place.world_size, place.local_world_size
        ),
        world,
    )

    def decide() -> Choice:
        choice = planned(parsed, with_tokens(config), place.world_size, everybody)
        return replace(choice, notes=(*choice.notes, *_since(choice.config, start)))

    return on_rank0(decide, world)


def _since(config: Config, start: Start | None) -> Iterator[str]:
    """What of the layout is not as it was when the checkpoint was saved."""
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
        yield f"  {start.path} was saved in another layout ({', '.join(changed)}): sums are added in another order from here on"


def seen_here(local_rank: int, sharing: int, node: int) -> Seen:
    """This process's device. ``sharing``: processes among which the host's memory is divided."""
    from megatron_llama.distributed import device as devices

    device = devices.accelerator(local_rank)
    host = devices.is_host(device)
    beside = 0 if host else free_bytes() // sharing
    return Seen(
        devices.name(device),
        host,
        devices.memory_bytes(device) // (sharing if host else 1),
        node,
        beside,
    )


def with_tokens(config: Config) -> Config:
    """With the vocabulary of the tokenizer. Raises DataError."""
    from megatron_llama.data.vocabulary import find_vocabulary, with_vocabulary

    return with_vocabulary(config, find_vocabulary(config))


def planned(parsed: Parsed, config: Config, world: int, everybody: list[Seen]) -> Choice:
    """The choice for ``world`` processes on such devices. Raises ConfigError."""
    options = parsed.get(AutoParallelConfig)
    if config.training.global_batch_size <= 0:
        do = "give --global-batch-size, so that what is learned does not depend on the layout"
        raise ConfigError(
            describe(
                "--global-batch-size",
                got="nothing",
                expected="samples in a step, with --auto-parallel",
                do=do,
            )
        )
    known = known_device(options, everybody)
    named = options.gpu is not None or options.coefficients is not None
    memory = known.gpu.memory if named else min(seen.memory for seen in everybody)
    node = (
        min(seen.node for seen in everybody)
        or parsed.get(LaunchConfig).gpus_per_node
        or known.gpu.node
    )
    node = gcd(world, node) if world > node else world
    domain = known.gpu.domain if known.gpu.domain > known.gpu.node else node
    nic = options.nic_gbit * BITS if options.nic_gbit > 0 else known.gpu.nic
    beside = known.gpu.host_memory if named else min(seen.beside for seen in everybody)
    machine = Machine(
        replace(known.gpu, memory=memory, host_memory=beside), world, node, domain, nic
    )
    choice = choose(config, machine, known.fit, given_of(config, parsed.explicit))
    return replace(choice, notes=(*choice.notes, *(f"  {line}" for line in known.notes)))


def known_device(options: AutoParallelConfig, everybody: list[Seen]) -> Calibration:
    """The device as the planner knows it: the one that is named or was calibrated, else the slowest
    of those there are."""
    if options.gpu is not None or options.coefficients is not None:
        return calibration_of(options.gpu, options.coefficients)
    if any(seen.host for seen in everybody):
        return calibration_of(CPU.name, None)
    found: list[Any] = [gpu_of_device(seen.name, seen.memory) for seen in everybody]
    unknown = sorted({seen.name for seen, gpu in zip(everybody, found, strict=True) if gpu is None})
    if unknown:
        do = "name the nearest with --gpu, or measure yours with plan calibrate and give --coefficients FILE"
        raise ConfigError(
            describe(
                "--auto-parallel",
                got=f"a {', a '.join(unknown)}",
                expected=f"one of {', '.join(GPUS)}",
                do=do,
            )
        )
    return calibration_of(min(found, key=lambda gpu: gpu.peak).name, None)
