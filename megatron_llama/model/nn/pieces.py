"""Linear layers over tp whose messages are cut into pieces, each under a part of the product.

With sequence parallelism a column-parallel layer multiplies the rank's own rows while the first
piece of the others' is gathered, and a piece while the next one is on its way. A row-parallel layer
sums a piece while the next one is multiplied; backward it gathers its gradient as a column-parallel
layer gathers its input. Without sequence parallelism a row-parallel layer sums whole rows so. What
a backward pass hides anyway stays as it is (``linear.py``).

A piece has rows of every rank (``model/plan/pieces.py``), and its products are written to their
places, so the order of tokens is that of whole messages. All ranks issue the same messages in the
same order. Wang et al., "Overlap Communication with Dependent Computation via Decomposition in
Large Deep Learning Models" (2022), section 3, decompose into transfers around a ring; here they are
collectives, whose volume is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from megatron_llama.engine import host_gemm as gemm
from megatron_llama.engine.comm import collectives
from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.param_handle import ParamHandle, wait_unsharded
from megatron_llama.model.nn.linear import (
    Linear,
    keep_for_backward,
    start_input_again,
    wait_for_layer,
    weight_gradient,
)
from megatron_llama.model.nn.recompute import Recomputable
from megatron_llama.model.plan.pieces import piece_spans

AHEAD = 2
"""Pieces that are gathered or on their way at once: one is multiplied, and one travels."""


class _Gathers:
    """The gathers of a shard [s / tp, ...], piece by piece: each as [tp, rows of a rank, ...].

    Without ``whole`` the pieces take turns in ``AHEAD`` buffers; with it, [s, ...], they lie there
    one after the other."""

    def __init__(
        self, shard: Tensor, tp: Axis, pieces: int, *, whole: Tensor | None = None
    ) -> None:
        self._shard = shard.contiguous()
        self._tp = tp
        self.spans = piece_spans(len(shard), pieces)
        self._whole = whole
        longest = max(span.stop - span.start for span in self.spans)
        self._buffers = (
            [shard.new_empty(tp.size * longest, *shard.shape[1:]) for _ in self.spans[:AHEAD]]
            if whole is None
            else []
        )
        self._started: list[tuple[Tensor, collectives.Pending]] = []
        for _ in self.spans[:AHEAD]:
            self._start()

    def _start(self) -> None:
        piece = len(self._started)
        span = self.spans[piece]
        size = self._tp.size
        if self._whole is None:
            full = self._buffers[piece % AHEAD][: size * (span.stop - span.start)]
        else:
            full = self._whole[size * span.start : size * span.stop]
        message = collectives.all_gather(full, self._shard[span], self._tp)
        self._started.append((full.view(size, -1, *full.shape[1:]), message))

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows of each rank that a piece has, and the piece. The caller has issued its
        reads of a piece when it asks for the next."""
        for piece, span in enumerate(self.spans):
            full, message = self._started[piece]
            message.wait()
            yield span, full
            if len(self._started) < len(self.spans):
                self._start()


def _others(tp: Axis) -> list[slice]:
    """Return the other ranks, those before this one and those behind it."""
    around = (slice(0, tp.rank), slice(tp.rank + 1, tp.size))
    return [ranks for ranks in around if ranks.start < ranks.stop]


def _multiply_gathered(
    gathers: _Gathers, shard: Tensor, tp: Axis, targets: Sequence[tuple[Tensor, Tensor, Any]]
) -> None:
    """Multiply the rank's own rows, then the others', piece by piece. ``targets``: an output [s, b,
    f], its weight [f, d] and a bias or None."""
    columns = [
        (out.view(tp.size, -1, out.shape[-1]), weight, bias) for out, weight, bias in targets
    ]
    own = shard.reshape(1, -1, shard.shape[-1])
    for out, weight, bias in columns:
        gemm.linear_into(out[tp.rank : tp.rank + 1], own, weight, bias)
    tokens = own.shape[1] // len(shard)
    for span, full in gathers:
        rows = slice(span.start * tokens, span.stop * tokens)
        piece = full.flatten(1, -2)
        for ranks in _others(tp):
            for out, weight, bias in columns:
                gemm.linear_into(out[ranks, rows], piece[ranks], weight, bias)


class PiecedColumn(Linear):
    """``Linear`` of an input that is gathered in several pieces; its backward pass is the same."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tp: Axis,
        column: bool,
        gathers: int,
        recompute: Recomputable | None,
        count: int,
        *parameters: Tensor,
    ) -> Tensor:
        weights = parameters[:count]
        biases = parameters[count:] or (None,) * count
        keep_for_backward(ctx, x, recompute, weights)
        ctx.tp = tp
        ctx.column = column
        ctx.sequence = True
        ctx.unsharded = []
        ctx.bias_handles = []
        # Before the weights are waited for: their own gathers may run meanwhile.
        pieces = _Gathers(x, tp, gathers)
        for weight, bias in zip(weights, biases, strict=True):
            wait_for_layer(ctx, weight, bias)
        sizes = [len(weight) for weight in weights]
        out = x.new_empty(len(x) * tp.size, *x.shape[1:-1], sum(sizes))
        outputs = out.split_with_sizes(sizes, dim=-1)
        _multiply_gathered(pieces, x, tp, list(zip(outputs, weights, biases, strict=True)))
        return out


def row_linear(
    x: Tensor | Recomputable,
    weight: Tensor,
    addition: Tensor | None,
    tp: Axis,
    *,
    sequence_parallel: bool,
    pieces: int,
) -> Tensor:
    """Multiply x [s, b, d/tp] by this rank's columns [f, d/tp] of the weight, add ``addition`` [s,
    b, f], and sum over tp: [s, b, f], or with sequence parallelism this rank's [s/tp, b, f]."""
    value, recompute = (x.value, x) if isinstance(x, Recomputable) else (x, None)
    out = _PiecedRow.apply(  # type: ignore[no-untyped-call]
        value, tp, sequence_parallel, pieces, recompute, addition, weight
    )
    return cast(Tensor, out)


