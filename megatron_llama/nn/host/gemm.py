"""Matrix products of a linear layer, by the library that is fastest for them here.

In fp32 torch calls MKL, which on a processor that is not Intel's leaves half of AVX-512 unused:
oneDNN's product, which torch has too, takes half of the time there. Both sum in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_llama.distributed import device as devices
from megatron_llama.nn.ops import rows

LEAST = 2**22
"""Multiplications from which on a product is worth the dearer call."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., d] and weight [f, d] -> [..., f]."""
    if not apart(x, weight):
        return F.linear(x, weight)
    return _shaped(_onednn(rows(x), weight), x)


def linear_backward(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient [..., d] of x from that of ``linear``, [..., f]."""
    if not apart(grad, weight):
        return torch.matmul(grad, weight)
    return _shaped(_onednn(rows(grad), weight.t()), grad)


def product(left: Tensor, right: Tensor) -> Tensor:
    """left [m, k] and right [k, n] -> [m, n]."""
    return _onednn(left, right.t()) if apart(left, right) else left @ right


def apart(left: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN is asked for the product over the last dim of ``left``: in fp32 on such a
    host, where it is large enough."""
    return (
        left.dtype is torch.float32
        and left.numel() * weight.numel() >= LEAST * left.shape[-1]
        and not devices.is_fake(left)
        and devices.is_host(left.device)
        and devices.prefers_onednn()
    )


def _onednn(left: Tensor, weight: Tensor) -> Tensor:
    """left [m, k] and weight [n, k], of any strides -> [m, n]."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, weight, None, "none", [], "")
    return result


def _shaped(result: Tensor, like: Tensor) -> Tensor:
    """[t, f] as [..., f]. Not a view to autograd, which would not let it be added to in place."""
    if like.dim() == 2:
        return result
    shaped: Tensor = torch.ops.aten._unsafe_view(result, [*like.shape[:-1], result.shape[1]])
    return shaped
