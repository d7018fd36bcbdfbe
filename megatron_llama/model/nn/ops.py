"""The operations of layers between their matrix products: functions of tensors alone, without
autograd and without parameter handles.

``PLAIN`` is torch, operator by operator, and defines what each function means. A compiler
(``compiled.py``) or an accelerator's kernels (``kernels/``) replace some of them. The choice is
made once, in ``build_stages``, and passed to all layers as ``Ops``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_llama.engine.tensors import at_least_fp32, rows
from megatron_llama.model.plan.chunks import LOSS_CHUNK

DEVICE_CHUNK = 2**26
"""Logits whose cross entropy an accelerator computes at once, as its memory allows."""


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, one_plus: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of x [..., h] and delta; this sum scaled to unit root mean square, times
    weight [h], or with ``one_plus`` times 1 + weight; and the scale [..., 1], at least fp32.
    Without delta the sum is x itself."""
    total = x if delta is None else x + delta
    scale = inverse_rms(total, eps)
    return total, scaled(total, weight, scale, one_plus), scale


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return the scale [..., 1] that gives x [..., h] unit root mean square, at least fp32."""
    # 1 / sqrt(norm^2 / h + eps), with the norm summed in fp32 and no fp32 copy of x.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=at_least_fp32(x.dtype))
    return torch.addcmul(norm.new_full((1,), eps), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()


def scaled(x: Tensor, weight: Tensor, scale: Tensor, one_plus: bool) -> Tensor:
    """Return the norm of x from its scale. It is rounded before a weight is applied, as in
    HuggingFace's LLaMA, and with ``one_plus`` behind it alone, as in its Gemma."""
    if one_plus:
        return (x * scale).mul_(_factor(weight, scale.dtype, one_plus)).to(x.dtype)
    return (x * scale).to(x.dtype).mul_(weight)


def _factor(weight: Tensor, dtype: torch.dtype, one_plus: bool) -> Tensor:
    """Return the factor of a norm, in this dtype."""
    return weight.to(dtype) + 1.0 if one_plus else weight.to(dtype)


