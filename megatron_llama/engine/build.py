"""Builds the engine from its options: queues and streams, buckets, and their update rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron_llama.engine.comm.exchange import carried_by_gloo
from megatron_llama.engine.handle import BucketParamHandle
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.optimizer import DTYPES, Attach, OverlappedDistributedOptimizer
from megatron_llama.engine.options import EngineOptions
from megatron_llama.engine.param_handle import attach_param_handle
from megatron_llama.engine.plan.buckets import BucketPlan, PlacedParam
from megatron_llama.engine.plan.limits import chunk_problem
from megatron_llama.engine.rules.registry import RuleInputs, build_update_rules
from megatron_llama.errors import ConfigError

if TYPE_CHECKING:
    from megatron_llama.engine.offload.copies import Copies
    from megatron_llama.engine.offload.worker import WorkerFactory


def build_engine(
    options: EngineOptions,
    bucket_plan: BucketPlan,
    mesh: Mesh,
    *,
    stages: Iterable[nn.Module] = (),
    attach: Attach | None = None,
    copies: Copies | None = None,
    worker_factory: WorkerFactory | None = None,
    blocking: bool = False,
    steps_per_epoch: int = 0,
    inline: bool = False,
    tp_bucket_plans: Sequence[BucketPlan] = (),
) -> OverlappedDistributedOptimizer:
    """Build the engine of any bucket plan. Its parameters are zero until they are filled.

    Parameters go to ``attach``, by default into the modules ``stages``. ``copies`` copies between
    device and host where the optimizer is offloaded, and ``worker_factory`` makes the worker that
    updates there, by default a ``HostWorker``. ``blocking`` waits for such an optimizer at once,
    for comparison. ``steps_per_epoch`` is 0 where an epoch has no meaning. ``inline`` is explained
    at ``OverlappedDistributedOptimizer``. ``tp_bucket_plans`` has the bucket plans of all
    tensor-parallel ranks in their order, for Muon, whose matrices they share; by default this rank
    is the only one.

    Raises ConfigError where messages would be cut into more pieces than gloo can tell apart;
    ConfigError or OffloadError where processors or memory for offload are missing. Collective."""
    if carried_by_gloo(mesh.world, mesh.device):
        problem = chunk_problem(options, [bucket_plan], dp=mesh.dp.size)
        if problem is not None:
            raise ConfigError(problem)
    return OverlappedDistributedOptimizer(
        bucket_plan,
        build_update_rules(
            RuleInputs(
                options,
                bucket_plan,
                mesh,
                dtype=DTYPES[options.dtype],
                tp_bucket_plans=tp_bucket_plans or (bucket_plan,),
                steps_per_epoch=steps_per_epoch,
                copies=copies,
                worker_factory=worker_factory,
                blocking=blocking,
            )
        ),
        mesh,
        options,
        attach=attach or _attach_to(stages),
        inline=inline,
    )


def _attach_to(stages: Iterable[nn.Module]) -> Attach:
    """Return a function that makes the stages' parameters views of their buckets, with handles."""
    stage_of = {name: stage for stage in stages for name, _ in stage.named_parameters()}

    def attach(placed: PlacedParam, view: Tensor, handle: BucketParamHandle) -> None:
        parameter = nn.Parameter(view, requires_grad=placed.spec.trainable)
        attach_param_handle(parameter, handle)
        owner, _, leaf = placed.spec.name.rpartition(".")
        setattr(stage_of[placed.spec.name].get_submodule(owner), leaf, parameter)

    return attach
