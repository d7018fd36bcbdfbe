"""What the matrix products of a device reach at most: the largest rate of a few shapes."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from megatron_llama import device as devices

SIZES = ((2048, 2048, 2048), (2048, 512, 4096), (2048, 4096, 1024))
"""(rows, inner, columns) on a host."""
LARGE = ((8192, 8192, 8192), (4096, 4096, 16384), (8192, 4096, 14336))
"""The same on a GPU."""
REPEAT = 4
"""Products between two looks at the clock."""
SECONDS = 0.3
"""Of each shape, at least."""


def matmul_flops(dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of the shapes, here and now."""
    device = devices.accelerator(0)
    return max(_rate(*size, dtype, device) for size in (SIZES if devices.is_host(device) else LARGE))


def _rate(rows: int, inner: int, columns: int, dtype: torch.dtype, device: torch.device) -> float:
    left, right = torch.randn(rows, inner, device=device).to(dtype), torch.randn(inner, columns, device=device).to(dtype)
    out = torch.empty(rows, columns, device=device, dtype=dtype)
    torch.mm(left, right, out=out)
    best, spent = 0.0, 0.0
    while spent < SECONDS:
        seconds = _timed(left, right, out, device)
        best, spent = max(best, 2 * rows * inner * columns / seconds), spent + REPEAT * seconds
    return best


def _timed(left: Tensor, right: Tensor, out: Tensor, device: torch.device) -> float:
    devices.synchronize(device)
    begin = time.perf_counter()
    for _ in range(REPEAT):
        torch.mm(left, right, out=out)
    devices.synchronize(device)
    return (time.perf_counter() - begin) / REPEAT
