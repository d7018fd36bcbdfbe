"""Context parallelism that exchanges the sequence for heads (Jacobs et al., 2023, DeepSpeed
Ulysses), as autograd functions.

Before attention each rank has some tokens of all heads, in zig-zag order: of 2 x size chunks of the
sequence those at ``rank`` and at 2 x size - 1 - ``rank``. One all-to-all gives it all tokens of
some heads, in the order of the sequence, so attention is that of one process. Behind attention
another one restores the parts. The gradients go the other way. Nothing is kept for backward.

[Note: copies of an exchange] A message needs its parts one behind the other, and attention needs
the chunks in the order of the sequence. So a message is written once before it is sent and read
once behind it, and these two copies also select heads and reorder chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_llama.engine.comm.collectives import all_to_all
from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.plan.head_exchange import sent_key_heads
from megatron_llama.engine.tensors import at_least_fp32


def sequence_for_heads(
    query: Tensor, key: Tensor, value: Tensor, axis: Axis
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange query [t, b, n, d], key and value [t, b, n_kv, d], this rank's tokens in zig-zag
    order, for all s = t x size tokens of this rank's heads: [s, b, n / size, d], and as many heads
    of keys and values as these queries need. The results are views of one storage.

    ``size`` divides n. Collective over ``axis``."""
    heads = _SequenceForHeads.apply(query, key, value, axis)  # type: ignore[no-untyped-call]
    query, key, value = heads
    return query, key, value


def heads_for_sequence(out: Tensor, axis: Axis) -> Tensor:
    """Exchange all tokens [s, b, w] of this rank's heads for this rank's tokens of all heads,
    [s / size, b, size x w], in zig-zag order. Collective over ``axis``."""
    return _HeadsForSequence.apply(out, axis)  # type: ignore[no-any-return, no-untyped-call]


class _SequenceForHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, axis: Axis
    ) -> tuple[Tensor, ...]:
        size = axis.size
        sent_keys = sent_key_heads(query.shape[2], key.shape[2], size)
        queries = query.shape[2] // size
        keys = len(sent_keys) // size
        widths = [queries, keys, keys]
        tokens, batch, _, dim = query.shape
        sent = query.new_empty(size, tokens, batch, sum(widths), dim)
        sources = (query, _copied(key, sent_keys), _copied(value, sent_keys))
        for target, source in zip(torch.split(sent, widths, dim=3), sources, strict=True):
            target.copy_(_divided(source, 2, size).movedim(2, 0))
        ctx.axis = axis
        ctx.sent_keys = sent_keys
        ctx.keys = key.shape[2]
        return torch.split(_in_sequence_order(_exchanged(sent, axis)), widths, dim=2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        size = ctx.axis.size
        length, batch, queries, dim = grads[0].shape
        widths = [grad.shape[2] for grad in grads]
        sent = grads[0].new_empty(size, length // size, batch, sum(widths), dim)
        for target, grad in zip(torch.split(sent, widths, dim=3), grads, strict=True):
            _write_in_rank_order(target, grad)
        received = _exchanged(sent, ctx.axis)
        query_grad = received[:, :, :, :queries].movedim(0, 2).flatten(2, 3)
        # [2, t, b, heads sent, d]: keys, then values.
        others = _divided(received[:, :, :, queries:], 3, 2).movedim((3, 0), (0, 3))
        key_grad, value_grad = _summed(others.flatten(3, 4), ctx.sent_keys, ctx.keys)
        return query_grad, key_grad, value_grad, None


class _HeadsForSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        length, *others = out.shape
        sent = out.new_empty(axis.size, length // axis.size, *others)
        _write_in_rank_order(sent, out)
        return _exchanged(sent, axis).movedim(0, 2).flatten(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        parts = _divided(grad, 2, ctx.axis.size).movedim(2, 0)
        return _in_sequence_order(_exchanged(parts.contiguous(), ctx.axis)), None


def _exchanged(sent: Tensor, axis: Axis) -> Tensor:
    """Send [size, ...], a part to each rank, and return the parts from all ranks."""
    received = torch.empty_like(sent)
    all_to_all(received, sent, axis, async_op=False).wait()
    return received


def _copied(heads: Tensor, sent: Sequence[int]) -> Tensor:
    """Return the heads [t, b, n_kv, d] that are sent, copies included."""
    if len(sent) == heads.shape[2]:
        return heads
    return torch.stack([heads[:, :, head] for head in sent], dim=2)


def _summed(grads: Tensor, sent: Sequence[int], heads: int) -> Tensor:
    """Return the gradients [2, t, b, heads, d] of keys and values, of ``grads`` of what was sent:
    those of copies are summed in at least fp32, in rank order."""
    if len(sent) == heads:
        return grads
    wide = at_least_fp32(grads.dtype)
    sums = grads.new_zeros(*grads.shape[:3], heads, grads.shape[-1], dtype=wide)
    for place, head in enumerate(sent):
        sums[:, :, :, head] += grads[:, :, :, place]
    return sums.to(grads.dtype)


def _divided(tensor: Tensor, dim: int, count: int) -> Tensor:
    """View a dim as [count, rest]."""
    shape = tensor.shape
    return tensor.view(*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :])


def _in_sequence_order(parts: Tensor) -> Tensor:
    """Copy the parts of all ranks [size, t, ...], two chunks each, to [size x t, ...]."""
    early, late = _divided(parts, 1, 2).unbind(1)
    return torch.cat((*early.unbind(), *reversed(late.unbind())))


def _write_in_rank_order(parts: Tensor, whole: Tensor) -> None:
    """Copy [size x t, ...] to the parts of all ranks [size, t, ...], two chunks each."""
    early, late = _divided(parts, 1, 2).unbind(1)
    chunks = _divided(whole, 0, 2 * len(parts)).unbind()
    torch.stack(chunks[: len(parts)], out=early)
    torch.stack(chunks[: len(parts) - 1 : -1], out=late)
