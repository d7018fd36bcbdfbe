"""The product of an input and a weight in FP8."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_llama.engine import host_gemm
from megatron_llama.engine.comm import device as devices
from megatron_llama.model.nn.fp8.codes import Blocks, Tiles, decoded

ALIGNMENT = 4
"""cuBLAS reads fp32 scales by 16 bytes: columns of an input's, and rows of a weight's."""


def product(x: Tiles, weight: Blocks) -> Tensor:
    """Multiply x [..., k] by weight [n, k]: bf16, [..., n].

    By definition it is the fp32 product of the numbers that the codes stand for, rounded to bf16,
    and on a CPU it is computed so. A GPU multiplies the codes, and rounds its sums elsewhere; a
    traced run has its operator."""
    if devices.is_host(x.codes.device) and not devices.is_fake(x.codes):
        return host_gemm.linear(decoded(x), decoded(weight)).to(torch.bfloat16)
    tokens = x.codes.shape[:-1].numel()
    codes, scales = (values.flatten(0, -2) for values in x)
    block_scales = weight.scales
    if tokens % ALIGNMENT:
        codes = F.pad(codes.view(torch.uint8), (0, 0, 0, -tokens % ALIGNMENT)).view(codes.dtype)
        scales = F.pad(scales, (0, 0, 0, -tokens % ALIGNMENT))
    if scales.stride(0) != 1:
        scales = scales.t().clone(memory_format=torch.contiguous_format).t()
    if block_scales.shape[1] % ALIGNMENT:
        block_scales = F.pad(block_scales, (0, -block_scales.shape[1] % ALIGNMENT))
    out = F.scaled_mm(
        codes,
        weight.codes.t(),
        scales,
        F.ScalingType.BlockWise1x128,
        block_scales.t(),
        F.ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    # Not a view to autograd: the sum over tp is taken in place.
    shape = [*x.codes.shape[:-1], out.shape[1]]
    result: Tensor = torch.ops.aten._unsafe_view(out.narrow(0, 0, tokens), shape)
    return result
