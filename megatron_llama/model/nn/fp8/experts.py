"""Products of experts in FP8, with both recipes.

An expert's rows are a tensor of their own, as the input of a dense layer is: with ``tensorwise``
the rows that a microbatch sends to an expert have one scale, and each expert's matrix has one. So
an expert that has all tokens is a dense MLP, to the bit. With ``blockwise`` neither a tile nor a
block has numbers of two experts.

Every tensor-parallel rank has whole experts, and along tp and cp each has rows of its own, so with
``tensorwise`` ranks agree on the largest magnitudes of all experts' rows, in one message. Where
ranks divide the experts, the rows of an expert come from the microbatches of several data-parallel
ranks, and those of each have a scale of their own, as without expert parallelism.

On a host codes are decoded for products of ``engine/host_gemm.py``, as in dense layers; on a device
one kernel multiplies the codes of all experts (``nn/kernels/scaled_experts.py``), and the host
waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama.engine import host_gemm
from megatron_llama.engine.comm import collectives
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.model.nn.fp8 import tensorwise
from megatron_llama.model.nn.fp8.codes import Blocks, tiles
from megatron_llama.model.nn.fp8.layers import Blockwise
from megatron_llama.model.nn.fp8.tensorwise import Tensorwise, TensorwiseWeights
from megatron_llama.model.nn.moe.rows import ExpertRows
from megatron_llama.model.nn.overlap import LayerProducts


class Coded(NamedTuple):
    """Rows [n, k] or matrices [E, f, k] as codes; a number is its code times a scale."""

    codes: Tensor
    scales: Tensor
    """fp32; of rows [n, k / 128] or [n, 1], of matrices [E, f / 128, k / 128] or [E, 1, 1]."""


def expert_product(x: Coded, weights: Coded, groups: ExpertRows) -> Tensor:
    """Multiply each expert's rows of x [n, k] by its matrix, of weights [E, f, k]: bf16, [n, f]."""
    width = weights.codes.shape[1]
    if devices.is_fake(x.codes):
        # A traced run has the operator of a device, not what stands for it on a host.
        traced: Tensor = scaled_experts(*x, *weights, groups.ends)
        return traced
    if groups.sizes is None:
        from megatron_llama.model.nn.kernels import scaled_experts as kernels  # where Triton is

        return kernels.linear(*x, *weights, groups.ends)
    out = torch.empty(len(x.codes), width, dtype=torch.bfloat16, device=x.codes.device)
    bounds = pairwise(accumulate(groups.sizes, initial=0))
    for expert, (start, end) in enumerate(bounds):
        if start < end:
            part = _decoded(x.codes[start:end], x.scales[start:end])
            matrix = _decoded(weights.codes[expert], weights.scales[expert])
            out[start:end] = host_gemm.linear(part, matrix).to(torch.bfloat16)
    return out


@torch.library.custom_op("megatron_llama::scaled_experts", mutates_args=())
def scaled_experts(
    codes: Tensor, scales: Tensor, weights: Tensor, weight_scales: Tensor, ends: Tensor
) -> Tensor:
    """The kernel's product (``nn/kernels/scaled_experts.py``) as one operator."""
    from megatron_llama.model.nn.kernels import scaled_experts as kernels  # where Triton is

    return kernels.linear(codes, scales, weights, weight_scales, ends)


@scaled_experts.register_fake
def _scaled_experts(
    codes: Tensor, scales: Tensor, weights: Tensor, weight_scales: Tensor, ends: Tensor
) -> Tensor:
    return codes.new_empty((len(codes), weights.shape[1]), dtype=torch.bfloat16)


