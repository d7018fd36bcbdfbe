"""The expert of all tokens, beside those that a router chooses: an MLP that every tensor-parallel
rank holds whole and sends its part of the sequence through, so it needs no message."""

from __future__ import annotations

from dataclasses import replace

from megatron_llama.config.schema import ModelConfig
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.model.llama import MLP, StageOptions


def shared_expert(
    config: ModelConfig, mesh: Mesh, options: StageOptions, *, recompute: bool
) -> MLP:
    """Return the shared expert of a block."""
    alone = Axis("shared_expert", 0, (mesh.rank,), None, mesh.recorder)
    width = config.moe_shared_expert_intermediate_size
    products = options.products.get("shared_expert", options.products)
    # Without sequence: there is nothing to gather over one rank.
    return MLP(
        replace(config, intermediate_size=width),
        replace(mesh, tp=alone),
        replace(options, sequence_parallel=False, tp_overlap=None, products=products),
        recompute=recompute,
    )
