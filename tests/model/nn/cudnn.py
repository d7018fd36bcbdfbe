"""cuDNN's attention, computed on the CPU by its published contract: for the code around it, which only a GPU runs otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from megatron_llama.model.nn import attention
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
NEWEST = 91900


def _scores(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    scores = query.double() @ key.double().repeat_interleave(groups, dim=1).mT / query.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return scores


class CuDNN(TorchDispatchMode):
    """Stands for the two operators. The statistics are max + log(sum(exp(score - max))), natural logarithms in fp32 [b, n, s, 1], in the order of
    their dims; backward wants them so, and takes grouped heads. torch makes a plan for backward once for each layout of queries, keys and values,
    and the plan has the layouts of the output and its gradient in it."""

    def __init__(self) -> None:
        super().__init__()
        self.forward, self.backward = 0, 0
        self.plans = dict[Any, Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._scaled_dot_product_cudnn_attention.default:
            self.forward += 1
            return self._forward(*args)
        if func is _aten._scaled_dot_product_cudnn_attention_backward.default:
            self.backward += 1
            return self._backward(*args)
        return func(*args, **(kwargs or {}))

    def _forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: None, with_statistics: bool, dropout: float = 0.0, causal: bool = False
    ) -> Any:
        assert bias is None and with_statistics and dropout == 0.0
        assert query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] % 8 == 0
        scores = _scores(query, key, causal)
        groups = query.shape[1] // key.shape[1]
        out = (scores.softmax(-1) @ value.double().repeat_interleave(groups, dim=1)).to(query.dtype)
        empty = torch.empty(0)
        return out, scores.logsumexp(-1, keepdim=True).float(), empty, empty, query.shape[2], key.shape[2], empty, empty, empty

    def _backward(self, *args: Any) -> Any:
        grad, query, key, value, out, statistics, _, _, bias, _, _, queries, keys, dropout, causal = args
        assert bias is None and dropout == 0.0 and (queries, keys) == (query.shape[2], key.shape[2])
        assert statistics.shape == (*query.shape[:3], 1) and statistics.dtype is torch.float32 and statistics.is_contiguous()
        assert grad.stride(-1) == 1
        (*known, out_layout, grad_layout) = ((part.shape, part.stride()) for part in (query, key, value, out, grad))
        assert self.plans.setdefault((*known, causal), (out_layout, grad_layout)) == (out_layout, grad_layout), "this plan is for other layouts"
        groups = query.shape[1] // key.shape[1]
        wide_key, wide_value = (part.double().repeat_interleave(groups, dim=1) for part in (key, value))
        probabilities = (_scores(query, key, causal) - statistics.double()).exp()
        delta = (grad.double() * out.double()).sum(-1, keepdim=True)
        score_grad = probabilities * (grad.double() @ wide_value.mT - delta) / query.shape[-1] ** 0.5
        per_head = (score_grad.mT @ query.double(), probabilities.mT @ grad.double())
        key_grad, value_grad = (part.unflatten(1, (key.shape[1], groups)).sum(2) for part in per_head)
        return (score_grad @ wide_key).to(query.dtype), key_grad.to(key.dtype), value_grad.to(value.dtype)


@contextmanager
def on_hopper() -> Iterator[CuDNN]:
    """A section in which attention takes the CPU for a GPU whose cuDNN computes everything that it may be given."""
    with pytest.MonkeyPatch.context() as patch, CuDNN() as mode:
        patch.setattr(attention, "is_host", lambda device: False)
        patch.setattr(attention, "can_use_cudnn_attention", lambda params: True)
        patch.setattr(torch.backends.cudnn, "version", lambda: NEWEST)
        patch.setattr(attention, "_CUDNN_TILE", 1)  # the fault of cuDNN that it avoids is not in this one
        yield mode
