"""The trace of one rank of any run, in this process. Its mesh has process groups that send nothing,
and its stages and engine have tensors without memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import fields

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_llama.config.schema import Config
from megatron_llama.data.loader import Batch
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.pieces import held_memory
from megatron_llama.engine.plan.weight_access import WeightAccess
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.llama import build_stages
from megatron_llama.model.plan.params import partition_of
from megatron_llama.pipeline.build import build_optimizer, compute_dtype, runtime_class
from megatron_llama.pipeline.plan.stage_accesses import rank_weight_accesses
from megatron_llama.pipeline.runtime import PipelineRuntime
from megatron_llama.planner.trace.op_recorder import OpRecorder, Tables
from megatron_llama.planner.trace.storages import Storages
from megatron_llama.planner.traced import StageTrace
from megatron_llama.schedule import Schedule

BATCHES = "batches"
BUFFERS = "buffers"
"""Components of the state: the data of the step, and all else that stages keep between steps."""


def trace_rank(
    config: Config, world_size: int, rank: int, schedule: Schedule, tables: Tables
) -> StageTrace:
    """Return the step of pipeline rank ``rank`` of a resolved configuration, for dp, cp and tp rank
    0. All microbatches of ``schedule`` run. Must not be called while a process group exists."""
    first = rank * (world_size // len(schedule.ranks))
    with _fake_process_group(first, world_size), _no_collection():
        mesh = build_mesh(config, rank=first, world_size=world_size, device=torch.device("cpu"))
        op_recorder = OpRecorder(tables, mesh.recorder)
        stages = build_stages(config, mesh)
        dtype = compute_dtype(config)
        with (
            FakeTensorMode(),
            op_recorder,
            closing(build_optimizer(config, stages.values(), mesh, inline=True)) as optimizer,
        ):
            runtime = runtime_class(config)(stages, optimizer, mesh, config, dtype=dtype)
            settle_in(optimizer, rank_weight_accesses(config, schedule.ranks[rank], rank=rank))
            batches = [_batch(config) for _ in range(schedule.microbatches)]
            state = state_of(optimizer, batches, op_recorder.storages)
            step(runtime, optimizer, batches, config, op_recorder)
    layers = [partition_of(config).layers[stage] for stage in stages]
    return StageTrace(
        ranks=(rank,),
        layers=tuple((blocks.start, len(blocks)) for blocks in layers),
        groups={axis.name: axis.ranks for axis in _axes(mesh)},
        state=state,
        actions=op_recorder.actions,
        traced=tuple(done.action for done in op_recorder.actions),
        lifetimes=op_recorder.storages.lifetimes(),
    )


def step(
    runtime: PipelineRuntime,
    optimizer: OverlappedDistributedOptimizer,
    batches: list[Batch],
    config: Config,
    op_recorder: OpRecorder,
) -> None:
    """Record a training step as the training loop runs it."""
    lr = config.optimizer.lr
    clip = config.optimizer.clip_grad
    with op_recorder.recording():
        optimizer.announce_step(lr, clip=clip)
        runtime.step(batches)
        optimizer.step(lr, clip=clip)
        optimizer.settle()


def state_of(
    optimizer: OverlappedDistributedOptimizer, batches: list[Batch], storages: Storages
) -> dict[str, int]:
    """Return the bytes at the beginning of a step, by the components of
    ``engine.plan.memory.state_bytes``, ``staging``, BATCHES and BUFFERS."""
    seen = set[int]()
    sizes = {name: storages.of(tensors, seen) for name, tensors in held_memory(optimizer).items()}
    sizes[BATCHES] = storages.of(
        (tensor for batch in batches for tensor in batch.tensors().values()), seen
    )
    return sizes | {BUFFERS: storages.live - sum(sizes.values())}


def settle_in(
    optimizer: OverlappedDistributedOptimizer, accesses: tuple[WeightAccess, ...]
) -> None:
    """Bring the engine into its state between two steps, in which the first gathers of the next
    step have arrived."""
    weights = optimizer.parameters
    trained = set(optimizer.gradients.trainable)
    optimizer.publish()
    weights.begin(accesses)
    for access in accesses:
        weights.access(access)
    weights.invalidate(sorted(trained))
    for bucket in optimizer.bucket_plan.forward_order:
        if bucket in trained:
            weights.publish(bucket)
    weights.settle()


def _batch(config: Config) -> Batch:
    """Return a microbatch without documents, which are known only with data."""
    shape = config.training.seq_length, config.training.micro_batch_size
    mask = torch.empty(shape) if config.data.eod_mask_loss else None
    return Batch(torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64), mask)


def _axes(mesh: Mesh) -> Iterator[Axis]:
    """Yield the axes with more than one rank."""
    values = [getattr(mesh, field.name) for field in fields(mesh)]
    values += () if mesh.experts is None else mesh.experts.all
    yield from (value for value in values if isinstance(value, Axis) and value.size > 1)


@contextmanager
def _fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Provide a process group of torch's ``fake`` backend, whose collectives return at once and
    send nothing."""
    if world_size == 1:
        yield
        return
    dist.init_process_group(dist.Backend.FAKE, store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection, so that a storage ends with its last reference, at the same
    moment in every trace."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
