"""Matrix products of linear layers on a CPU, by the library that is fastest for them there.

In fp32 torch calls MKL, which on a processor that is not Intel's leaves half of AVX-512 unused:
oneDNN's product, which torch has too, takes half of the time there. Both sum in fp32.

In bf16, where the processor has no instructions for it, factors are widened to fp32 a block at a
time, and products are rounded to bf16: the same sums in another order, up to 40 times as fast.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.tensors import accumulate, rows

MIN_ONEDNN_PRODUCTS = 2**22
"""Multiplications from which on a product is worth oneDNN's dearer call."""
WGRAD_CHUNK = 2**21
"""Elements of a weight gradient that are computed at once, as many as a cache holds."""
MIN_WIDENED_ROWS = 4
"""Rows of the left factor from which on a product is worth the widening of the right one."""
WIDE_SIDE = 1024
"""Rows and columns of each factor, and of the product, that exist in fp32 at once."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x [..., d] by weight [f, d] and add bias [f]: [..., f]."""
    if prefers_onednn(x, weight):
        return _unflatten(_onednn_linear(rows(x), weight, bias), x)
    if multiplies_in_fp32(x):
        return _unflatten(_rounded(rows(x), weight.t(), bias), x)
    if bias is None:
        return F.linear(x, weight)
    return _unflatten(F.linear(rows(x), weight, bias), x)  # F.linear would return a view


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Write ``linear`` of x [blocks, m, d] to out [blocks, m, f], whose blocks may lie apart."""
    if devices.is_host(x.device):
        for target, block in zip(out, x, strict=True):
            target.copy_(linear(block, weight, bias))
        return
    # One call of cuBLAS, which takes any distance between blocks, and between rows.
    right = weight.t().expand(len(x), -1, -1)
    if bias is None:
        torch.bmm(x, right, out=out)
    else:
        torch.baddbmm(bias, x, right, out=out)


def gradient(grad: Tensor) -> Tensor:
    """Return what ``linear_backward`` takes of the gradient of an output."""
    return grad


def linear_backward(grad: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient [..., d] of the input of ``linear`` from that of its output, [..., f]."""
    if prefers_onednn(grad, weight):
        return _unflatten(_onednn_linear(rows(grad), weight.t()), grad)
    if multiplies_in_fp32(grad):
        return _unflatten(_rounded(rows(grad), weight), grad)
    return torch.matmul(grad, weight)


def linear_backward_into(out: Tensor, grad: Tensor, weight: Tensor) -> None:
    """Write ``linear_backward`` of grad [blocks, m, f] to out [blocks, m, d], likewise."""
    linear_into(out, grad, weight.t())


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """Multiply left [m, k] by right [k, n]: [m, n]."""
    return _onednn_linear(left, right.t()) if prefers_onednn(left, right) else mm(left, right)


def mm(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute ``torch.mm``, but widened if the processor has no bf16."""
    if multiplies_in_fp32(left):
        return _rounded(left, right, out=out)
    return torch.mm(left, right, out=out)


def accumulate_product(view: Tensor, beta: float, left: Tensor, right: Tensor) -> None:
    """Set ``view = beta * view + left @ right``, where the view may be wider than the factors.

    No product of a CPU writes into such a view. So some rows of the product at a time, few enough
    for a cache, are computed and added in place."""
    if multiplies_in_fp32(left):
        for place, product in _in_fp32(left, right):
            accumulate(view[place], beta, product)
        return
    step = max(1, WGRAD_CHUNK // view.shape[1])
    for start in range(0, len(view), step):
        block = left[start : start + step]
        accumulate(view[start : start + step], beta, matmul(block, right))


def computes(left: Tensor, right: Tensor) -> bool:
    """Whether this module computes a product instead of torch's own call."""
    return multiplies_in_fp32(left) or prefers_onednn(left, right)


def multiplies_in_fp32(left: Tensor) -> bool:
    """Whether the product of left [..., k] with a matrix of its dtype is computed in fp32."""
    width = left.shape[-1]
    enough = width > 0 and left.numel() >= MIN_WIDENED_ROWS * width
    return enough and devices.widens_bf16(left)


def _rounded(
    left: Tensor, right: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Multiply in fp32, add a bias, and round to the dtype of the factors."""
    out = left.new_empty(len(left), right.shape[1]) if out is None else out
    for place, product in _in_fp32(left, right):
        out[place].copy_(product if bias is None else product.add_(bias[place[1]]))
    return out


def _in_fp32(left: Tensor, right: Tensor) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
    """Yield the product of left [m, k] and right [k, n] in fp32, block by block, each with its
    place."""
    for row in range(0, len(left), WIDE_SIDE):
        for column in range(0, right.shape[1], WIDE_SIDE):
            place = slice(row, row + WIDE_SIDE), slice(column, column + WIDE_SIDE)
            columns = torch.split(left[place[0]], WIDE_SIDE, dim=1)
            parts = zip(columns, torch.split(right[:, place[1]], WIDE_SIDE), strict=True)
            first = next(parts)
            product = first[0].float() @ first[1].float()
            for wide in parts:
                product.addmm_(wide[0].float(), wide[1].float())
            yield place, product


def prefers_onednn(left: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN is asked for the product over the last dim of ``left``: in fp32, on a CPU that
    MKL does not serve well, where the product is large enough."""
    # Empty sums, such as the weight gradient of no tokens, are zeros, which oneDNN refuses to make.
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
    """Reshape [tokens, f] to [..., f]. Not a view to autograd, which forbids in-place changes of
    views that a function returns: the sum over tp is taken in place."""
    unflat: Tensor = torch.ops.aten._unsafe_view(result, [*like.shape[:-1], result.shape[1]])
    return unflat
