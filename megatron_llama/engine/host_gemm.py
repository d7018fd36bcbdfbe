"""Matrix products of linear layers on a CPU, by the library that is fastest for them there.

In fp32 torch calls MKL, which on a processor that is not Intel's leaves half of AVX-512 unused:
oneDNN's product, which torch has too, takes half of the time there. Both sum in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.tensors import accumulate, rows

MIN_ONEDNN_PRODUCTS = 2**22
"""Multiplications from which on a product is worth oneDNN's dearer call."""
WGRAD_CHUNK = 2**21
"""Elements of a weight gradient that are computed at once: what a cache holds."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x [..., d] by weight [f, d] and add bias [f]: [..., f]."""
    if not prefers_onednn(x, weight):
        if bias is None:
            return F.linear(x, weight)
        return _unflatten(F.linear(rows(x), weight, bias), x)  # F.linear would return a view
    return _unflatten(_onednn_linear(rows(x), weight, bias), x)


def linear_backward(grad: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient [..., d] of the input of ``linear`` from that of its output, [..., f]."""
    if not prefers_onednn(grad, weight):
        return torch.matmul(grad, weight)
    return _unflatten(_onednn_linear(rows(grad), weight.t()), grad)


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """Multiply left [m, k] by right [k, n]: [m, n]."""
    return _onednn_linear(left, right.t()) if prefers_onednn(left, right) else left @ right


def accumulate_product(view: Tensor, beta: float, left: Tensor, right: Tensor) -> None:
    """``view = beta * view + left @ right``, also for a view of a wider dtype than the factors.

    No product of a CPU writes into such a view, so rows of the product are made at a time, few
    enough to stay in a cache, and added in place."""
    step = max(1, WGRAD_CHUNK // view.shape[1])
    for start in range(0, len(view), step):
        part = left[start : start + step]
        accumulate(view[start : start + step], beta, matmul(part, right))


def prefers_onednn(left: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN is asked for the product over the last dim of ``left``: in fp32, on a CPU that
    MKL does not serve well, where the product is large enough."""
    # Sums of nothing, as the weight gradient of no tokens, are zeros, which oneDNN refuses to make.
    return (
        left.dtype is torch.float32
        and left.shape[-1] > 0
        and left.numel() * weight.numel() >= MIN_ONEDNN_PRODUCTS * left.shape[-1]
        and not devices.is_fake(left)
        and devices.is_host(left.device)
        and devices.prefers_onednn()
    )


def _onednn_linear(left: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply left [m, k] by weight [n, k], of any strides, and add bias [n]: [m, n]."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, weight, bias, "none", [], "")
    return result


def _unflatten(result: Tensor, like: Tensor) -> Tensor:
    """[tokens, f] -> [..., f]. Not a view to autograd, which forbids in-place changes of views that
    a function returns: the sum over tp is taken in place."""
    unflat: Tensor = torch.ops.aten._unsafe_view(result, [*like.shape[:-1], result.shape[1]])
    return unflat
