"""AdamW's correction of moments that began with zeros, where elements have counts of their own."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_llama.engine.options import UpdateOptions


def bias_corrections(
    counts: Tensor, options: UpdateOptions, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return 1 - beta1^n and the square root of 1 - beta2^n for elements that get their n-th
    update; ``counts`` has n in any shape."""
    n = counts.to(torch.float64)
    first, second = (
        -torch.expm1(n * math.log(beta)) if beta else torch.ones_like(n)
        for beta in (options.adam_beta1, options.adam_beta2)
    )
    return first.to(dtype), second.sqrt().to(dtype)
