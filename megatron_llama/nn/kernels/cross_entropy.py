"""Cross entropy over one rank's columns of the vocabulary: what a row's softmax needs, and the
gradient in the place of the scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""Stands for minus infinity, of which two cannot be subtracted."""


@triton.jit
def _statistics(logits, labels, out, rows, columns, valid, BLOCK: tl.constexpr):
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


def statistics(logits: Tensor, labels: Tensor, valid: int) -> Tensor:
    """Rows of scores [t, v], contiguous, that have ``valid`` columns without padding; labels int64
    [t], below 0 or from ``valid`` on where another rank has the column -> fp32 [3, t]: the largest
    score, the sum of exp(score - largest), and the label's score or 0. Without any valid column:
    the lowest finite score, 0 and 0."""
    rows, columns = logits.shape
    out = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    if rows:
        _statistics[(rows,)](
            logits, labels.contiguous(), out, rows, columns, valid, BLOCK=BLOCK, num_warps=8
        )
    return out


def gradient(
    logits: Tensor, labels: Tensor, largest: Tensor, factor: Tensor, weights: Tensor, valid: int
) -> None:
    """Overwrite scores with ``exp(score - largest) * factor - [is the label] * weight``, 0 in
    padding; the others fp32 [t]."""
    rows, columns = logits.shape
    if rows:
        given = [
            one.contiguous() for one in (labels, largest, factor, weights)
        ]  # one weight may stand for all
        _gradient[(rows,)](logits, *given, columns, valid, BLOCK=BLOCK, num_warps=8)


def cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor, valid: int, z_weight: float
) -> Tensor:
    """Negative log-likelihood [t] of ``labels`` [t] by rows of scores [t, v], which become the
    gradient of the sum weighted by ``weights`` [t]. ``valid``: columns that are no padding;
    ``z_weight``: see ``nn/loss.py``."""
    logits = logits if logits.is_contiguous() else _refuse(logits)
    largest, sums, target = statistics(logits, labels, valid)
    logarithm = sums.log()
    pull = weights * (1.0 + 2 * z_weight * (logarithm + largest)) if z_weight else weights
    gradient(logits, labels, largest, pull / sums, weights, valid)
    return torch.sub(logarithm, target - largest)


def _refuse(logits: Tensor) -> Tensor:
    raise ValueError(
        f"scores of strides {logits.stride()}: they are overwritten row by row and must be contiguous"
    )
