"""From configuration to engine: the one place that turns options into the engine's arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from megatron_llama.config.schema import Config, OptimizerConfig
from megatron_llama.distributed.axes import Mesh
from megatron_llama.distributed.comm.host.gloo import carries
from megatron_llama.engine.loss_scale import LossScale
from megatron_llama.engine.offload.build import build_update_rules
from megatron_llama.engine.offload.copies import Copies
from megatron_llama.engine.offload.worker import HostWorker, WorkerFactory
from megatron_llama.engine.optimizer import (
    Attach,
    DataAxes,
    OverlappedDistributedOptimizer,
    Transport,
)
from megatron_llama.errors import ConfigError
from megatron_llama.plans.buckets import BucketPlan, strategy_named
from megatron_llama.plans.engine_memory import chunk_problem
from megatron_llama.plans.params import param_groups
from megatron_llama.plans.rank_buckets import rank_bucket_plan


def compute_dtype(config: Config) -> torch.dtype:
    """The dtype of parameters and activations."""
    if config.training.fp64:
        return torch.float64
    if config.training.fp16:
        return torch.float16
    return torch.bfloat16 if config.training.bf16 else torch.float32


def build_optimizer(
    config: Config,
    stages: Iterable[nn.Module],
    mesh: Mesh,
    *,
    copies: Copies | None = None,
    worker_factory: WorkerFactory = HostWorker,
    blocking: bool = False,
    steps_per_epoch: int = 0,
    inline: bool = False,
) -> OverlappedDistributedOptimizer:
    """Build the engine of this rank's stages. Its parameters are zero until ``load_weights`` or a
    checkpoint fills them.

    ``copies`` copies between device and host where the optimizer is offloaded, and
    ``worker_factory`` makes the worker that updates there. ``blocking`` waits for such an optimizer
    at once, for comparison. ``steps_per_epoch`` is 0 where an epoch has no meaning. ``inline`` is
    explained at ``Transport``.

    Raises ConfigError, on every rank, where some rank's messages would be cut into more pieces than
    gloo can tell apart; ConfigError or OffloadError where processors or memory for offload are
    missing."""
    parallel = config.parallel
    if carries(mesh.world, mesh.device):
        # On every rank, also where only another pipeline rank has too large a bucket.
        bucket_plans = (
            rank_bucket_plan(config, dp=mesh.dp.size, rank=rank)
            for rank in range(parallel.pipeline_model_parallel_size)
        )
        if (problem := chunk_problem(config, bucket_plans, dp=mesh.dp.size)) is not None:
            raise ConfigError(problem)
    bucket_plan = rank_bucket_plan(config, dp=mesh.dp.size, tp_rank=mesh.tp.rank, rank=mesh.pp.rank)
    return build_engine(
        config,
        bucket_plan,
        mesh,
        stages=stages,
        copies=copies,
        worker_factory=worker_factory,
        blocking=blocking,
        steps_per_epoch=steps_per_epoch,
        inline=inline,
        groups=param_groups(config).configs,
    )


def build_engine(
    config: Config,
    bucket_plan: BucketPlan,
    mesh: Mesh,
    *,
    stages: Iterable[nn.Module] = (),
    attach: Attach | None = None,
    groups: Sequence[OptimizerConfig] = (),
    grad_divisor: float = 1.0,
    find_unused: bool = False,
    scale_loss: bool = True,
    copies: Copies | None = None,
    worker_factory: WorkerFactory = HostWorker,
    blocking: bool = False,
    steps_per_epoch: int = 0,
    inline: bool = False,
) -> OverlappedDistributedOptimizer:
    """Build the engine of any bucket plan. What it reads of ``config``: the sharding strategy,
    dtypes, transport and offload, and the optimizer's options where ``groups`` has none.

    Parameters go to ``attach``, by default into the modules ``stages``. ``groups`` has betas, eps
    and weight decay of each group of parameters. ``grad_divisor`` divides the sum of the gradients,
    in norm and update: the number of ranks for their mean. ``find_unused`` is explained at
    ``GradientBuckets``. ``scale_loss`` is False where the caller does not multiply its loss by what
    ``begin_step`` returns; otherwise fp16 has a dynamic loss scale. The rest are those of
    ``build_optimizer``.

    Raises ConfigError where messages would be cut into more pieces than gloo can tell apart;
    ConfigError or OffloadError where processors or memory for offload are missing. Collective."""
    parallel = config.parallel
    if carries(mesh.world, mesh.device):
        problem = chunk_problem(config, [bucket_plan], dp=mesh.dp.size)
        if problem is not None:
            raise ConfigError(problem)
    strategy = strategy_named(parallel.data_parallel_sharding_strategy)
    dtype = compute_dtype(config)
    training = config.training if scale_loss else replace(config.training, fp16=False)
    return OverlappedDistributedOptimizer(
        stages,
        bucket_plan,
        build_update_rules(
            config,
            bucket_plan,
            mesh,
            dtype=dtype,
            copies=copies,
            worker_factory=worker_factory,
            blocking=blocking,
            steps_per_epoch=steps_per_epoch,
            groups=groups,
            grad_divisor=grad_divisor,
            find_unused=find_unused,
        ),
        mesh,
        axes=DataAxes(mesh.dp_shard, mesh.dp_replica, mesh.dp_gather),
        reduce_every_microbatch=strategy.reduce_every_microbatch and not find_unused,
        dtype=dtype,
        loss_scale=LossScale(training, mesh.device),
        transport=Transport(
            wire=torch.bfloat16 if parallel.grad_reduce_in_bf16 else None,
            chunk_bytes=parallel.exchange_chunk_bytes,
            prefetch_bytes=parallel.prefetch_bytes,
            inline=inline,
        ),
        grad_divisor=grad_divisor,
        find_unused=find_unused,
        attach=attach,
    )