class _PiecedRow(torch.autograd.Function):
    """The product of a row-parallel layer and its sum over tp, a piece of which is summed while the
    next one is multiplied."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tp: Axis,
        sequence: bool,
        pieces: int,
        recompute: Recomputable | None,
        addition: Tensor | None,
        weight: Tensor,
    ) -> Tensor:
        keep_for_backward(ctx, x, recompute, (weight,))
        ctx.tp = tp
        ctx.sequence = sequence
        ctx.pieces = pieces
        ctx.unsharded = wait_unsharded(weight)
        # Without sequence parallelism a rank has all rows of a piece, as if it were alone.
        ranks = tp.size if sequence else 1
        length = len(x) // ranks
        inputs = x.reshape(ranks, length, *x.shape[1:])
        added = None if addition is None else addition.reshape(ranks, length, *addition.shape[1:])
        out = x.new_empty(length, *x.shape[1:-1], len(weight))
        messages = []
        for span in piece_spans(length, pieces):
            terms = x.new_empty(ranks, *out[span].shape) if sequence else out[span].unsqueeze(0)
            gemm.linear_into(terms.flatten(1, -2), inputs[:, span].flatten(1, -2), weight)
            if added is not None:
                terms.add_(added[:, span])
            if sequence:
                message = collectives.reduce_scatter(out[span], terms.flatten(0, 1), tp)
            else:
                message = collectives.all_reduce(out[span], tp)
            messages.append(message)
        for message in messages:
            message.wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *sources = ctx.saved_tensors
        tp: Axis = ctx.tp
        needs_x, needs_addition, needs_weight = (ctx.needs_input_grad[i] for i in (0, 5, 6))
        gathers = None
        whole = grad
        if ctx.sequence:
            whole = grad.new_empty(len(grad) * tp.size, *grad.shape[1:])
            gathers = _Gathers(grad, tp, ctx.pieces, whole=whole)
        handle: ParamHandle | None = ctx.unsharded.handle
        x_grad = None
        if needs_x:
            ctx.unsharded.check()
            if gathers is None:
                x_grad = gemm.linear_backward(grad, weight)
            else:
                x_grad = grad.new_empty(*whole.shape[:-1], weight.shape[1])
                _multiply_gathered(gathers, grad, tp, [(x_grad, weight.t(), None)])
        elif gathers is not None:
            for _ in gathers:
                pass  # arrived: nothing multiplies it here
        weight_grad = None
        if needs_weight:
            detached = (source.detach() for source in sources)
            start_input = partial(start_input_again, ctx.make_input, None, *detached)
            spans = None if gathers is None else gathers.spans
            write = partial(_write_gradient, handle, whole, start_input, spans, tp.size)
            postponed = handle is not None and handle.keep_wgrad(lambda: cast(None, write()))
            weight_grad = None if postponed else write()
        added = None
        if needs_addition:
            added = whole if gathers is None else _in_sequence_order(whole, gathers.spans, tp.size)
        return x_grad, None, None, None, None, added, weight_grad


def _write_gradient(
    handle: ParamHandle | None,
    grad: Tensor,
    start_input: Callable[[], tuple[Tensor, collectives.Pending]],
    spans: Sequence[slice] | None,
    ranks: int,
) -> Tensor | None:
    """Multiply the gradient of the outputs, piece after piece with ``spans``, and the input, which
    is made only now."""
    x, _ = start_input()
    if spans is not None:
        x = _in_piece_order(x, spans, ranks)
    return weight_gradient(handle, grad, x)


def _in_piece_order(tensor: Tensor, spans: Sequence[slice], ranks: int) -> Tensor:
    """Copy [s, ...], rank after rank, piece after piece: sums over all tokens read it so, beside
    what was gathered in pieces."""
    by_rank = tensor.reshape(ranks, -1, *tensor.shape[1:])
    ordered = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    for span in spans:
        place = ordered[ranks * span.start : ranks * span.stop]
        place.view(ranks, -1, *tensor.shape[1:]).copy_(by_rank[:, span])
    return ordered


def _in_sequence_order(tensor: Tensor, spans: Sequence[slice], ranks: int) -> Tensor:
    """Copy [s, ...], piece after piece, to the order of the sequence."""
    ordered = torch.empty_like(tensor)
    by_rank = ordered.view(ranks, -1, *tensor.shape[1:])
    for span in spans:
        place = tensor[ranks * span.start : ranks * span.stop]
        by_rank[:, span] = place.view(ranks, -1, *tensor.shape[1:])
    return ordered
