"""Cross entropy over one rank's columns of the vocabulary: the statistics of a row's softmax, and
the gradient in the memory of the logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""Stands for minus infinity, of which two cannot be subtracted."""


@triton.jit
def _softmax_stats(logits, labels, out, rows, columns, valid, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * columns
    largest = LOWEST
    total = 0.0
    for begin in range(0, valid, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        values = tl.load(start + place, mask=place < valid, other=LOWEST).to(tl.float32)
        higher = tl.maximum(largest, tl.max(values, 0))
        total = total * tl.exp(largest - higher) + tl.sum(
            tl.where(place < valid, tl.exp(values - higher), 0.0), 0
        )
        largest = higher
    label = tl.load(labels + row)
    here = (label >= 0) & (label < valid)
    target = tl.load(start + tl.where(here, label, 0), mask=here, other=0.0).to(tl.float32)
    tl.store(out + row, largest)
    tl.store(out + rows + row, total)
    tl.store(out + 2 * rows + row, target)


@triton.jit
def _gradient(logits, labels, largest, factor, weights, columns, valid, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * columns
    top = tl.load(largest + row)
    pull = tl.load(factor + row)
    weight = tl.load(weights + row)
    label = tl.load(labels + row)
    for begin in range(0, columns, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        inside = place < columns
        values = tl.load(start + place, mask=inside, other=0.0)
        real = place < valid
        result = tl.where(real, tl.exp(values.to(tl.float32) - top) * pull, 0.0) - tl.where(
            real & (place == label), weight, 0.0
        )
        tl.store(start + place, result.to(values.dtype), mask=inside)


def softmax_stats(logits: Tensor, labels: Tensor, valid: int) -> Tensor:
    """Return fp32 [3, t] for logits [t, v], contiguous, and labels int64 [t]: the row's maximum,
    the sum of exp(logit - maximum), and the label's logit.

    Columns from ``valid`` on are padding. A label below 0 or from ``valid`` on, whose column
    another rank has, gives 0. Without any valid column: the lowest finite number, 0 and 0."""
    rows, columns = logits.shape
    out = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    if rows:
        _softmax_stats[(rows,)](
            logits, labels.contiguous(), out, rows, columns, valid, BLOCK=BLOCK, num_warps=8
        )
    return out


def gradient(
    logits: Tensor, labels: Tensor, largest: Tensor, factor: Tensor, weights: Tensor, valid: int
) -> None:
    """Overwrite logits [t, v] with ``exp(logit - largest) * factor - [is the label] * weight``, and
    padding with 0; the other arguments are fp32 [t]."""
    rows, columns = logits.shape
    if rows:
        # One weight, expanded, may stand for all tokens.
        tensors = [tensor.contiguous() for tensor in (labels, largest, factor, weights)]
        _gradient[(rows,)](logits, *tensors, columns, valid, BLOCK=BLOCK, num_warps=8)


def cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor, valid: int, z_weight: float
) -> Tensor:
    """Return the negative log-likelihood [t] of ``labels`` [t] by logits [t, v], which become the
    gradient of its sum weighted by ``weights`` [t]. ``valid`` columns are no padding; ``z_weight``
    is that of ``model/nn/loss.py``."""
    if not logits.is_contiguous():
        raise ValueError(
            f"logits of strides {logits.stride()}: "
            "they are overwritten row by row and must be contiguous"
        )
    largest, sums, target = softmax_stats(logits, labels, valid)
    log_sum = sums.log()
    factor = weights * (1.0 + 2 * z_weight * (log_sum + largest)) if z_weight else weights
    gradient(logits, labels, largest, factor / sums, weights, valid)
    return torch.sub(log_sum, target - largest)
