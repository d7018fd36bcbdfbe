"""``env``: the facts that a bug report needs."""

from __future__ import annotations

import platform
from importlib.util import find_spec
from pathlib import Path

from megatron_llama.config.parse import Parsed
from megatron_llama.engine.plan.memory import sized
from megatron_llama.metrics.versions import package_version, versions

OWN_ROWS = ("megatron_llama", "python", "torch")
"""Versions that stand above the facts of the machine."""


def env(parsed: Parsed) -> None:
    """Print versions, devices and backends."""
    import torch
    import torch.distributed as dist

    from megatron_llama.engine.comm import device as devices

    device = devices.accelerator(0)
    host = devices.is_host(device)
    own = versions()
    rows = {
        "megatron_llama": own["megatron_llama"],
        "python": own["python"],
        "platform": platform.platform(),
        "torch": own["torch"],
        "device": ("CPU, " if host else f"{devices.accelerator_count()} x ") + devices.name(device),
        "threads": str(torch.get_num_threads()),
        "memory": sized(devices.memory_bytes(device)),
        "backends": ", ".join(
            name
            for name, available in (
                ("gloo", dist.is_gloo_available()),
                ("nccl", dist.is_nccl_available()),
            )
            if available
        ),
        **{name: version for name, version in own.items() if name not in OWN_ROWS},
        "apex": apex_found(),
    }
    for name, value in rows.items():
        print(f"{name:<15}{value}")


def apex_found() -> str:
    """Return words on the installed apex. Training uses none (``docs/dependencies.md``); it is
    shown because ``tools/bench_kernels.py`` times NVIDIA's, and PyPI has another package of that
    name."""
    spec = find_spec("apex")
    if spec is None:
        return "not installed"
    version = package_version("apex")
    if not any(
        Path(place, "normalization").is_dir() for place in spec.submodule_search_locations or ()
    ):
        return (
            f"{version}: not NVIDIA's apex but PyPI's package of that name, a toolkit for web "
            "applications; uninstall it"
        )
    return f"{version}, NVIDIA's" + (
        "" if find_spec("amp_C") is not None else ", built without its kernels"
    )
