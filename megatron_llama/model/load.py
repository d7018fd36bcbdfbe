"""Stages with weights but without an optimizer: for generation and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from megatron_llama.config.schema import Config
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.plan.specs import ParamSpec, Rectangle, rectangles
from megatron_llama.model.plan.run_params import rank_units


def rank_specs(config: Config, mesh: Mesh) -> list[ParamSpec]:
    """Return every parameter of this process."""
    ep_rank = 0 if mesh.ep is None else mesh.ep.rank
    stages = rank_units(config, rank=mesh.pp.rank, tp_rank=mesh.tp.rank, ep_rank=ep_rank)
    return [spec for units in stages for unit in units for spec in unit.params]


def load_stages(
    stages: Iterable[nn.Module],
    specs: Iterable[ParamSpec],
    source: Callable[[Rectangle, Tensor], None],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Give every parameter of the stages storage on the device and the values of ``source``;
    padding is zero."""
    stage_of = {name: stage for stage in stages for name, _ in stage.named_parameters()}
    for spec in specs:
        flat = torch.zeros(spec.numel, dtype=dtype, device=device)
        for piece in rectangles(spec, 0, spec.numel):
            source(piece, flat[piece.start : piece.start + piece.numel].view(piece.size))
        owner, _, leaf = spec.name.rpartition(".")
        setattr(
            stage_of[spec.name].get_submodule(owner),
            leaf,
            nn.Parameter(flat.view(spec.shape), requires_grad=False),
        )
