"""``--auto-parallel``: the planner chooses a layout for the devices of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd

from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import Config, LaunchConfig
from megatron_llama.errors import ConfigError
from megatron_llama.planner.calibration import Calibration, calibration_of
from megatron_llama.planner.choice import choose, given_of, searched_options, value_of
from megatron_llama.planner.hardware import CPU, GPUS, gpu_of_device
from megatron_llama.planner.inputs import machine_with
from megatron_llama.train.setup.layout import AutoParallelConfig, Choice
from megatron_llama.train.setup.processes import RankDevice
from megatron_llama.train.setup.start import Start
from megatron_llama.train.setup.vocabulary import find_vocabulary, with_vocabulary


def chosen(
    parsed: Parsed, config: Config, count: int, devices: Sequence[RankDevice], start: Start | None
) -> Choice:
    """Return the configuration with a layout for ``count`` processes. Memory and speed are the
    least of ``devices``; ``start`` is the checkpoint that the run loads. Raises ConfigError."""
    config = with_vocabulary(config, find_vocabulary(config, start))
    choice = planned(parsed, config, count, devices)
    return replace(choice, notes=(*choice.notes, *_changes_since(choice.config, start)))


def _changes_since(config: Config, start: Start | None) -> Iterator[str]:
    """Yield a note on options of the layout that have changed since the checkpoint was saved."""
    if start is None or start.meta is None:
        return
    saved = start.meta.config
    before = {**saved.get("parallel", {}), **saved.get("training", {})}
    changed = [
        f"{name} was {before[name]}"
        for name in searched_options(config.model)
        if name in before and before[name] != value_of(config, name)
    ]
    if changed:
        yield (
            f"  {start.path} was saved in another layout ({', '.join(changed)}): sums are added in "
            f"another order from here on"
        )


def planned(parsed: Parsed, config: Config, world: int, devices: Sequence[RankDevice]) -> Choice:
    """Return the choice for ``world`` processes, with the least memory and speed of ``devices``.
    Raises ConfigError."""
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


def known_device(options: AutoParallelConfig, devices: Sequence[RankDevice]) -> Calibration:
    """Return the rates of the device that is named or calibrated in ``options``, else of the
    slowest of ``devices``. Raises ConfigError for a device that the planner does not know."""
    if options.gpu is not None or options.coefficients is not None:
        return calibration_of(options.gpu, options.coefficients)
    if any(device.host for device in devices):
        return calibration_of(CPU.name, None)
    gpus = [gpu_of_device(device.name, device.memory) for device in devices]
    unknown = sorted(
        {device.name for device, gpu in zip(devices, gpus, strict=True) if gpu is None}
    )
    if unknown:
        do = (
            "name the nearest with --gpu, "
            "or measure yours with plan calibrate and give --coefficients FILE"
        )
        got = f"a {', a '.join(unknown)}"
        raise ConfigError("--auto-parallel", got=got, expected=f"one of {', '.join(GPUS)}", do=do)
    slowest = min((gpu for gpu in gpus if gpu is not None), key=lambda gpu: gpu.peak)
    return calibration_of(slowest.name, None)
