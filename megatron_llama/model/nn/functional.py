"""RMSNorm, rotary embedding and gated activations, in the order of operations of HuggingFace's
models."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_llama.engine.param_handle import UnshardedRead, deliver, wait_unsharded
from megatron_llama.engine.tensors import rows
from megatron_llama.model.nn.ops import PLAIN, Gate, Ops, scaled
from megatron_llama.model.nn.recompute import Recomputable


class Residual(NamedTuple):
    """The residual stream, [s or s/tp, b, h], and the output of the last layer, which the norm in
    front of the next one adds in its own pass over memory. ``delta`` is None where the stream is
    complete."""

    stream: Tensor
    delta: Tensor | None = None

    @property
    def newest(self) -> Tensor:
        """The output of the last layer: the first tensor whose gradient backward completes."""
        return self.stream if self.delta is None else self.delta

    def sum(self) -> Tensor:
        """Return the complete stream, for all readers but a norm."""
        return self.stream if self.delta is None else self.stream + self.delta


class _AddNorm(torch.autograd.Function):
    """The sum of the residual stream and a layer's addition to it, and the norm of that sum.

    Both gradients of the sum, the one along the stream and the one through the norm, meet in this
    backward pass and are added where they are computed, in one pass over memory. The last two
    outputs serve to repeat the norm: its scale, and the read of the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        eps: float,
        one_plus: bool,
        ops: Ops,
    ) -> tuple[Tensor, Tensor, Tensor, UnshardedRead]:
        ctx.unsharded = wait_unsharded(weight)
        ctx.one_plus = one_plus
        ctx.ops = ops
        total, normed, scale = ops.add_norm(x, delta, weight, eps, one_plus)
        # A new tensor, because autograd refuses in-place changes of an input that is returned.
        total = total.detach() if delta is None else total
        ctx.save_for_backward(total, weight, scale)
        ctx.mark_non_differentiable(scale)
        # The sum behind the last norm has no reader: its gradient is None rather than zeros.
        ctx.set_materialize_grads(False)
        return total, normed, scale, ctx.unsharded

    @staticmethod
    def backward(
        ctx: Any, total_grad: Tensor | None, normed_grad: Tensor | None, *_: None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        if normed_grad is None:
            return total_grad, total_grad, None, None, None, None
        total, weight, scale = ctx.saved_tensors
        needs_x, needs_delta, needs_weight, *_ = ctx.needs_input_grad
        x_grad = None
        if needs_x or needs_delta:
            ctx.unsharded.check()
            x_grad, weight_grad = ctx.ops.norm_backward(
                normed_grad, total_grad, total, weight, scale, ctx.one_plus
            )
        else:
            weight_grad = rows(normed_grad.to(scale.dtype) * (total * scale)).sum(0)
        handle = ctx.unsharded.handle
        returned = deliver(handle, weight_grad, weight.dtype) if needs_weight else None
        return x_grad, x_grad if needs_delta else None, returned, None, None, None


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, ops: Ops = PLAIN, *, one_plus: bool = False
) -> Tensor:
    """Return x [..., h] scaled to unit root mean square, times weight [h] or, with ``one_plus``,
    times 1 + weight; sums are taken in fp32 (Zhang and Sennrich, 2019)."""
    return add_norm(x, None, weight, eps, ops, one_plus=one_plus)[1]


def add_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    ops: Ops = PLAIN,
    *,
    one_plus: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return x + delta, [..., h] each, and its ``rms_norm``.

    Go on with the returned sum instead of x: it gathers all gradients of the stream."""
    total, normed, *_ = _AddNorm.apply(  # type: ignore[no-untyped-call]
        x, delta, weight, eps, one_plus, ops
    )
    return total, normed


def recomputable_add_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    ops: Ops = PLAIN,
    *,
    one_plus: bool = False,
) -> tuple[Tensor, Recomputable]:
    """Compute ``add_norm``, with a norm that can be repeated from the sum and the scale."""
    results = _AddNorm.apply(x, delta, weight, eps, one_plus, ops)  # type: ignore[no-untyped-call]
    total, normed, scale, unsharded = results

    def repeat(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        unsharded.check()
        return scaled(x, weight, scale, one_plus)

    return total, Recomputable(normed, repeat, (total.detach(), weight.detach(), scale))


class _SplitHeads(torch.autograd.Function):
    """Rotates queries and keys in the storage of the projection, which attention keeps for backward
    anyway: so queries, keys and values are kept once."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, sizes: tuple[int, int], ops: Ops
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.ops = ops
        query, key = sizes
        # Detached: to autograd the three are new tensors, not views of an input that has changed.
        heads = heads_of(qkv.detach(), qkv.shape[-1] // (query + 2 * key))
        ops.rotate(heads[:, :, : query + key], cos, sin)
        return torch.split(heads, [query, key, heads.shape[2] - query - key], dim=2)

    @staticmethod
    def backward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        grad = ctx.ops.rotate_back(query, key, value, *ctx.saved_tensors)
        return grad.flatten(2), None, None, None, None


def heads_of(projected: Tensor, head_dim: int) -> Tensor:
    """View [s, b, n * d] as [s, b, n, d]."""
    return projected.view(*projected.shape[:2], -1, head_dim)


def split_heads(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, query: int, key: int, ops: Ops = PLAIN
) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv [s, b, (query + 2 key) * d] into queries [s, b, query, d], keys and values [s, b,
    key, d], and rotate the first r dims of queries and keys by cos and sin [s, 1 or b, 1, r / 2].

    ``qkv`` is overwritten. The two halves of the rotated dims are the two coordinates, as in
    HuggingFace."""
    heads = _SplitHeads.apply(qkv, cos, sin, (query, key), ops)  # type: ignore[no-untyped-call]
    rotated_query, rotated_key, value = heads
    return rotated_query, rotated_key, value


class _Gated(torch.autograd.Function):
    """Keeps its input alone: the activation of the gate is computed again in backward."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, gate: Gate) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.gate = gate
        return gate.forward(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        return ctx.gate.backward(grad, gate_up), None


def gated(gate_up: Tensor, gate: Gate) -> Tensor:
    """Return activation(gate) * up, [..., f], of a tensor [..., 2f] whose halves are gate and up
    (Shazeer, 2020)."""
    return _Gated.apply(gate_up, gate)  # type: ignore[no-any-return, no-untyped-call]


def recomputable_gated(gate_up: Tensor, gate: Gate) -> Recomputable:
    """Compute ``gated``, which can be repeated from its input."""
    return Recomputable(gated(gate_up, gate), gate.forward, (gate_up.detach(),))
