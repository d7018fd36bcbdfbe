"""``env``: what a bug report needs."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from megatron_llama import __version__
from megatron_llama.options import Parsed

PACKAGES = ("numpy", "safetensors", "sentencepiece", "tokenizers", "pyyaml", "tqdm", "transformers", "apex")


def env(parsed: Parsed) -> None:
    """Print versions, devices and backends."""
    import torch
    import torch.distributed as dist

    from megatron_llama import device as devices

    device = devices.accelerator(0)
    host = devices.is_host(device)
    rows = {
        "megatron_llama": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "torch": torch.__version__,
        "device": ("CPU, " if host else f"{devices.accelerator_count()} x ") + devices.name(device),
        "threads": str(torch.get_num_threads()),
        "memory": f"{devices.memory_bytes(device) / 2**30:.1f} GiB",
        "backends": ", ".join(name for name, found in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if found),
        **{name: _version(name) for name in PACKAGES},
    }
    for name, value in rows.items():
        print(f"{name:<15}{value}")


def _version(name: str) -> str:
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
    # PyPI's apex is a toolkit for web sessions; NVIDIA's is built from source and has these modules.
    if name == "apex" and not any(str(file).startswith("apex/normalization") for file in metadata.files(name) or ()):
        return f"{found}: not NVIDIA's apex but another package of that name; uninstall it"
    return found
