"""What the matrix products of a device reach at most: the largest rate of a few shapes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron_llama.engine import host_gemm as gemm
from megatron_llama.engine.comm import device as devices

SIZES = ((2048, 2048, 2048), (2048, 512, 4096), (2048, 4096, 1024))
"""(rows, inner, columns) on a host."""
LARGE = ((8192, 8192, 8192), (4096, 4096, 16384), (8192, 4096, 14336))
"""The same on a GPU."""
REPEAT = 4
"""Products between two looks at the clock."""
LONG = 3.0
"""Seconds after which no further shape is tried."""
SECONDS = 0.3
"""Of each shape and library, at least."""


def matmul_flops(dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of the shapes, here and now: of those that there is time for."""
    device = devices.accelerator(0)
    begun = time.perf_counter()
    best = 0.0
    for size in SIZES if devices.is_host(device) else LARGE:
        best = max(best, _rate(*size, dtype, device))
        if time.perf_counter() - begun > LONG:
            break
    return best


def _rate(rows: int, inner: int, columns: int, dtype: torch.dtype, device: torch.device) -> float:
    left = torch.randn(rows, inner, device=device).to(dtype)
    right = torch.randn(inner, columns, device=device).to(dtype)
    out = torch.empty(rows, columns, device=device, dtype=dtype)
    # Two libraries on a host, of which either may be the faster one.
    calls = [partial(gemm.matmul, left, right), partial(torch.mm, left, right, out=out)]
    if gemm.multiplies_in_fp32(left):
        # torch would take half a minute for a round, at a fortieth of the speed.
        calls = calls[:1]
    return 2 * rows * inner * columns / min(_least(call, device) for call in calls)


def _least(call: Callable[[], Tensor], device: torch.device) -> float:
    """Seconds of a call, the least that was seen."""
    call()
    best = math.inf
    spent = 0.0
    while spent < SECONDS:
        devices.synchronize(device)
        begin = time.perf_counter()
        for _ in range(REPEAT):
            call()
        devices.synchronize(device)
        seconds = (time.perf_counter() - begin) / REPEAT
        best = min(best, seconds)
        spent = spent + REPEAT * seconds
    return best
