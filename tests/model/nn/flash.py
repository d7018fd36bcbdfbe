"""torch's flash attention of accelerators, computed on the CPU in fp64 by its published contract: for the code around it, which only a GPU runs
otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from megatron_llama.model.nn import attention, documents, sliding
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model.nn.cudnn import NEWEST

_aten = torch.ops.aten


class Flash(TorchDispatchMode):
    """Stands for the four operators. The last query has the position of the last key, and a limit that is absent or negative is none; but beside
    another limit it is the number of keys. With starts, tokens are [t, n, d] of all documents, and their log-sum-exp is [n, t]."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = list[str]()
        self.scores = 0
        """Scores that forward was asked for, of all heads, masked ones aside."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if function is _aten._flash_attention_forward.default:
            self.calls.append("forward")
            return self._forward(*args, **options)
        if function is _aten._flash_attention_backward.default:
            self.calls.append("backward")
            return self._backward(*args, **options)
        if function is _aten._scaled_dot_product_flash_attention.default:
            self.calls.append("forward")
            dropout, causal = (*args[3:], *(0.0, False)[len(args) - 3 :])
            lengths = [part.shape[2] for part in args[:2]]
            tokens = [part.transpose(1, 2) for part in args[:3]]
            out, *rest = self._forward(*tokens, None, None, *lengths, dropout, causal, False, **options)
            return out.transpose(1, 2), rest[0], None, None, *lengths, *rest[1:]
        if function is _aten._scaled_dot_product_flash_attention_backward.default:
            self.calls.append("backward")
            tokens = [part.transpose(1, 2) for part in args[:5]]
            return tuple(part.transpose(1, 2) for part in self._backward(*tokens, *args[5:], **options))
        assert "attention" not in str(function), function
        return function(*args, **options)

    @staticmethod
    def _seen(queries: int, keys: int, causal: bool, left: int | None, right: int | None) -> Tensor:
        places, others = torch.arange(queries).unsqueeze(-1) + keys - queries, torch.arange(keys)
        seen = torch.ones(queries, keys, dtype=torch.bool)
        right = 0 if causal else right
        if left is not None and left >= 0 and (right is None or right < 0):
            right = keys
        if left is not None and left >= 0:
            seen &= others >= places - left
        if right is not None and right >= 0:
            seen &= others <= places + right
        return seen

    @staticmethod
    def _documents(starts: Tensor, tokens: tuple[Tensor, ...], longest: int) -> Iterator[list[Tensor]]:
        """The tokens of each document, as a batch of one."""
        assert starts.dtype is torch.int32 and starts[0] == 0 and starts[-1] == len(tokens[0])
        assert longest == starts.diff().max() and starts.diff().min() > 0, "the kernel needs the longest exactly"
        for first, last in pairwise(starts.tolist()):
            yield [part[first:last].unsqueeze(0) for part in tokens]

    def _forward(
        self, *args: Any, scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None
    ) -> Any:
        query, key, value, starts, other_starts, queries, keys, dropout, causal, debug = args
        assert dropout == 0.0 and not debug and query.dtype is torch.bfloat16 and query.stride(-1) == 1
        limits = (causal, window_size_left, window_size_right)
        empty = torch.empty(0)
        if starts is None:
            assert other_starts is None and (queries, keys) == (query.shape[1], key.shape[1])
            return *self._one(query, key, value, scale, *limits), empty, empty, empty
        assert starts is other_starts and queries == keys
        found = [self._one(*parts, scale, *limits) for parts in self._documents(starts, (query, key, value), keys)]
        outs, lses = zip(*found, strict=True)
        return torch.cat([out[0] for out in outs]), torch.cat([lse[0] for lse in lses], 1), empty, empty, empty

    def _one(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, *limits: Any) -> tuple[Tensor, Tensor]:
        q, k, v = (part.double().transpose(1, 2) for part in (query, key, value))
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        seen = self._seen(q.shape[2], k.shape[2], *limits)
        assert seen.any(-1).all(), "a query that sees nothing has an infinite log-sum-exp there"
        self.scores += q.shape[:2].numel() * int(seen.sum())
        scores = (q @ k.mT * (query.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(~seen, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).to(query.dtype), scores.logsumexp(-1).float()

    def _backward(
        self, *args: Any, scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None
    ) -> Any:
        grad, query, key, value, out, lse, starts, other_starts, queries, keys, dropout, causal, _, _ = args
        assert dropout == 0.0 and lse.is_contiguous()
        limits = (causal, window_size_left, window_size_right)
        if starts is None:
            assert other_starts is None and (queries, keys) == (query.shape[1], key.shape[1]) and lse.shape == out.transpose(1, 2).shape[:3]
            return self._one_backward(grad, query, key, value, out, lse, scale, *limits)
        assert starts is other_starts and queries == keys and lse.shape == (query.shape[1], len(query))
        documents = self._documents(starts, (grad, query, key, value, out, lse.T), keys)
        found = [self._one_backward(*parts, lse.transpose(1, 2), scale, *limits) for *parts, lse in documents]
        return tuple(torch.cat([part[0] for part in parts]) for parts in zip(*found, strict=True))

    def _one_backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float | None, *limits: Any
    ) -> tuple[Tensor, ...]:
        groups = query.shape[2] // key.shape[2]
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        g, q, k, v, o = (part.double().transpose(1, 2) for part in (grad, query, key, value, out))
        k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
        seen = self._seen(q.shape[2], k.shape[2], *limits)
        probabilities = (q @ k.mT * factor - lse.unsqueeze(-1)).exp().masked_fill(~seen, 0.0)
        score_grad = probabilities * (g @ v.mT - (g * o).sum(-1, keepdim=True)) * factor
        per_head = (score_grad.mT @ q, probabilities.mT @ g)
        dk, dv = (part.unflatten(1, (-1, groups)).sum(2) for part in per_head)
        return tuple(part.transpose(1, 2).to(query.dtype) for part in (score_grad @ k, dk, dv))


@contextmanager
def on_flash(*, cudnn: bool) -> Iterator[Flash]:
    """A section in which attention takes the CPU for a GPU whose flash attention computes everything that it takes. ``cudnn``: cuDNN would take
    it, too, and must not be asked."""
    with pytest.MonkeyPatch.context() as patch, Flash() as flash:
        for module in (attention, documents, sliding):
            patch.setattr(module, "is_host", lambda device: False)
        patch.setattr(attention, "can_use_cudnn_attention", lambda params: cudnn)
        patch.setattr(torch.backends.cudnn, "version", lambda: NEWEST)
        patch.setattr(attention, "_CUDNN_TILE", 1)
        yield flash


def document_mask(document_ids: Tensor) -> Tensor:
    """Bool [b, 1, s, s] for ids [s, b], True where a token may attend: to its document's tokens up to itself. Ids do not come back."""
    ids = document_ids.t()
    return (ids[:, None, :, None] == ids[:, None, None, :]).tril()
