"""Cross entropy over a vocabulary that is split over tp: no rank ever holds a full-vocabulary
tensor.

The gradient is computed with the loss, in the memory of the logits: a chunk of rows is read and
written while it is in the cache. The weight of every token is known before, or computed from the
losses of all tokens, so no autograd is needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama.engine.comm import collectives
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.kernels import runs_kernels
from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.tensors import at_least_fp32
from megatron_llama.model.nn.ops import DEVICE_CHUNK, PLAIN, Ops, softmax_stats

TokenWeights = Callable[[Tensor], Tensor]
"""Maps the losses of all tokens, [s, b], to the derivative of a scalar by each of them, [s, b]: the
weights that their gradients have."""


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    tp: Axis,
    vocab_size: int,
    *,
    weights: Tensor | TokenWeights | None = None,
    z_weight: float = 0.0,
    ops: Ops = PLAIN,
) -> Tensor:
    """Return the negative log-likelihood of each token, [s, b] in fp32 (fp64 for fp64 logits), the
    same on every tp rank.

    logits [s, b, padded_vocab / tp], contiguous, are overwritten: with ``weights``, [s, b] in the
    dtype of the result, by the gradient of the weighted sum of the result. labels are [s, b] int64
    below ``vocab_size``, the true size without padding. Weights that depend on the losses are a
    function of them, called once. ``z_weight`` adds to the gradient, not to the value, that of so
    many times the square of log sum exp(logits). Two small all-reduces: the maximum, then the sum
    with the target's logit.
    """
    rows = logits.detach().flatten(0, -2)
    targets = labels.flatten()
    elements = ops.host_chunk if devices.is_host(rows.device) else DEVICE_CHUNK
    step = max(1, elements // rows.shape[1])
    chunks = [slice(start, start + step) for start in range(0, len(rows), step)]
    valid = min(max(0, vocab_size - tp.rank * rows.shape[1]), rows.shape[1])
    if tp.size > 1 or callable(weights):
        losses = _vocab_parallel(
            rows, targets, chunks, tp, valid, _of_rows(weights, labels.shape), z_weight
        )
    elif weights is None:
        losses = torch.cat([_loss(rows[chunk], targets[chunk], valid) for chunk in chunks])
    else:
        row_weights = weights.flatten()
        losses = torch.cat(
            [
                ops.cross_entropy(rows[chunk], targets[chunk], row_weights[chunk], valid, z_weight)
                for chunk in chunks
            ]
        )
    return losses.view(labels.shape)


def _of_rows(weights: Tensor | TokenWeights | None, shape: torch.Size) -> TokenWeights | None:
    """Return the weights as a function from losses of rows [s * b]."""
    if weights is None:
        return None
    if isinstance(weights, Tensor):
        known = weights.flatten()
        return lambda losses: known
    return lambda losses: weights(losses.view(shape)).flatten()


def _loss(logits: Tensor, labels: Tensor, valid: int) -> Tensor:
    _, _, sums, target = softmax_stats(logits, labels, valid)
    return sums.log() - target


def _vocab_parallel(
    rows: Tensor,
    labels: Tensor,
    chunks: list[slice],
    tp: Axis,
    valid: int,
    weights_of: TokenWeights | None,
    z_weight: float,
) -> Tensor:
    """Return the losses of rows [t, v / tp]: each rank reads its columns, all ranks meet, and each
    writes the gradient of its columns, with the weights that follow from the losses of all
    rows."""
    local = labels - tp.rank * rows.shape[1]
    outside = (local < 0) | (local >= rows.shape[1])
    index = local.masked_fill(outside, 0)
    fused = runs_kernels(rows.device, rows.dtype)
    stats_of = _kernel_stats if fused else _torch_stats
    stats = [stats_of(rows[chunk], index[chunk], valid) for chunk in chunks]
    own_max, sums, target = (torch.cat(parts) for parts in zip(*stats, strict=True))

    row_max = own_max.clone()
    collectives.all_reduce(row_max, tp, dist.ReduceOp.MAX, async_op=False).wait()
    # The statistics are relative to the rank's own maximum: shift them to that of all ranks.
    shift = own_max - row_max
    summed = torch.stack((sums * shift.exp(), (target + shift).masked_fill_(outside, 0.0)))
    collectives.all_reduce(summed, tp, async_op=False).wait()
    total, target = summed
    log_sum = total.log()
    losses = torch.sub(log_sum, target)
    if weights_of is None:
        return losses

    weights = weights_of(losses)
    # d(w z^2) = 2 w z dz for z, the logarithm of the denominator, and dz is the softmax.
    factor = weights * (1.0 + 2 * z_weight * (log_sum + row_max)) if z_weight else weights
    factor = factor * shift.exp() / total
    at_label = weights.masked_fill(outside, 0.0)
    if fused:
        from megatron_llama.model.nn.kernels.cross_entropy import gradient

        gradient(rows, index, own_max, factor, at_label, valid)
        return losses
    for chunk in chunks:
        # fp32 logits were overwritten by their exponentials; others are read again.
        exponentials = rows[chunk]
        if rows.dtype is not own_max.dtype:
            exponentials = softmax_stats(rows[chunk], index[chunk], valid)[0]
        exponentials.mul_(factor[chunk].unsqueeze(-1)).scatter_add_(
            -1, index[chunk].unsqueeze(-1), -at_label[chunk].unsqueeze(-1)
        )
        if rows.dtype is not own_max.dtype:
            rows[chunk] = exponentials
    return losses


def _torch_stats(logits: Tensor, labels: Tensor, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    _, row_max, sums, target = softmax_stats(logits, labels, valid)
    return row_max, sums, target


def _kernel_stats(logits: Tensor, labels: Tensor, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    from megatron_llama.model.nn.kernels.cross_entropy import softmax_stats

    row_max, sums, target = softmax_stats(logits, labels, valid)
    return row_max, sums, target - row_max


def argmax(logits: Tensor, tp: Axis, vocab_size: int) -> Tensor:
    """Return the token with the largest of logits [..., padded_vocab / tp], int64 [...]; of equal
    ones the first, as ``torch.argmax`` does. The same on every tp rank."""
    columns = logits.shape[-1]
    first = tp.rank * columns
    valid = min(max(0, vocab_size - first), columns)
    if valid:
        own_max, index = logits[..., :valid].max(-1)
        own_max = own_max.to(at_least_fp32(logits.dtype))
    else:  # all columns of this rank are padding
        dtype = at_least_fp32(logits.dtype)
        own_max = torch.full(logits.shape[:-1], float("-inf"), dtype=dtype, device=logits.device)
        index = torch.zeros_like(own_max, dtype=torch.int64)
    row_max = own_max.clone()
    collectives.all_reduce(row_max, tp, dist.ReduceOp.MAX, async_op=False).wait()
    # A rank without the maximum gives the last token of all, which is never smaller.
    token = torch.where(own_max == row_max, index + first, vocab_size - 1)
    collectives.all_reduce(token, tp, dist.ReduceOp.MIN, async_op=False).wait()
    return token
