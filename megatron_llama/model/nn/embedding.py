"""Vocabulary-parallel embedding (Shoeybi et al., 2019, section 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_llama.engine.comm import autograd
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.param_handle import ParamHandle, wait_unsharded
from megatron_llama.model.nn.linear import empty_weight


class _Lookup(torch.autograd.Function):
    """Looks up the ids whose rows this rank holds, from row ``first`` on (None: it holds all rows),
    and gives zeros for the others. The row ``untrained`` of this rank, if any, gets no gradient.

    Backward does not read the weight, and runs only if it is trained: ids have no gradient."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, first: int | None, untrained: int | None
    ) -> Tensor:
        ctx.weight_shape = weight.shape
        ctx.untrained = untrained
        ctx.handle = wait_unsharded(weight).handle
        if first is None:
            ctx.save_for_backward(ids, None)
            return F.embedding(ids, weight)
        local = ids - first
        outside = (local < 0) | (local >= weight.shape[0])
        local = local.masked_fill(outside, 0)
        ctx.save_for_backward(local, outside)
        return F.embedding(local, weight).masked_fill_(outside.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, None]:
        local, outside = ctx.saved_tensors
        if outside is not None:
            # Not 0.0, which would turn a -0.0 of the view into 0.0 wherever it is added.
            grad = grad.masked_fill(outside.unsqueeze(-1), -0.0)
        handle: ParamHandle | None = ctx.handle
        if handle is None:
            zeros = grad.new_zeros(ctx.weight_shape)
            return None, _add_rows(zeros, local, grad, ctx.untrained), None, None
        deliver = partial(_deliver, handle, local, grad, ctx.untrained)
        if not handle.keep_wgrad(deliver):
            deliver()
        return None, None, None, None


def _deliver(handle: ParamHandle, rows: Tensor, grad: Tensor, untrained: int | None) -> None:
    view, beta = handle.grad_view()
    if beta == 0.0:  # most rows are not written by this contribution
        view.zero_()
    _add_rows(view, rows, grad, untrained)
    handle.grad_written()


def _add_rows(view: Tensor, rows: Tensor, grad: Tensor, untrained: int | None) -> Tensor:
    """Add grad [s, b, h] to rows [s, b] of the view, in the same order every time, and return the
    view. The row ``untrained`` keeps what it has, such as the gradient of a tied head."""
    kept = None if untrained is None else view[untrained].clone()
    rows = rows.flatten()
    values = grad.flatten(0, -2).to(view.dtype)
    # index_add_ uses atomics on a GPU, and an accumulating index_put_ uses them on a CPU with
    # several threads: sums would depend on their order.
    if devices.is_host(view.device):
        view.index_add_(0, rows, values)
    else:
        view.index_put_((spread_idle(rows, values, len(view)),), values, accumulate=True)
    # One row is put back, rather than a mask applied to all of grad, which may not be written.
    if kept is not None:
        view[untrained].copy_(kept)
    return view


def spread_idle(rows: Tensor, values: Tensor, count: int) -> Tensor:
    """Return ``rows`` [n], each below ``count``, where the values [n, h] that are nothing but zeros
    go to other rows, one after the other.

    A GPU adds the values of one row one after the other: 8,192 tokens of which 7,168 belong to
    other tp ranks, or are padding behind the last label, would be as many additions in a row. Zeros
    may be added anywhere."""
    idle = torch.linalg.vector_norm(values, ord=math.inf, dim=-1) == 0.0  # False for NaN
    return torch.where(idle, torch.arange(len(rows), device=rows.device) % count, rows)


def uniform_noise(scale: Tensor, seeds: Sequence[int], hidden: int, dtype: torch.dtype) -> Tensor:
    """Return a vector uniform in [-scale, scale) for each token of a batch, [s, b, h].

    scale is float32 [s, b]. The vectors of a sample follow from its seed alone, whatever the
    layout; a GPU draws other numbers than a CPU."""
    columns = []
    for seed in seeds:
        generator = torch.Generator(scale.device).manual_seed(seed)
        columns.append(
            torch.rand(len(scale), hidden, generator=generator, device=scale.device)
            .mul_(2.0)
            .sub_(1.0)
        )
    return torch.stack(columns, dim=1).mul_(scale.unsqueeze(-1)).to(dtype)


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are split over tp: rank r holds rows [r, r + 1) * padded_vocab / tp.
    ``multiplier``, rounded to the dtype of the rows, is a factor of the looked-up rows.
    ``padding_idx`` is a row to which lookups give no gradient, as in ``torch.nn.Embedding``."""

    def __init__(
        self,
        padded_vocab: int,
        hidden: int,
        *,
        tp: Axis,
        sequence_parallel: bool,
        multiplier: float = 1.0,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.multiplier = multiplier
        self.padding_idx = padding_idx
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.weight = empty_weight(padded_vocab // tp.size, hidden)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids [s, b] int64: [s or s/tp, b, h]."""
        rows_per_rank = self.weight.shape[0]
        first = None if self.tp.size == 1 else self.tp.rank * rows_per_rank
        untrained = None
        if self.padding_idx is not None and self.padding_idx // rows_per_rank == self.tp.rank:
            untrained = self.padding_idx % rows_per_rank
        partial = _Lookup.apply(  # type: ignore[no-untyped-call]
            ids, self.weight, first, untrained
        )
        rows = (
            autograd.scatter_sequence(partial, self.tp)
            if self.sequence_parallel
            else autograd.reduce(partial, self.tp)
        )
        return rows if self.multiplier == 1.0 else rows * rounded(self.multiplier, rows.dtype)


def rounded(value: float, dtype: torch.dtype) -> float:
    """Return the number of a floating-point dtype that is nearest to ``value``.

    Computed without tensors, whose values a traced run (``planner/trace``) does not have."""
    mantissa, exponent = math.frexp(value)
    steps = 2.0 / torch.finfo(dtype).eps
    return math.ldexp(round(mantissa * steps) / steps, exponent)
