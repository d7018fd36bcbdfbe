"""A stage with weights but without an optimizer: for generation and evaluation in one process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron_llama.model.llama import Stage
from megatron_llama.params import Rectangle, rectangles, stage_units


def load_stage(stage: Stage, source: Callable[[Rectangle, Tensor], None], *, dtype: torch.dtype) -> None:
    """Give every parameter of the stage storage on the mesh's device and the values of ``source``; padding is zero."""
    mesh = stage.mesh
    units = stage_units(stage.config, tp=mesh.tp.size, tp_rank=mesh.tp.rank, stages=mesh.pp.size, stage=mesh.pp.rank)
    for spec in (spec for unit in units for spec in unit.params):
        flat = torch.zeros(spec.numel, dtype=dtype, device=mesh.device)
        for piece in rectangles(spec, 0, spec.numel):
            source(piece, flat[piece.start : piece.start + piece.numel].view(piece.size))
        owner, _, leaf = spec.name.rpartition(".")
        setattr(stage.get_submodule(owner), leaf, nn.Parameter(flat.view(spec.shape), requires_grad=False))