def _decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers [n, k] that codes stand for, rounded to fp32, of scales for each row or
    SIDE rows, and each number or SIDE numbers of it."""
    height, width = (size // count for size, count in zip(codes.shape, scales.shape, strict=True))
    whole = scales.repeat_interleave(height, 0) if height > 1 else scales
    return (torch.unflatten(codes.float(), 1, (-1, width)) * whole.unsqueeze(-1)).flatten(1)


class BlockwiseExperts:
    """``ExpertProducts`` of the blockwise recipe. ``weights`` keeps the codes of all layers."""

    def __init__(self, weights: Blockwise) -> None:
        self._weights = weights

    def linear(self, x: Tensor, weight: Tensor, groups: ExpertRows) -> Tensor:
        forward: Blocks = self._weights.codes(weight, len(groups.ends)).forward
        return expert_product(Coded(*tiles(x)), _below(forward, len(groups.ends)), groups)

    def linear_backward(self, grad: Tensor, weight: Tensor, groups: ExpertRows) -> Tensor:
        backward: Blocks = self._weights.codes(weight, len(groups.ends)).backward
        return expert_product(Coded(*tiles(grad)), _beside(backward, len(groups.ends)), groups)


def _below(weight: Blocks, experts: int) -> Coded:
    """View codes [E * f, k], and their scales, by expert."""
    return Coded(*(torch.unflatten(values, 0, (experts, -1)) for values in weight))


def _beside(weight: Blocks, experts: int) -> Coded:
    """View the codes [k, E * f] of the transposed weight, and their scales, by expert: [E, k,
    f]."""
    return Coded(*(torch.unflatten(values, 1, (experts, -1)).transpose(0, 1) for values in weight))


def stacked_codes(weight: Tensor, experts: int) -> tuple[tensorwise.Codes, tensorwise.Codes]:
    """Return the codes of a weight [E * f, k] of so many experts, and those of the transposed
    weight, [k, E * f], with the scale of each expert: [E]."""
    parts = torch.unflatten(weight.detach(), 0, (experts, -1))
    codes = torch.empty_like(weight, dtype=tensorwise.NUMBERS)
    scales = []
    # One by one: no more than a matrix in fp32 exists at once.
    for part, place in zip(parts, torch.unflatten(codes, 0, (experts, -1)), strict=True):
        made = tensorwise.codes(part, tensorwise.NUMBERS)
        place.copy_(made.codes)
        scales.append(made.scale)
    forward = tensorwise.Codes(codes, torch.stack(scales))
    return forward, tensorwise.transposed(forward)


class TensorwiseExperts:
    """``ExpertProducts`` of the tensorwise recipe. ``axes``: along which ranks hold other rows of a
    microbatch. ``microbatches``: those whose tokens come together where ranks divide experts."""

    def __init__(self, weights: TensorwiseWeights, axes: Sequence[Axis], microbatches: int) -> None:
        self._weights = weights
        self._axes = [axis for axis in axes if axis.size > 1]
        self._microbatches = microbatches

    def linear(self, x: Tensor, weight: Tensor, groups: ExpertRows) -> Tensor:
        experts = len(groups.ends)
        forward: tensorwise.Codes = self._weights.codes(weight, experts).forward
        matrices = Coded(
            torch.unflatten(forward.codes, 0, (experts, -1)), forward.scale.view(-1, 1, 1)
        )
        return expert_product(self._coded(x, tensorwise.NUMBERS, groups), matrices, groups)

    def linear_backward(self, grad: Tensor, weight: Tensor, groups: ExpertRows) -> Tensor:
        experts = len(groups.ends)
        backward: tensorwise.Codes = self._weights.codes(weight, experts).backward
        turned = torch.unflatten(backward.codes, 1, (experts, -1)).transpose(0, 1)
        matrices = Coded(turned, backward.scale.view(-1, 1, 1))
        return expert_product(self._coded(grad, tensorwise.GRADIENTS, groups), matrices, groups)

    def _coded(self, x: Tensor, dtype: torch.dtype, groups: ExpertRows) -> Coded:
        """Return the codes of rows [n, k]: those that a microbatch sends to an expert have one
        scale."""
        numbers = self._tensors_of(groups)
        tensors = len(groups.ends) * self._microbatches
        of_rows = torch.linalg.vector_norm(x, torch.inf, dim=1).float()
        # Infinity if a number is not finite: a MAX over ranks may drop NaN.
        of_rows = of_rows.nan_to_num(nan=torch.inf, posinf=torch.inf)
        # The last one stands for rows behind those of the last expert.
        found = of_rows.new_zeros(tensors + 1).scatter_reduce_(0, numbers, of_rows, "amax")
        for axis in self._axes:
            largest = found[:tensors]
            collectives.all_reduce(largest, axis, dist.ReduceOp.MAX, async_op=False).wait()
        reach = torch.finfo(dtype).max
        factors = tensorwise.factor_of(found, reach)
        scaled = x.to(torch.float32, copy=True).mul_(factors[numbers, None]).clamp_(-reach, reach)
        return Coded(scaled.to(dtype), factors.reciprocal()[numbers, None])

    def _tensors_of(self, groups: ExpertRows) -> Tensor:
        """Return the number of each row's tensor, [n]: its expert, and the microbatch that it comes
        from."""
        places = torch.arange(len(groups.order), device=groups.order.device)
        experts = torch.searchsorted(groups.ends, places, right=True)
        if groups.elsewhere is None:
            return experts
        # The table has the tokens of one microbatch after the other.
        of_rows = groups.order // (groups.elsewhere.numel() // self._microbatches)
        behind = len(groups.ends) * self._microbatches
        return (experts * self._microbatches + of_rows).clamp_(max=behind)


def with_experts(layer: LayerProducts, mesh: Mesh) -> LayerProducts:
    """Return the products of a layer in FP8, with those of its experts."""
    products = layer["products"]
    if isinstance(products, Tensorwise):
        axes = (mesh.tp, mesh.cp)
        microbatches = 1 if mesh.ep is None else mesh.ep.size
        # Along tp and cp ranks have other tokens, and along tp the same weights.
        alone = Tensorwise(products.weights, inputs=axes, grads=axes, whole_weights=True)
        return {
            **layer,
            "experts": TensorwiseExperts(products.weights, axes, microbatches),
            "shared_expert": {"products": alone},
        }
    assert isinstance(products, Blockwise)
    return {**layer, "experts": BlockwiseExperts(products)}
