"""``env``: what a bug report needs."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from megatron_llama.config.parse import Parsed
from megatron_llama.plans.memory import sized

PACKAGES = ("numpy", "safetensors", "sentencepiece", "tokenizers", "pyyaml", "tqdm", "transformers")


def env(parsed: Parsed) -> None:
    """Print versions, devices and backends."""
    import torch
    import torch.distributed as dist

    from megatron_llama import __version__
    from megatron_llama.distributed import device as devices

    device = devices.accelerator(0)
    host = devices.is_host(device)
    rows = {
        "megatron_llama": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "torch": torch.__version__,
        "device": ("CPU, " if host else f"{devices.accelerator_count()} x ") + devices.name(device),
        "threads": str(torch.get_num_threads()),
        "memory": sized(devices.memory_bytes(device)),
        "backends": ", ".join(
            name
            for name, found in (
                ("gloo", dist.is_gloo_available()),
                ("nccl", dist.is_nccl_available()),
            )
            if found
        ),
        **{name: _version(name) for name in PACKAGES},
        "apex": apex_found(),
    }
    for name, value in rows.items():
        print(f"{name:<15}{value}")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def apex_found() -> str:
    """Say which apex is installed. Training uses none (``docs/dependencies.md``); it is shown
    because ``tools/bench_kernels.py`` times NVIDIA's, and PyPI has another package of that name."""
    spec = find_spec("apex")
    if spec is None:
        return "not installed"
    version = _version("apex")
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
