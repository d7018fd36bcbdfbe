"""Where products in FP8 run."""

from __future__ import annotations

import torch

from megatron_llama.engine.comm import device as devices
from megatron_llama.errors import describe
from megatron_llama.model.plan.fp8 import BLOCKWISE

HOPPER = 9
"""The generation of GPUs for which cuBLAS multiplies tiles by blocks."""
CUDA = (12, 9)
"""The CUDA from which on it does."""
HOW_EMULATED = "its numbers are those of the definition, and it is slower than bf16"
EMULATED = f"--fp8 on a CPU is emulated: {HOW_EMULATED}"
SCALED_PRODUCTS = (8, 9)
"""The compute capability from which on products take a scale for each tensor."""
OTHERWISE = "leave --fp8 out"


def fp8_problem(
    device: torch.device, recipe: str, where: str = "", otherwise: str = OTHERWISE
) -> str | None:
    """Return why a device cannot run a recipe; None if it can, as every CPU can. ``where`` is how
    the recipe was asked for, without it by ``--fp8``, and ``otherwise`` what to do without it."""
    where = where or f"--fp8 {recipe}"
    if recipe == BLOCKWISE:
        return blockwise_problem(device, where, otherwise)
    if devices.is_host(device) or devices.capability(device) >= SCALED_PRODUCTS:
        return None
    return describe(
        where,
        got=devices.name(device),
        expected=f"a GPU of compute capability {'.'.join(map(str, SCALED_PRODUCTS))} or later",
        do=otherwise,
    )


def blockwise_problem(
    device: torch.device, where: str = "--fp8 blockwise", otherwise: str = OTHERWISE
) -> str | None:
    """Return why a device cannot run ``--fp8 blockwise``; None if it can, as every CPU can."""
    if devices.is_host(device):
        return None
    if devices.capability(device)[0] != HOPPER:
        return describe(
            where,
            got=devices.name(device),
            expected="a GPU of the Hopper generation, whose products take a scale for each tile",
            do=otherwise,
        )
    version = devices.toolkits().get("CUDA", "0.0")
    if tuple(map(int, version.split(".")[:2])) < CUDA:
        return describe(
            where,
            got=f"torch {torch.__version__} for CUDA {version}",
            expected=f"CUDA {'.'.join(map(str, CUDA))} or later",
            do=f"install such a torch, or {otherwise}",
        )
    return None
