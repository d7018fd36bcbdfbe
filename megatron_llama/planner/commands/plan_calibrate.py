"""``plan calibrate FILE``: measure the present devices and links, and write coefficients for
plans."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import Config, ParallelConfig, TrainingConfig
from megatron_llama.errors import ConfigError, describe
from megatron_llama.planner.calibration import HOST, as_json
from megatron_llama.planner.configs import PlanConfig
from megatron_llama.planner.fitted import FITTED
from megatron_llama.planner.hardware import CPU, gpu_of_device
from megatron_llama.planner.measurements import MeasuredDevice, Point, coefficients_of, lines
from megatron_llama.planner.outputs import write_json

if TYPE_CHECKING:
    import torch

    from megatron_llama.engine.mesh import Mesh
    from megatron_llama.launch.launcher import Place


def calibrate(parsed: Parsed) -> None:
    """Time kernels, then links, on all processes that were started together. Rank 0 writes the
    file. Raises ConfigError."""
    options = parsed.get(PlanConfig)
    training = parsed.get(TrainingConfig)
    if options.file is None or options.seconds <= 0:
        got = f"--seconds {options.seconds:g}" if options.file is not None else "no file"
        do = "write plan calibrate FILE.json"
        raise ConfigError(
            describe("plan calibrate", got=got, expected="a file to write, and some time", do=do)
        )
    import torch

    from megatron_llama.engine.comm import device as devices
    from megatron_llama.launch.launcher import place_from_environment
    from megatron_llama.launch.mesh import init_mesh
    from megatron_llama.train.api.common.watched import watched

    place = place_from_environment()
    node = place.local_world_size or place.world_size
    timeout = 60 * ParallelConfig().distributed_timeout_minutes
    with watched(place, timeout) as watch:
        mesh = init_mesh(
            Config(parallel=ParallelConfig(tensor_model_parallel_size=node)), place, watch
        )
        host = devices.is_host(mesh.device)
        narrow = training.bf16 or (not host and "bf16" not in parsed.explicit)
        dtype = torch.bfloat16 if narrow else torch.float32
        points = _points(mesh, dtype, options.seconds)
        device = _device(mesh, place, node, dtype)
        calibration = coefficients_of(points, device, HOST.fit if host else FITTED)
        if place.rank == 0:
            content = as_json(calibration)
            content["measured"] = [
                [kind, *sizes, seconds] for (kind, sizes), seconds in points.items()
            ]
            write_json(options.file, content)
            words = [f"{device.base.source}, {calibration.precision}", *lines(points, calibration)]
            print("\n".join([*words, f"plan with --coefficients {options.file}"]), flush=True)


def _points(mesh: Mesh, dtype: torch.dtype, seconds: float) -> dict[Point, float]:
    """Return the points with their medians over the processes. Collective."""
    from megatron_llama.engine.comm.object_collectives import all_gather_float, all_gather_object
    from megatron_llama.planner.calibrate.kernels import SHARE, kernel_points, probed
    from megatron_llama.planner.calibrate.links import link_points

    budget = seconds * SHARE
    points = dict[Point, float]()
    rate = min(all_gather_float(probed(mesh.device, dtype, budget), mesh.world))
    for timed in (
        kernel_points(mesh.device, dtype, budget, rate),
        link_points(mesh, dtype, budget),
    ):
        gathered = all_gather_object(dict(timed), mesh.world)
        points |= {point: median(times[point] for times in gathered) for point in gathered[0]}
    return points


def _device(mesh: Mesh, place: Place, node: int, dtype: torch.dtype) -> MeasuredDevice:
    """Return the device with the properties that are known without measuring."""
    from megatron_llama.engine.comm import device as devices
    from megatron_llama.engine.comm.host_memory import free_bytes

    name = devices.name(mesh.device)
    memory = devices.memory_bytes(mesh.device)
    host = devices.is_host(mesh.device)
    known = CPU if host else gpu_of_device(name, memory)
    base = replace(
        known or CPU,
        name=known.name if known is not None else "here",
        memory=memory // node if host else memory,
        host_memory=0 if host else free_bytes() // node,
        source=f"{place.world_size} x {name}",
    )
    return MeasuredDevice(base, dtype.itemsize, node)
