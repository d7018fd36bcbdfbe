"""The facts that a run records at its start, for ``report``: its options and its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from megatron_llama.config.blend import read_blend
from megatron_llama.config.schema import Config
from megatron_llama.data.loader import BlendedSamples
from megatron_llama.data.stream_places import text_streams
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.mesh import Mesh
from megatron_llama.errors import ClusterError
from megatron_llama.launch.launcher import place_from_environment
from megatron_llama.metrics.versions import versions
from megatron_llama.model.plan.params import parameter_count
from megatron_llama.train.setup.inputs import Ready
from megatron_llama.train.setup.start import begins_anew


def run_facts(inputs: Ready, mesh: Mesh) -> dict[str, Any]:
    """Return the facts of one start, for JSON: its place in the run (``iteration``,
    ``consumed_samples``, ``resumes`` or ``weights``: from which folder), the processes and their
    device, the ``versions``, the ``data`` (by dataset), and the whole ``config``."""
    config = inputs.config
    start = inputs.start
    weights = str(start.path) if start is not None else config.checkpoint.init_from_hf
    resumed = start is not None and not begins_anew(config.checkpoint, start)
    return {
        "iteration": inputs.state.iteration,
        "consumed_samples": inputs.state.consumed_samples,
        "resumes" if resumed else "weights": weights,
        "world_size": mesh.world.size,
        "processes_per_machine": _processes_per_machine(),
        "device": devices.name(mesh.device),
        "device_is_host": devices.is_host(mesh.device),
        "device_memory": devices.memory_bytes(mesh.device),
        "parameters": parameter_count(config.model),
        "versions": versions(),
        "data": list(_datasets(inputs)),
        "config": asdict(config),
    }


def _processes_per_machine() -> int:
    """Return the launcher's number; 0 without one, or if a program has made the process group."""
    try:
        return place_from_environment().local_world_size
    except ClusterError:
        return 0


def _datasets(inputs: Ready) -> Iterator[dict[str, Any]]:
    """Yield each dataset with its number of samples (None for a streamed text) and its weight in
    the blend. Samples that are no blend have one entry, with their identity."""
    config: Config = inputs.config
    samples = inputs.training
    streamed = bool(text_streams(samples))
    blend = read_blend(config.data.data_path) if config.data.data_path else None
    if blend is None or len(blend.prefixes) == 1:
        yield {
            "name": blend.prefixes[0] if blend is not None else "examples",
            "samples": None if streamed else len(samples),
            "weight": 1,
            "is": inputs.identity,
        }
        return
    parts = samples.parts if isinstance(samples, BlendedSamples) else ()
    sizes = [None if streamed else len(source) for source in parts] or [None] * len(blend.prefixes)
    weights = blend.weights or sizes
    for name, size, weight in zip(blend.prefixes, sizes, weights, strict=True):
        yield {"name": name, "samples": size, "weight": weight}
