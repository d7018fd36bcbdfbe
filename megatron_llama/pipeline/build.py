"""Builds the engine of a run's pipeline stages, and chooses its runtime, from its configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron_llama.config.schema import Config
from megatron_llama.engine.build import build_engine
from megatron_llama.engine.comm.exchange import carried_by_gloo
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.optimizer import DTYPES, OverlappedDistributedOptimizer
from megatron_llama.engine.options import MUON
from megatron_llama.engine.plan.limits import chunk_problem
from megatron_llama.errors import ConfigError
from megatron_llama.pipeline.plan.run_engine import (
    compute_dtype_name,
    engine_options,
    rank_bucket_plan,
)
from megatron_llama.pipeline.runtime import PipelineRuntime

if TYPE_CHECKING:
    from megatron_llama.engine.offload.copies import Copies
    from megatron_llama.engine.offload.worker import WorkerFactory


def compute_dtype(config: Config) -> torch.dtype:
    """Return the dtype of parameters and activations."""
    return DTYPES[compute_dtype_name(config.training)]


def runtime_class(config: Config) -> type[PipelineRuntime]:
    """Return the class of a run's runtime."""
    if config.model.num_experts:
        from megatron_llama.model.plan.experts import sparse_layers

        if sparse_layers(config.model):
            from megatron_llama.pipeline.router_losses import RoutedRuntime  # which few runs need

            return RoutedRuntime
    return PipelineRuntime


def build_optimizer(
    config: Config,
    stages: Iterable[nn.Module],
    mesh: Mesh,
    *,
    copies: Copies | None = None,
    worker_factory: WorkerFactory | None = None,
    blocking: bool = False,
    steps_per_epoch: int = 0,
    inline: bool = False,
) -> OverlappedDistributedOptimizer:
    """Build the engine of this rank's stages. Its parameters are zero until ``load_weights`` or a
    checkpoint fills them. The other arguments are those of ``build_engine``.

    Raises ConfigError, on every rank, where some rank's messages would be cut into more pieces than
    gloo can tell apart; ConfigError or OffloadError where processors or memory for offload are
    missing."""
    options = engine_options(config)
    dp = mesh.dp.size
    if carried_by_gloo(mesh.world, mesh.device):
        # On every rank, even if only another pipeline rank has too large a bucket.
        bucket_plans = (
            rank_bucket_plan(config, dp=dp, rank=rank)
            for rank in range(config.parallel.pipeline_model_parallel_size)
        )
        if (problem := chunk_problem(options, bucket_plans, dp=dp)) is not None:
            raise ConfigError(problem)
    # Only Muon needs those of its neighbours: it makes matrices whole over tp.
    ep_rank = 0 if mesh.ep is None else mesh.ep.rank
    tp_bucket_plans = [
        rank_bucket_plan(config, dp=dp, tp_rank=rank, rank=mesh.pp.rank, ep_rank=ep_rank)
        for rank in (range(mesh.tp.size) if options.rule == MUON else (mesh.tp.rank,))
    ]
    return build_engine(
        options,
        tp_bucket_plans[mesh.tp.rank if options.rule == MUON else 0],
        mesh,
        stages=stages,
        copies=copies,
        worker_factory=worker_factory,
        blocking=blocking,
        steps_per_epoch=steps_per_epoch,
        inline=inline,
        tp_bucket_plans=tp_bucket_plans,
    )
