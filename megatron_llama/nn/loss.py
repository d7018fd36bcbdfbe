"""Cross entropy over a vocabulary that is split over tp: no rank ever holds a full-vocabulary tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama.comm import collectives
from megatron_llama.mesh import Axis
from megatron_llama.nn.functional import at_least_fp32


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: Axis, vocab_size: int) -> Tensor:
        columns = logits.shape[-1]
        first = tp.rank * columns
        # The logits are consumed: a narrower dtype is widened into a new tensor, fp32 is overwritten.
        scores = logits.to(at_least_fp32(logits.dtype))
        scores[..., max(0, vocab_size - first) :] = float("-inf")  # padding has no probability
        largest = scores.amax(-1)
        collectives.all_reduce(largest, tp, dist.ReduceOp.MAX).wait()
        scores.sub_(largest.unsqueeze(-1))
        local = labels - first
        outside = (local < 0) | (local >= columns)
        index = local.masked_fill(outside, 0).unsqueeze(-1)
        target = scores.gather(-1, index).squeeze(-1).masked_fill_(outside, 0.0)
        probabilities = scores.exp_()
        sums = torch.stack((probabilities.sum(-1), target))
        collectives.all_reduce(sums, tp).wait()
        total, target = sums
        ctx.save_for_backward(probabilities.div_(total.unsqueeze(-1)), index, outside)
        ctx.dtype = logits.dtype
        return torch.sub(total.log(), target)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, index, outside = ctx.saved_tensors
        # softmax - one_hot, in place: the probabilities are this function's own and are used once.
        hit = torch.where(outside, 0.0, -1.0).to(probabilities.dtype).unsqueeze(-1)
        scores_grad = probabilities.scatter_add_(-1, index, hit).mul_(grad.unsqueeze(-1))
        return scores_grad.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, tp: Axis, vocab_size: int) -> Tensor:
    """Negative log-likelihood of each token, in fp32 (fp64 for fp64 logits).

    logits [s, b, padded_vocab / tp], overwritten; labels [s, b] int64 below ``vocab_size`` (the true, unpadded size).
    Returns [s, b], the same on every tp rank. Two small all-reduces: the maximum, then the sum with the target's score.
    """
    return _CrossEntropy.apply(logits, labels, tp, vocab_size)  # type: ignore[no-any-return, no-untyped-call]
