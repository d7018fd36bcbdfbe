"""Rotary embedding of neighbouring dims, as pairs of coordinates (Su et al., 2021), which is how
LLaMA 4's projections are stored. Other models have the two halves of a head as coordinates.

torch's operators on every device, beside the other operations of a model."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_llama.model.nn.ops import Ops, rotate_pairs


def interleaved(ops: Ops) -> Ops:
    """Return the operations with this rotation."""
    return replace(ops, rotate=rotate, rotate_back=rotate_back)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first r dims of every head [s, b, n, d], each even one with the next, by cos and
    sin [s, 1 or b, 1, r / 2], in place. r may be 0."""
    rotate_pairs(*_pairs(heads, cos), cos, sin, 1.0)


def rotate_back(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute ``ops.rotate_back`` for this rotation."""
    grad = torch.cat((query, key, value), dim=2)
    rotated = grad.narrow(2, 0, query.shape[2] + key.shape[2])
    rotate_pairs(*_pairs(rotated, cos), cos, sin, -1.0)
    return grad


def _pairs(heads: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
    """View the two coordinates of each pair, [s, b, n, r / 2]."""
    rotated = heads[..., : 2 * cos.shape[-1]]
    return rotated[..., ::2], rotated[..., 1::2]
