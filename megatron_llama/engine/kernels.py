"""The only module that decides whether Triton's kernels compute or torch's operators."""

from __future__ import annotations

from functools import cache

import torch

from megatron_llama.engine.comm import device as devices

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Sums are taken in fp32, so fp64 (the reference runs) stays with torch."""


@cache
def runs_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton's kernels compute with tensors of this dtype on this device."""
    return dtype in DTYPES and devices.runs_triton(device)
