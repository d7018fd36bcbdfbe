"""The tensorwise recipe: codes with one scale for all of a tensor, e4m3 for inputs and weights, and
e5m2, which reaches further, for gradients.

A tensor is what one process multiplies in a microbatch: where tp or cp cut it, ranks agree on the
largest magnitude before they make codes, so codes do not depend on the layout. The factor is the
quotient of the largest code and that magnitude, rounded to fp32; the scale is its inverse. Codes
are rounded to the nearest, ties to even, and clamped, as those of torchao. A tensor that holds
infinity or NaN is NaN as a whole: the loss is too, and the step is skipped.

With ``--fp8-gather`` the inputs of column-parallel layers are gathered as codes. Those codes are
the same, so no number changes. What is gathered again for a weight gradient is in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_llama.engine import host_gemm
from megatron_llama.engine.comm import autograd, collectives
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.kernels import runs_kernels
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.model.nn.fp8.layers import KeptCodes
from megatron_llama.model.nn.linear import RowLinear, plain_linear
from megatron_llama.model.nn.overlap import LayerProducts, Products
from megatron_llama.model.nn.recompute import Recomputable

NUMBERS = torch.float8_e4m3fn
GRADIENTS = torch.float8_e5m2
LEAST = 1e-12
"""Tensors whose numbers are all smaller have the factor of this one."""


class Codes(NamedTuple):
    """A tensor as codes; a number is its code times the scale."""

    codes: Tensor
    """e4m3 or e5m2."""
    scale: Tensor
    """fp32, of no dimension."""


class Measured(NamedTuple):
    """A tensor, and its largest magnitude, on which the ranks that hold other parts of it are
    agreeing."""

    numbers: Tensor
    """bf16 or fp32."""
    largest: Tensor
    """fp32; valid after the wait."""
    agreeing: collectives.Pending
    """Along the first axis."""
    others: Sequence[Axis]

    def codes(self, dtype: torch.dtype) -> Codes:
        """Return the codes when all ranks agree."""
        self.agreeing.wait()
        for axis in self.others:
            collectives.all_reduce(self.largest, axis, dist.ReduceOp.MAX, async_op=False).wait()
        factor = factor_of(self.largest, torch.finfo(dtype).max)
        return Codes(_scaled(self.numbers, factor, dtype), factor.reciprocal())


def measured(x: Tensor, axes: Sequence[Axis], *, waits: bool) -> Measured:
    """Begin to agree on the largest magnitude of x, of which the ranks along ``axes`` hold other
    parts. ``waits``: codes are asked for at once."""
    largest = torch.linalg.vector_norm(x, torch.inf) if x.numel() else x.new_zeros(())
    # Infinity if a number is not finite: a MAX over ranks may drop NaN.
    largest = largest.float().nan_to_num(nan=torch.inf, posinf=torch.inf)
    cut = [axis for axis in axes if axis.size > 1]
    if not cut:
        return Measured(x, largest, collectives.DONE, ())
    agreeing = collectives.all_reduce(largest, cut[0], dist.ReduceOp.MAX, async_op=not waits)
    return Measured(x, largest, agreeing, cut[1:])


def codes(x: Tensor, dtype: torch.dtype, axes: Sequence[Axis] = ()) -> Codes:
    """Return codes of x, bf16 or fp32, of which the ranks along ``axes`` hold other parts."""
    return measured(x, axes, waits=True).codes(dtype)


def transposed(weight: Codes) -> Codes:
    """Return the codes [k, n] of a transposed weight, contiguous."""
    codes = weight.codes
    if not devices.is_fake(codes) and devices.runs_triton(codes.device):
        from megatron_llama.model.nn.fp8 import kernels

        return Codes(kernels.transposed(codes), weight.scale)
    return Codes(codes.t().clone(memory_format=torch.contiguous_format), weight.scale)


def decoded(encoded: Codes) -> Tensor:
    """Return the numbers that codes stand for, rounded to fp32."""
    return encoded.codes.float() * encoded.scale


def product(x: Codes, weight: Codes) -> Tensor:
    """Multiply x [..., k] by weight [n, k]: bf16, [..., n], of sums in fp32. On a CPU they are sums
    of decoded numbers: not every torch multiplies codes there. A traced run has a GPU's
    operator."""
    if devices.is_host(x.codes.device) and not devices.is_fake(x.codes):
        return host_gemm.linear(decoded(x), decoded(weight)).to(torch.bfloat16)
    out = F.scaled_mm(
        x.codes.flatten(0, -2),
        weight.codes.t(),
        x.scale,
        F.ScalingType.TensorWise,
        weight.scale,
        F.ScalingType.TensorWise,
        output_dtype=torch.bfloat16,
    )
    # Not a view to autograd: the sum over tp is taken in place.
    shape = [*x.codes.shape[:-1], out.shape[1]]
    result: Tensor = torch.ops.aten._unsafe_view(out, shape)
    return result


def factor_of(largest: Tensor, reach: float) -> Tensor:
    """Divide in fp64, so that only the quotient is rounded, whatever compiles it."""
    return (reach / largest.double().clamp(min=LEAST)).float()


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    if not devices.is_fake(x) and runs_kernels(x.device, x.dtype):
        from megatron_llama.model.nn.fp8 import kernels

        return kernels.scaled(x, factor, dtype)
    reach = torch.finfo(dtype).max
    return (
        (x.float() * factor).clamp(-reach, reach).to(dtype, memory_format=torch.contiguous_format)
    )


class Tensorwise:
    """``Products`` of the tensorwise recipe, for layers that tp cuts alike."""

    def __init__(
        self,
        weights: TensorwiseWeights,
        inputs: Sequence[Axis],
        grads: Sequence[Axis],
        *,
        whole_weights: bool = False,
    ) -> None:
        """``whole_weights``: every tensor-parallel rank has all of each."""
        self.weights = weights
        self._experts = int(whole_weights)
        self._inputs = inputs
        """Along which ranks hold other parts of an input."""
        self._grads = grads
        """And of the gradient of an output."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.linear_of_codes(codes(x, NUMBERS, self._inputs), weight, bias)

    def linear_of_codes(self, x: Codes, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply an input whose codes are there."""
        out = product(x, self.weights.codes(weight, self._experts).forward)
        return out if bias is None else out.add_(bias)

    def gradient(self, grad: Tensor) -> Measured:
        """Before the gather of an input, behind which this message would wait for a thousand times
        its own bytes."""
        return measured(grad, self._grads, waits=False)

    def linear_backward(self, grad: Measured, weight: Tensor) -> Tensor:
        weight_codes = self.weights.codes(weight, self._experts)
        return product(grad.codes(GRADIENTS), weight_codes.backward)

    def linear_into(
        self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> None:
        raise RuntimeError("a piece of a tensor has no scale of its own: --fp8 refuses pieces")

    def linear_backward_into(self, out: Tensor, grad: Tensor, weight: Tensor) -> None:
        self.linear_into(out, grad, weight)


class TensorwiseWeights(KeptCodes):
    """The codes of the weights of a process, which some axes cut."""

    def __init__(self, axes: Sequence[Axis] = ()) -> None:
        super().__init__()
        self._axes = axes

    def encoded(self, weight: Tensor, experts: int = 0) -> tuple[Codes, Codes]:
        if experts > 1:
            from megatron_llama.model.nn.fp8.experts import stacked_codes  # of few models

            return stacked_codes(weight, experts)
        forward = codes(weight, NUMBERS, () if experts else self._axes)
        return forward, transposed(forward)


def tensorwise_products(mesh: Mesh, *, gathers_codes: bool) -> LayerProducts:
    """Return the products of all layers in FP8 of a process."""
    weights = TensorwiseWeights((mesh.tp,))
    # Of column-parallel layers each rank multiplies whole rows, of row-parallel ones it has a part
    # of each; the gradients of their outputs are the other way round.
    column = Tensorwise(weights, inputs=(mesh.cp,), grads=(mesh.tp, mesh.cp))
    row = Tensorwise(weights, inputs=(mesh.tp, mesh.cp), grads=(mesh.cp,))
    products = LayerProducts(products=column, row_products=row)
    return {**products, "overlap": InCodes(column, mesh)} if gathers_codes else products


class InCodes:
    """``TensorOverlap`` that gathers the inputs of column-parallel layers as codes, with sequence
    parallelism only. Sums are waited for."""

    def __init__(self, products: Tensorwise, mesh: Mesh) -> None:
        self._products = products
        self._axes = (mesh.tp, mesh.cp)

    def gather(self, shard: Tensor, tp: Axis) -> GatheredCodes:
        # Waited for: what is gathered are codes, which need the scale of all rows.
        part = codes(shard, NUMBERS, self._axes)
        whole, gathering = autograd.start_all_gather(part.codes.view(torch.uint8), tp)
        return GatheredCodes(Codes(whole.view(NUMBERS), part.scale), gathering, self._products)

    def sum(self, x: Tensor | Recomputable, layer: RowLinear, addition: Tensor | None) -> Tensor:
        out = plain_linear(x, layer.weight, layer.tp, layer.products)
        return autograd.scatter_sequence(out if addition is None else out + addition, layer.tp)


class GatheredCodes(NamedTuple):
    """``GatheredInput``: the codes [s, b, d] of all rows, valid after the wait."""

    whole: Codes
    gathering: collectives.Pending
    multiply: Tensorwise

    def products(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], products: Products
    ) -> Tensor:
        self.gathering.wait()
        outputs = [
            self.multiply.linear_of_codes(self.whole, weight, bias)
            for weight, bias in zip(weights, biases, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
