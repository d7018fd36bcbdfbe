"""FP8 for users' own modules: what ``shard(fp8=)`` multiplies their nn.Linear by.

Weights are whole where a rank multiplies by them, and its samples are its own. So no rank asks
another one for a scale: a tensor is what this rank multiplies in a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron_llama.engine.comm import device as devices
from megatron_llama.model.nn.fp8.layers import Blockwise
from megatron_llama.model.nn.fp8.support import HOW_EMULATED, fp8_problem
from megatron_llama.model.nn.fp8.tensorwise import Tensorwise, TensorwiseWeights
from megatron_llama.model.plan.fp8 import BLOCKWISE, MULTIPLE, SIDE, TENSORWISE


class ModuleRecipe(NamedTuple):
    """A ``Recipe`` of ``engine/shard/fp8.py``."""

    name: str
    multiple: int
    products: Callable[[], Blockwise | Tensorwise]

    def refusal(self, device: torch.device, where: str) -> str | None:
        return fp8_problem(device, self.name, where, f"leave {where} out")

    def warning(self, device: torch.device, where: str) -> str | None:
        if not devices.is_host(device):
            return None
        return f"{where} on a CPU is emulated: {HOW_EMULATED}"


def blockwise() -> ModuleRecipe:
    """Return the recipe with a scale for each tile."""
    return ModuleRecipe(BLOCKWISE, SIDE, Blockwise)


def tensorwise() -> ModuleRecipe:
    """Return the recipe with a scale for each tensor."""
    return ModuleRecipe(TENSORWISE, MULTIPLE, lambda: Tensorwise(TensorwiseWeights(), (), ()))
