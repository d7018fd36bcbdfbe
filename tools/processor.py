"""What a benchmark has run on: a figure without its processor says nothing."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from megatron_llama.engine.comm import device as devices
from megatron_llama.train.doctor.machine import processor_name

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""They forbid torch and its libraries instructions that the processor has."""


def processor() -> str:
    """Say what this machine computes with: a GPU's name, or a processor, its instructions, those
    that torch may use, and how it multiplies bf16."""
    device = devices.accelerator(0)
    if not devices.is_host(device):
        return devices.name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    entries = [(key.strip(), value) for key, _, value in (line.partition(":") for line in lines)]
    flags = {word for key, value in entries if key == "flags" for word in value.split()}
    has = ", ".join(f"{name} {'yes' if name in flags else 'no'}" for name in FLAGS)
    limits = "".join(f", {name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
    return (
        f"{processor_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} "
        f"threads; {has}; torch uses {torch.backends.cpu.get_cpu_capability()}{limits}; products "
        f"of bf16 in {'bf16' if devices.multiplies_bf16() else 'fp32'}"
    )
