"""Gradient checks of functions that run on several ranks at once.

Every rank evaluates the same global function of the same, replicated inputs: a weight goes in whole and each rank cuts out its
part, the outputs are summed over the ranks with fixed coefficients. ``gradcheck`` perturbs the same element on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron_llama.config.schema import Config, ParallelConfig
from megatron_llama.engine.comm import autograd
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from torch import Tensor


def tensor_mesh(place: Place) -> Mesh:
    """All ranks are tensor-parallel."""
    config = Config(parallel=ParallelConfig(tensor_model_parallel_size=place.world_size))
    return build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total


def replicated(tensor: Tensor) -> Tensor:
    """Identity; its gradient is the sum of what the ranks found."""
    return _Replicated.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]


def part(tensor: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's cut of a replicated tensor."""
    return replicated(tensor).chunk(axis.size, dim)[axis.rank]


def weighted_total(output: Tensor, axis: Axis, *, split: bool) -> Tensor:
    """A number that depends on every element of the output in its own way. ``split``: each rank holds another part of it."""
    offset = axis.rank * output.numel() if split else 0
    coefficients = torch.sin(torch.arange(output.numel(), dtype=output.dtype) + 1.0 + offset).view(output.shape)
    total = (output * coefficients).sum()
    return autograd.reduce(total, axis) if split else total


def numbers(*shape: int, seed: int) -> Tensor:
    """fp64 numbers that are the same on every rank."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
