"""Decides, alone, where Triton's kernels compute and where torch's operators do."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from megatron_llama.engine.comm import device as devices

if TYPE_CHECKING:
    # The engine asks whether kernels run, and has no layers.
    from megatron_llama.model.nn.ops import Ops

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Sums are taken in fp32, so fp64 (the reference runs) stays with torch."""
MAX_HIDDEN = 1 << 15
"""The kernels of the norm hold a whole row of so many elements."""


@cache
def runs_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton's kernels compute with tensors of this dtype on this device."""
    return dtype in DTYPES and devices.runs_triton(device)


def kernels_for(device: torch.device, dtype: torch.dtype, hidden: int) -> Ops | None:
    """Return the kernels for layers of this hidden size; None: torch's operators compute there."""
    if hidden > MAX_HIDDEN or not runs_kernels(device, dtype):
        return None
    from megatron_llama.model.nn.kernels.ops import KERNELS

    return KERNELS