def norm_backward(
    grad: Tensor, stream: Tensor | None, x: Tensor, weight: Tensor, scale: Tensor, one_plus: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, in its dtype, and of the weight [h], in the dtype of the scale.

    ``grad`` is the gradient of the norm, and ``stream`` that of x along the residual stream, which
    is added to the result."""
    grad = grad.to(scale.dtype)
    weight = _factor(weight, scale.dtype, one_plus)
    normed = x * scale
    product = grad * normed
    # d/dx of x * rsqrt(mean(x^2) + eps): remove the component along x, then rescale.
    along = torch.matmul(product, weight).unsqueeze(-1)
    x_grad = (grad * weight).addcmul_(normed, along, value=-1.0 / x.shape[-1]).mul_(scale)
    if stream is not None:
        x_grad.add_(stream)
    return x_grad.to(x.dtype), rows(product).sum(0)


def norm_heads(
    heads: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, one_plus: bool, query: int
) -> tuple[Tensor, Tensor]:
    """Replace each of the heads [s, b, n, d], of which the first ``query`` are queries and the
    others keys, by its norm, with a weight [d] for queries and another one for keys.

    Return the tensors for ``norm_heads_backward``: a copy of the heads, and the scales [s, b, n,
    1], at least fp32."""
    # In place, because attention keeps the projection's output: with this order only the heads that
    # are normalized exist twice.
    kept = heads.clone(memory_format=torch.contiguous_format)
    scale = inverse_rms(kept, eps)
    weight = _weights_of_heads(query_weight, key_weight, query, kept.shape[2])
    heads.copy_(scaled(kept, weight, scale, one_plus))
    return kept, scale


def norm_heads_backward(
    grad: Tensor,
    kept: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    scale: Tensor,
    one_plus: bool,
    query: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of a projection, in its dtype, whose first heads [s, b, n, d] have been
    replaced by their norms, and of both weights [d], in the dtype of the scale. ``grad`` is that of
    all heads of the result: behind the n heads come the values, whose gradient stays as it is."""
    count = kept.shape[2]
    values = grad[:, :, count:]
    weight = _weights_of_heads(query_weight, key_weight, query, count)
    weight = _factor(weight, scale.dtype, one_plus)
    grad = grad[:, :, :count].to(scale.dtype)
    normed = kept * scale
    product = grad * normed
    along = (product * weight).sum(-1, keepdim=True)
    heads_grad = (grad * weight).addcmul_(normed, along, value=-1.0 / kept.shape[-1]).mul_(scale)
    sums = product.sum((0, 1))
    whole = torch.cat((heads_grad.to(kept.dtype), values), dim=2)
    return whole, sums[:query].sum(0), sums[query:].sum(0)


def head_factors(
    query_weight: Tensor, key_weight: Tensor, query: int, heads: int, one_plus: bool
) -> Tensor:
    """Return the factor of each head's norm, [n, d]."""
    weight = _weights_of_heads(query_weight, key_weight, query, heads)
    return _factor(weight, weight.dtype, one_plus)


def _weights_of_heads(query_weight: Tensor, key_weight: Tensor, query: int, heads: int) -> Tensor:
    """Return the weight of each head, [n, d]."""
    return torch.cat((query_weight.expand(query, -1), key_weight.expand(heads - query, -1)))


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first r dims of every head [s, b, n, d], one half with the other, by cos and sin
    [s, 1 or b, 1, r / 2], in place. Computed at least in fp32."""
    _rotate(heads, cos, sin, 1.0)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, sign: float) -> None:
    first, second = heads.narrow(-1, 0, 2 * cos.shape[-1]).chunk(2, dim=-1)
    rotate_pairs(first, second, cos, sin, sign)


def rotate_pairs(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor, sign: float) -> None:
    """Rotate both coordinates of pairs, [s, b, n, r / 2], by cos and ``sign`` times sin, in
    place."""
    rotated = first * cos
    if first.dtype is rotated.dtype:
        rotated.addcmul_(second, sin, value=-sign)
        second.mul_(cos).addcmul_(first, sin, value=sign)
    else:  # sums in fp32, rounded once
        rotated.sub_(second * sin, alpha=sign)
        second.copy_((second * cos).add_(first * sin, alpha=sign))
    first.copy_(rotated)


def rotate_back(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient [s, b, n + 2 n_kv, d] of the projection, from those of the rotated
    queries and keys and of the values."""
    grad = torch.cat((query, key, value), dim=2)
    _rotate(grad.narrow(2, 0, query.shape[2] + key.shape[2]), cos, sin, -1.0)
    return grad


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of [..., 2f]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of ``gate_up``; silu is computed again."""
    gate, up = gate_up.chunk(2, dim=-1)
    result = torch.empty_like(gate_up)
    gate_grad, up_grad = result.chunk(2, dim=-1)
    torch.mul(grad, F.silu(gate), out=up_grad)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=gate_grad)
    return result


def geglu(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up of [..., 2f], with the approximation of gelu by tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def geglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of ``gate_up``; gelu is computed again."""
    gate, up = gate_up.chunk(2, dim=-1)
    result = torch.empty_like(gate_up)
    gate_grad, up_grad = result.chunk(2, dim=-1)
    torch.mul(grad, F.gelu(gate, approximate="tanh"), out=up_grad)
    torch.ops.aten.gelu_backward.grad_input(
        grad * up, gate, approximate="tanh", grad_input=gate_grad
    )
    return result


def softmax_stats(
    logits: Tensor, labels: Tensor, valid: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the statistics of the softmax of rows [t, v]: exp(logit - max), at least fp32, and 0
    from column ``valid`` on; the max; the sum of the exponentials; and the logit of column
    ``labels`` minus the max; the last three [t].

    Rows of fp32 or wider are overwritten."""
    logits = logits.to(at_least_fp32(logits.dtype))
    if valid < logits.shape[1]:
        logits[:, valid:] = float("-inf")  # padding has no probability
    row_max = logits.amax(-1, keepdim=True)
    if not valid:
        # This rank has padding only: -inf minus -inf would be NaN.
        row_max.clamp_(min=torch.finfo(logits.dtype).min)
    target = logits.sub_(row_max).gather(-1, labels.unsqueeze(-1))
    sums = logits.exp_().sum(-1)
    return logits, row_max.squeeze(-1), sums, target.squeeze(-1)


def cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor, valid: int, z_weight: float
) -> Tensor:
    """Return the negative log-likelihood [t] of ``labels`` [t] by logits [t, v], which are
    overwritten by the gradient of its sum weighted by ``weights``.

    ``weights`` [t] are at least fp32, ``valid`` columns are no padding, and ``z_weight`` is that of
    ``model/nn/loss.py``."""
    exponentials, row_max, sums, target = softmax_stats(logits, labels, valid)
    log_sum = sums.log()
    # The gradient is weight * (softmax - one_hot), and the z-loss adds 2 z dz to the softmax part.
    factor = weights * (1.0 + 2 * z_weight * (log_sum + row_max)) if z_weight else weights
    exponentials.mul_((factor / sums).unsqueeze(-1)).scatter_add_(
        -1, labels.unsqueeze(-1), -weights.unsqueeze(-1)
    )
    if exponentials.dtype is not logits.dtype:
        logits.copy_(exponentials)
    return log_sum - target


class Gate(NamedTuple):
    """A gated activation of [..., 2f], and its gradient from that of its result [..., f]."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Ops:
    """One implementation of each of the functions above, with their names and meanings."""

    add_norm: Callable[
        [Tensor, Tensor | None, Tensor, float, bool], tuple[Tensor, Tensor, Tensor]
    ] = add_norm
    norm_backward: Callable[
        [Tensor, Tensor | None, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]
    ] = norm_backward
    norm_heads: Callable[[Tensor, Tensor, Tensor, float, bool, int], tuple[Tensor, Tensor]] = (
        norm_heads
    )
    norm_heads_backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, bool, int], tuple[Tensor, Tensor, Tensor]
    ] = norm_heads_backward
    rotate: Callable[[Tensor, Tensor, Tensor], None] = rotate
    rotate_back: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = rotate_back
    swiglu: Callable[[Tensor], Tensor] = swiglu
    swiglu_backward: Callable[[Tensor, Tensor], Tensor] = swiglu_backward
    geglu: Callable[[Tensor], Tensor] = geglu
    geglu_backward: Callable[[Tensor, Tensor], Tensor] = geglu_backward
    cross_entropy: Callable[[Tensor, Tensor, Tensor, int, float], Tensor] = cross_entropy
    host_chunk: int = LOSS_CHUNK
    """Logits whose cross entropy a CPU computes at once."""

    def gate(self, hidden_act: str) -> Gate:
        """Return the gated activation of an MLP by the name of its activation in config.json."""
        gates = {
            "silu": Gate(self.swiglu, self.swiglu_backward),
            "gelu_pytorch_tanh": Gate(self.geglu, self.geglu_backward),
        }
        return gates[hidden_act]


PLAIN = Ops()
