"""torch's memory-efficient attention of accelerators, computed on the CPU in fp64 by what its source takes for granted: for the code around it,
which only a GPU runs otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from megatron_llama.model.nn import attention, documents, sliding
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


class Efficient(TorchDispatchMode):
    """Stands for the two operators. Heads are not grouped; the log-sum-exp has a multiple of 32 queries; heads and the rows of a bias
    have multiples of 16 bytes.
    Output is written token by token, [b, s, n, d], and in 16 bits backward reads it so, whatever its strides for tokens are."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = list[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if function is _aten._scaled_dot_product_efficient_attention.default:
            self.calls.append("forward")
            return self._forward(*args, **options)
        if function is _aten._scaled_dot_product_efficient_attention_backward.default:
            self.calls.append("backward")
            return self._backward(*args, **options)
        return function(*args, **options)

    @staticmethod
    def _scores(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, factor: float) -> Tensor:
        assert query.shape[:2] == key.shape[:2] == value.shape[:2], "the kernel knows no grouped heads"
        assert all(part.stride(-1) == 1 for part in (query, key, value))
        assert query.shape[-1] * query.element_size() % 16 == 0, "cutlassF: no kernel found to launch!"
        scores = query.double() @ key.double().mT * factor
        if bias is not None:
            assert bias.shape == scores.shape and bias.dtype is query.dtype
            assert bias.stride(-1) == 1 and bias.stride(-2) * bias.element_size() % 16 == 0
            scores += bias.double()
        return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf")) if causal else scores

    def _forward(self, *args: Any, scale: float | None = None) -> Any:
        query, key, value, bias, with_lse, dropout, causal = (*args, *(0.0, False)[len(args) - 5 :])
        assert with_lse and dropout == 0.0
        scores = self._scores(query, key, value, bias, causal, query.shape[-1] ** -0.5 if scale is None else scale)
        out = (scores.softmax(-1) @ value.double()).to(query.dtype)
        lse = out.new_full((*query.shape[:2], -(-query.shape[2] // 32) * 32), float("nan"), dtype=torch.float32)
        lse[..., : query.shape[2]] = scores.logsumexp(-1)
        empty = torch.empty(0)
        return out.transpose(1, 2).contiguous().transpose(1, 2), lse, empty, empty

    def _backward(self, *args: Any, scale: float | None = None) -> Any:
        grad, query, key, value, bias, out, lse, _, _, dropout, wanted, causal = (*args, *(False,)[len(args) - 11 :])
        batch, heads, length, head_dim = query.shape
        assert dropout == 0.0 and list(wanted) == [True, True, True, False]
        assert lse.shape == (batch, heads, -(-length // 32) * 32) and lse.dtype is torch.float32 and lse.stride(-1) == 1
        factor = head_dim**-0.5 if scale is None else scale
        if out.element_size() == 2:
            out = out.as_strided(out.shape, (out.stride(0), out.stride(1), heads * head_dim, 1))
        delta = (grad.double() * out.double()).sum(-1, keepdim=True)
        probabilities = (self._scores(query, key, value, bias, causal, factor) - lse[..., :length].double().unsqueeze(-1)).exp()
        score_grad = probabilities * (grad.double() @ value.double().mT - delta) * factor
        grads = (score_grad @ key.double(), score_grad.mT @ query.double(), probabilities.mT @ grad.double())
        return *(part.to(query.dtype) for part in grads), None


@contextmanager
def on_efficient(*, flash: bool = False) -> Iterator[Efficient]:
    """A section in which attention takes the CPU for a GPU. ``flash``: its flash attention takes heads of 8 to 256 elements; otherwise none."""
    with pytest.MonkeyPatch.context() as patch, Efficient() as efficient:
        for module in (attention, documents, sliding):
            patch.setattr(module, "is_host", lambda device: False)
        if not flash:
            patch.setattr(attention, "_LARGEST_FLASH_HEAD", 0)
        yield efficient
