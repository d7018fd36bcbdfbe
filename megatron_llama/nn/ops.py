"""What layers compute between their matrix products: functions of tensors alone, without autograd
and without the homes of weights.

``PLAIN`` is torch, operator by operator, and the meaning of each; a compiler (``compiled.py``) or
kernels of an accelerator take the place of some. Whoever builds a model chooses once, and its
layers hand the choice on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

HOST_CHUNK = 2**19
DEVICE_CHUNK = 2**26
"""Scores whose cross entropy is computed at once: what a host's cache holds, and what a device's
memory spares."""


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are taken: fp32, or fp64 for the reference runs."""
    return torch.promote_types(dtype, torch.float32)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, for which torch takes a microsecond where there is nothing to do."""
    return x if x.dtype is dtype else x.to(dtype)


def rows(x: Tensor) -> Tensor:
    """[..., h] as [tokens, h]; for which torch takes a microsecond where there is nothing to do."""
    return x if x.dim() == 2 else x.flatten(0, -2)


def accumulate(view: Tensor, beta: float, value: Tensor) -> None:
    """``view = beta * view + value``, beta 0 or 1."""
    if beta == 0.0:
        view.copy_(value)
    else:
        view.add_(value)


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of x [..., h] and delta, this scaled to unit root mean square times weight [h], and
    the scale [..., 1], which is at least fp32. Without delta the sum is x itself."""
    total = x if delta is None else x + delta
    norm = torch.linalg.vector_norm(total, dim=-1, keepdim=True, dtype=at_least_fp32(x.dtype))
    scale = torch.addcmul(norm.new_full((1,), eps), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    return total, scaled(total, weight, scale), scale


def scaled(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The norm again, from its scale. The product of scale with a narrower x is as wide as the
    scale."""
    return _as(x * scale, x.dtype).mul_(weight)


def norm_backward(
    grad: Tensor, stream: Tensor | None, x: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """From the gradient of the norm of x, and that of x by other ways (``stream``), the gradient of
    x, in its dtype, and that of the weight [h], as wide as the scale."""
    wide = _as(grad, scale.dtype)
    weight = _as(weight, scale.dtype)
    normed = x * scale
    product = wide * normed
    # d/dx of x * rsqrt(mean(x^2) + eps): remove the component along x, then rescale.
    along = torch.matmul(product, weight).unsqueeze(-1)
    x_grad = (wide * weight).addcmul_(normed, along, value=-1.0 / x.shape[-1]).mul_(scale)
    if stream is not None:
        x_grad.add_(stream)
    return _as(x_grad, x.dtype), rows(product).sum(0)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn the two halves of every head [s, b, n, d] by cos and sin [s, 1 or b, 1, d / 2], in
    place, computed at least in fp32."""
    _turn(heads, cos, sin, 1.0)


def _turn(heads: Tensor, cos: Tensor, sin: Tensor, sign: float) -> None:
    first, second = heads.chunk(2, dim=-1)
    turned = first * cos
    if heads.dtype is turned.dtype:
        turned.addcmul_(second, sin, value=-sign)
        second.mul_(cos).addcmul_(first, sin, value=sign)
    else:  # rounded once, at the end
        turned.sub_(second * sin, alpha=sign)
        second.copy_((second * cos).add_(first * sin, alpha=sign))
    first.copy_(turned)


def rotate_back(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient [s, b, n + 2 n_kv, d] of the projection whose queries and keys were turned: from
    theirs and the values'."""
    grad = torch.cat((query, key, value), dim=2)
    _turn(grad.narrow(2, 0, query.shape[2] + key.shape[2]), cos, sin, -1.0)
    return grad


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2f]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of ``gate_up``; silu is computed again."""
    gate, up = gate_up.chunk(2, dim=-1)
    result = torch.empty_like(gate_up)
    gate_grad, up_grad = result.chunk(2, dim=-1)
    torch.mul(grad, F.silu(gate), out=up_grad)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=gate_grad)
    return result


def softmax_stats(
    logits: Tensor, labels: Tensor, valid: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of rows [t, v]: exp(score - largest), at least fp32 and 0 from column ``valid`` on; the
    largest score, the sum, and the score of column ``labels`` less the largest, [t] each. The rows
    are overwritten if they are wide enough."""
    wide = _as(logits, at_least_fp32(logits.dtype))
    if valid < wide.shape[1]:
        wide[:, valid:] = float("-inf")  # padding has no probability
    largest = wide.amax(-1, keepdim=True)
    if not valid:
        largest.clamp_(min=torch.finfo(wide.dtype).min)
    target = wide.sub_(largest).gather(-1, labels.unsqueeze(-1))
    sums = wide.exp_().sum(-1)
    return wide, largest.squeeze(-1), sums, target.squeeze(-1)


def cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor, valid: int, z_weight: float
) -> Tensor:
    """Negative log-likelihood [t] of ``labels`` [t] by rows of scores [t, v], which become the
    gradient of the weighted sum of these.

    ``weights`` [t], at least fp32; ``valid``: columns that are no padding; ``z_weight``: see
    ``nn/loss.py``."""
    wide, largest, sums, target = softmax_stats(logits, labels, valid)
    logarithm = sums.log()
    pull = weights * (1.0 + 2 * z_weight * (logarithm + largest)) if z_weight else weights
    wide.mul_((pull / sums).unsqueeze(-1)).scatter_add_(
        -1, labels.unsqueeze(-1), -weights.unsqueeze(-1)
    )
    if wide.dtype is not logits.dtype:
        logits.copy_(wide)
    return logarithm - target


@dataclass(frozen=True)
class Ops:
    """One implementation of each of the functions above, with their names and meanings."""

    add_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor, Tensor]] = (
        add_norm
    )
    norm_backward: Callable[
        [Tensor, Tensor | None, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]
    ] = norm_backward
    rotate: Callable[[Tensor, Tensor, Tensor], None] = rotate
    rotate_back: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = rotate_back
    swiglu: Callable[[Tensor], Tensor] = swiglu
    swiglu_backward: Callable[[Tensor, Tensor], Tensor] = swiglu_backward
    cross_entropy: Callable[[Tensor, Tensor, Tensor, int, float], Tensor] = cross_entropy
    host_chunk: int = HOST_CHUNK
    """Scores at once on a host."""


PLAIN = Ops()
