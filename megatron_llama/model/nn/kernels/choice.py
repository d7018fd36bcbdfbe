"""The choice of kernels for the layers of a model."""

from __future__ import annotations

import torch

from megatron_llama.engine.kernels import runs_kernels
from megatron_llama.model.nn.ops import Ops

MAX_HIDDEN = 1 << 15
"""Elements of the longest row that the kernels of the norm hold."""


def kernels_for(device: torch.device, dtype: torch.dtype, hidden: int) -> Ops | None:
    """Return the kernels for layers of this hidden size; None: torch's operators compute there."""
    if hidden > MAX_HIDDEN or not runs_kernels(device, dtype):
        return None
    # Triton is imported only where its kernels run.
    from megatron_llama.model.nn.kernels.ops import KERNELS

    return KERNELS
