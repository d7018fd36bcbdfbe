"""Linear layers over tp whose messages are cut into pieces, each under a part of the product.

With sequence parallelism a column-parallel layer multiplies the rank's own rows while the first
piece of the others' is gathered, and a piece while the next one is on its way. A row-parallel layer
sums a piece while the next one is multiplied; backward it gathers its gradient as a column-parallel
layer gathers its input. Every other row-parallel layer, such as an MLP's, keeps its weight gradient
for the message of the next one, such as the attention's, whose own product is too short to hide it.
Without sequence parallelism a row-parallel layer sums whole rows so. What a backward pass hides
anyway stays as it is (``linear.py``).

A piece has rows of every rank (``model/plan/pieces.py``), and its products are written to their
places, so the order of tokens is that of whole messages. All ranks issue the same messages in the
same order. Wang et al., "Overlap Communication with Dependent Computation via Decomposition in
Large Deep Learning Models" (2022), section 3, decompose into transfers around a ring; here they are
collectives, whose volume is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from megatron_llama.engine.comm import collectives
from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.param_handle import ParamHandle, wait_unsharded
from megatron_llama.model.nn.linear import RowLinear, start_input_again, weight_gradient
from megatron_llama.model.nn.overlap import Products
from megatron_llama.model.nn.recompute import Recomputable
from megatron_llama.model.plan.pieces import piece_spans

AHEAD = 2
"""Pieces that are gathered or on their way at once: one is multiplied, and one travels."""


class InPieces:
    """``TensorOverlap`` by messages in pieces."""

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces
        self.kept = KeptGradient()

    def gather(self, shard: Tensor, tp: Axis) -> Pieces:
        return Pieces(shard, tp, self.pieces)

    def sum(self, x: Tensor | Recomputable, layer: RowLinear, addition: Tensor | None) -> Tensor:
        value, recompute = (x.value, x) if isinstance(x, Recomputable) else (x, None)
        out: Tensor = _PiecedRow.apply(  # type: ignore[no-untyped-call]
            value, layer, self, recompute, addition, layer.weight
        )
        return out


class KeptGradient:
    """A weight gradient that waits for a message to hide. It is computed at the end of its backward
    pass at the latest."""

    def __init__(self) -> None:
        self._works: dict[int, Callable[[], object]] = {}
        """By backward pass: one may run inside another, and what one that failed has left behind
        must not count in the next."""

    def keep(self, work: Callable[[], object]) -> None:
        """Keep it. Called in a backward pass that has kept none."""
        task = torch._C._current_graph_task_id()
        self._works[task] = work
        Variable._execution_engine.queue_callback(lambda: self._compute(task))

    def compute(self) -> bool:
        """Compute what this backward pass has kept, if it has; whether it had."""
        task = torch._C._current_graph_task_id()
        had = task in self._works
        self._compute(task)
        return had

    def _compute(self, task: int) -> None:
        work = self._works.pop(task, None)
        if work is not None:
            with torch.no_grad():  # which is on at the end of a pass
                work()


class Pieces:
    """A shard [s / tp, b, d]: the rows of all ranks are gathered piece by piece, and multiplied.

    Without ``whole`` the pieces take turns in ``AHEAD`` buffers; with it, [s, b, d], they are kept
    there one after the other, and all are on their way at once."""

    def __init__(
        self, shard: Tensor, tp: Axis, pieces: int, *, whole: Tensor | None = None
    ) -> None:
        self._shard = shard.contiguous()
        self._tp = tp
        self._whole = whole
        self.spans = piece_spans(len(shard), pieces)
        """The rows of each rank that a piece has."""
        longest = max(span.stop - span.start for span in self.spans)
        self._buffers = (
            [shard.new_empty(tp.size * longest, *shard.shape[1:]) for _ in self.spans[:AHEAD]]
            if whole is None
            else []
        )
        self._started: list[tuple[Tensor, collectives.Pending]] = []
        for _ in self.spans if self._buffers == [] else self._buffers:
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
        self._started.append((full.view(size, -1, full.shape[-1]), message))

    def arrived(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows of each rank that a piece has, and the piece as [tp, tokens, d]. The
        caller has issued its reads of a piece when it asks for the next, which may overwrite it."""
        for piece, span in enumerate(self.spans):
            full, message = self._started[piece]
            message.wait()
            yield span, full
            if len(self._started) < len(self.spans):
                self._start()

    def products(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], products: Products
    ) -> Tensor:
        """Multiply the rank's own rows at once and those of others as their pieces arrive; the
        result is that of ``GatheredInput``."""
        factors = [
            (len(weight), partial(products.linear_into, weight=weight, bias=bias))
            for weight, bias in zip(weights, biases, strict=True)
        ]
        return self.multiplied(factors)

    def multiplied(
        self,
        factors: Sequence[tuple[int, Callable[[Tensor, Tensor], None]]],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> Tensor:
        """Multiply all rows by ``factors``, each its columns and a function that writes products of
        rows [blocks, m, d] to [blocks, m, columns]; the outputs are stacked. ``meanwhile`` is other
        work, done before the first wait."""
        shard = self._shard
        tp = self._tp
        sizes = [columns for columns, _ in factors]
        out = shard.new_empty(len(shard) * tp.size, *shard.shape[1:-1], sum(sizes))
        outputs = out.view(tp.size, -1, out.shape[-1]).split_with_sizes(sizes, dim=-1)
        writers = [(target, write) for target, (_, write) in zip(outputs, factors, strict=True)]
        tokens = shard[0].numel() // shard.shape[-1]
        # The rank's own rows need no message: they are multiplied under the first one.
        own = shard.view(1, -1, shard.shape[-1])
        for target, write in writers:
            write(target[tp.rank : tp.rank + 1], own)
        meanwhile()
        others = [slice(0, tp.rank), slice(tp.rank + 1, tp.size)]
        for span, piece in self.arrived():
            rows = slice(span.start * tokens, span.stop * tokens)
            for ranks in others:
                if ranks.start < ranks.stop:
                    for target, write in writers:
                        write(target[ranks, rows], piece[ranks])
        return out


class _PiecedRow(torch.autograd.Function):
    """The product of a row-parallel layer and its sum over tp, a piece of which is summed while the
    next one is multiplied."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layer: RowLinear,
        overlap: InPieces,
        recompute: Recomputable | None,
        addition: Tensor | None,
        weight: Tensor,
    ) -> Tensor:
        sources = (x,) if recompute is None else recompute.sources
        ctx.save_for_backward(weight, *(sources if ctx.needs_input_grad[5] else ()))
        ctx.make_input = None if recompute is None else recompute.function
        ctx.layer = layer
        ctx.overlap = overlap
        ctx.unsharded = wait_unsharded(weight)
        tp = layer.tp
        # Without sequence parallelism a rank has all rows of a piece, as if it were alone.
        ranks = tp.size if layer.sequence_parallel else 1
        length = len(x) // ranks
        inputs = x.reshape(ranks, length, *x.shape[1:])
        added = None if addition is None else addition.view(ranks, length, *addition.shape[1:])
        out = x.new_empty(length, *x.shape[1:-1], len(weight))
        messages = []
        for span in piece_spans(length, overlap.pieces):
            terms = x.new_empty(ranks, *out[span].shape) if ranks > 1 else out[span].unsqueeze(0)
            layer.products.linear_into(terms.flatten(1, -2), inputs[:, span].flatten(1, -2), weight)
            if added is not None:
                terms.add_(added[:, span])
            messages.append(
                collectives.reduce_scatter(out[span], terms.flatten(0, 1), tp)
                if ranks > 1
                else collectives.all_reduce(out[span], tp)
            )
        for message in messages:
            message.wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *sources = ctx.saved_tensors
        layer: RowLinear = ctx.layer
        needs_x, _, _, _, needs_addition, needs_weight = ctx.needs_input_grad
        overlap: InPieces = ctx.overlap
        pieces = None
        whole = grad
        if layer.sequence_parallel:
            whole = grad.new_empty(len(grad) * layer.tp.size, *grad.shape[1:])
            pieces = Pieces(grad, layer.tp, overlap.pieces, whole=whole)
        x_grad = None
        had_kept = False

        def meanwhile() -> None:
            nonlocal had_kept
            had_kept = overlap.kept.compute()

        if needs_x:
            ctx.unsharded.check()
            if pieces is None:
                x_grad = layer.products.linear_backward(grad, weight)
            else:
                through = partial(layer.products.linear_backward_into, weight=weight)
                x_grad = pieces.multiplied([(weight.shape[1], through)], meanwhile)
        elif pieces is not None:
            meanwhile()
            for _ in pieces.arrived():
                pass  # Only the gradients of weight and addition read them.
        places = None if pieces is None else pieces.spans
        weight_grad = None
        if needs_weight:
            handle: ParamHandle | None = ctx.unsharded.handle
            # Detached: a weight gradient that is kept must not keep the graph below its input.
            detached = [source.detach() for source in sources]

            def write() -> Tensor | None:
                x, _ = start_input_again(ctx.make_input, None, *detached)
                x = x if places is None else _in_piece_order(x, places, layer.tp.size)
                return weight_gradient(handle, whole, x)

            if handle is None:
                weight_grad = write()
            elif not handle.keep_wgrad(write):
                if pieces is None or had_kept:
                    write()
                else:
                    overlap.kept.keep(write)
        added = None
        if needs_addition:
            added = whole if places is None else _in_sequence_order(whole, places, layer.tp.size)
        return x_grad, None, None, None, added, weight_grad


def _in_piece_order(tensor: Tensor, spans: Sequence[slice], ranks: int) -> Tensor:
    """Copy [s, ...] to the order in which pieces are kept: sums over all tokens read both so."""
    by_rank = tensor.reshape(ranks, -1, *tensor.shape[1:])
    ordered = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    for span in spans:
        place = ordered[ranks * span.start : ranks * span.stop]
        place.view(ranks, -1, *tensor.shape[1:]).copy_(by_rank[:, span])
    return ordered


def _in_sequence_order(tensor: Tensor, spans: Sequence[slice], ranks: int) -> Tensor:
    """Copy [s, ...] from the order in which pieces are kept to that of the sequence."""
    ordered = torch.empty_like(tensor)
    by_rank = ordered.view(ranks, -1, *tensor.shape[1:])
    for span in spans:
        place = tensor[ranks * span.start : ranks * span.stop]
        by_rank[:, span] = place.view(ranks, -1, *tensor.shape[1:])
    return ordered
