"""From options to the engine: who reduces, updates and gathers which bucket, and by which rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType

import torch
from torch import nn

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
from megatron_llama.plans.engine_options import BF16, FP16, FP32, FP64, EngineOptions

DTYPES = MappingProxyType(
    {FP32: torch.float32, BF16: torch.bfloat16, FP16: torch.float16, FP64: torch.float64}
)
"""The dtypes of ``EngineOptions``."""


def build_engine(
    options: EngineOptions,
    bucket_plan: BucketPlan,
    mesh: Mesh,
    *,
    stages: Iterable[nn.Module] = (),
    attach: Attach | None = None,
    copies: Copies | None = None,
    worker_factory: WorkerFactory = HostWorker,
    blocking: bool = False,
    steps_per_epoch: int = 0,
    inline: bool = False,
    tp_bucket_plans: Sequence[BucketPlan] = (),
) -> OverlappedDistributedOptimizer:
    """Build the engine of any bucket plan. Its parameters are zero until somebody fills them.

    Parameters go to ``attach``, by default into the modules ``stages``. ``copies`` copies between
    device and host where the optimizer is offloaded, and ``worker_factory`` makes the worker that
    updates there. ``blocking`` waits for such an optimizer at once, for comparison.
    ``steps_per_epoch`` is 0 where an epoch has no meaning. ``inline`` is explained at
    ``Transport``. ``tp_bucket_plans`` has the bucket plans of all tensor-parallel ranks in their
    order, for Muon, whose matrices they share; by default this rank is the only one.

    Raises ConfigError where messages would be cut into more pieces than gloo can tell apart;
    ConfigError or OffloadError where processors or memory for offload are missing. Collective."""
    if carries(mesh.world, mesh.device):
        problem = chunk_problem(options, [bucket_plan], dp=mesh.dp.size)
        if problem is not None:
            raise ConfigError(problem)
    strategy = strategy_named(options.strategy)
    return OverlappedDistributedOptimizer(
        stages,
        bucket_plan,
        build_update_rules(
            options,
            bucket_plan,
            mesh,
            dtype=DTYPES[options.dtype],
            copies=copies,
            worker_factory=worker_factory,
            blocking=blocking,
            steps_per_epoch=steps_per_epoch,
            tp_bucket_plans=tp_bucket_plans or (bucket_plan,),
        ),
        mesh,
        axes=DataAxes(mesh.dp_shard, mesh.dp_replica, mesh.dp_gather),
        reduce_every_microbatch=strategy.reduce_every_microbatch and not options.find_unused,
        dtype=DTYPES[options.dtype],
        loss_scale=LossScale(options.loss_scaling, mesh.device),
        transport=Transport(
            wire=torch.bfloat16 if options.reduces_in_bf16 else None,
            chunk_bytes=options.chunk_bytes,
            prefetch_bytes=options.prefetch_bytes,
            inline=inline,
        ),
        grad_divisor=options.grad_divisor,
        find_unused=options.find_unused,
        attach=attach,
    )
