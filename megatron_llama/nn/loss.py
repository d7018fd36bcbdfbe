"""Cross entropy over a vocabulary that is split over tp: no rank ever holds a full-vocabulary
tensor.

The gradient is computed with the loss, in the memory of the logits: a chunk of rows is read and
written while it is in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama.distributed import device as devices
from megatron_llama.distributed.comm import collectives
from megatron_llama.distributed.mesh import Axis
from megatron_llama.nn.kernels.choice import runs_kernels
from megatron_llama.nn.ops import DEVICE_CHUNK, PLAIN, Ops, at_least_fp32, softmax_stats


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    tp: Axis,
    vocab_size: int,
    *,
    weights: Tensor | None = None,
    z_weight: float = 0.0,
    ops: Ops = PLAIN,
) -> Tensor:
    """Negative log-likelihood of each token, in fp32 (fp64 for fp64 logits), and the gradient of
    its weighted sum.

    logits [s, b, padded_vocab / tp], contiguous, are overwritten: with ``weights``, [s, b] and as
    wide as the result, by that gradient. labels [s, b] int64 below ``vocab_size`` (the true,
    unpadded size). Returns [s, b], the same on every tp rank. Two small all-reduces: the maximum,
    then the sum with the target's score. No autograd. ``z_weight``: gradients are those of the loss
    plus this times the square of log sum exp(logits); the value is that of the loss.
    """
    rows = logits.detach().flatten(0, -2)
    targets = labels.flatten()
    chunk = ops.host_chunk if devices.is_host(rows.device) else DEVICE_CHUNK
    chunks = [
        slice(start, start + max(1, chunk // rows.shape[1]))
        for start in range(0, len(rows), max(1, chunk // rows.shape[1]))
    ]
    valid = min(max(0, vocab_size - tp.rank * rows.shape[1]), rows.shape[1])
    share = None if weights is None else weights.flatten()
    if tp.size > 1:
        losses = _over_ranks(rows, targets, chunks, tp, valid, share, z_weight)
    elif share is None:
        losses = torch.cat([_value(rows[part], targets[part], valid) for part in chunks])
    else:
        losses = torch.cat(
            [
                ops.cross_entropy(rows[part], targets[part], share[part], valid, z_weight)
                for part in chunks
            ]
        )
    return losses.view(labels.shape)


def _value(logits: Tensor, labels: Tensor, valid: int) -> Tensor:
    _, _, sums, target = softmax_stats(logits, labels, valid)
    return sums.log() - target


def _over_ranks(
    rows: Tensor,
    labels: Tensor,
    chunks: Sequence[slice],
    tp: Axis,
    valid: int,
    weights: Tensor | None,
    z_weight: float,
) -> Tensor:
    """Rows [t, v] are read, ranks meet, and rows are read again: exponentials are kept in between
    where they fit into the logits."""
    local = labels - tp.rank * rows.shape[1]
    outside = (local < 0) | (local >= rows.shape[1])
    index = local.masked_fill(outside, 0)
    fused = runs_kernels(rows.device, rows.dtype)
    read = _read_by_kernel if fused else _read
    found = [read(rows[part], index[part], valid) for part in chunks]
    own, sums, target = (torch.cat(parts) for parts in zip(*found, strict=True))
    largest = own.clone()
    collectives.all_reduce(largest, tp, dist.ReduceOp.MAX).wait()
    shift = own - largest
    summed = torch.stack((sums * shift.exp(), (target + shift).masked_fill_(outside, 0.0)))
    collectives.all_reduce(summed, tp).wait()
    total, target = summed
    logarithm = total.log()
    if weights is not None:
        # d(w z^2) = 2 w z dz for z, the logarithm of the denominator, and dz is the softmax.
        pull = weights * (1.0 + 2 * z_weight * (logarithm + largest)) if z_weight else weights
        factor = pull * shift.exp() / total
        hit = weights.masked_fill(outside, 0.0).neg_()
        if fused:
            _write_by_kernel(rows, index, own, factor, -hit, valid)
            return torch.sub(logarithm, target)
        for part in chunks:
            wide = (
                rows[part]
                if rows.dtype is own.dtype
                else softmax_stats(rows[part], index[part], valid)[0]
            )
            wide.mul_(factor[part].unsqueeze(-1)).scatter_add_(
                -1, index[part].unsqueeze(-1), hit[part].unsqueeze(-1)
            )
            if rows.dtype is not own.dtype:
                rows[part] = wide
    losses: Tensor = logarithm - target
    return losses


def _read(logits: Tensor, labels: Tensor, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    _, largest, sums, target = softmax_stats(logits, labels, valid)
    return largest, sums, target


def _read_by_kernel(logits: Tensor, labels: Tensor, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    from megatron_llama.nn.kernels.cross_entropy import statistics

    largest, sums, target = statistics(logits, labels, valid)
    return largest, sums, target - largest


def _write_by_kernel(
    logits: Tensor, labels: Tensor, largest: Tensor, factor: Tensor, weights: Tensor, valid: int
) -> None:
    from megatron_llama.nn.kernels.cross_entropy import gradient

    gradient(logits, labels, largest, factor, weights, valid)


def argmax(logits: Tensor, tp: Axis, vocab_size: int) -> Tensor:
    """The token with the largest of logits [..., padded_vocab / tp], int64 [...]; of equal ones the
    last. The same on every tp rank."""
    columns = logits.shape[-1]
    first = tp.rank * columns
    logits = logits.to(at_least_fp32(logits.dtype), copy=True)
    logits[..., max(0, vocab_size - first) :] = float("-inf")
    own, index = logits.max(-1)
    largest = own.clone()
    collectives.all_reduce(largest, tp, dist.ReduceOp.MAX).wait()
    found = torch.where(own == largest, index + first, -1)
    collectives.all_reduce(found, tp, dist.ReduceOp.MAX).wait()
    return found
