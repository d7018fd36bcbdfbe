"""The layouts that are recorded, and how one rank of a layout runs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch

from megatron_llama.config.schema import (
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)
from megatron_llama.data.loader import Batch
from megatron_llama.data.upload import Upload
from megatron_llama.distributed.mesh import Mesh, build_mesh
from megatron_llama.engine.build import build_optimizer, compute_dtype
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.metrics.readback import Readback
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.llama import build_stages
from megatron_llama.pipeline.runtime import PipelineRuntime
from tools.stream_check.communicators import process_group
from tools.stream_check.events import Event, Site
from tools.stream_check.recording import DEVICE, Recording
from tools.stream_check.substitutes import substituted

_MODEL = ModelConfig(
    vocab_size=120,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=16,
    initializer_range=0.05,
)
_LR = 1e-3


@dataclass(frozen=True)
class Layout:
    """A run and the rank of it that is recorded."""

    config: Config
    world_size: int
    rank: int = 0
    steps: int = 3


def record(layout: Layout, skip: Site | None = None) -> list[Event]:
    """Return what the rank does. What is called at ``skip`` to wait or to record an event does
    nothing."""
    recording = Recording(skip)
    collecting = gc.isenabled()
    # Without garbage collection a storage ends when its last reference goes, always at one place.
    gc.disable()
    try:
        with (
            process_group(recording, layout.rank, layout.world_size),
            substituted(recording),
            recording.seeing(),
        ):
            _train(layout, recording)
            recording.close()
    finally:
        if collecting:
            gc.enable()
    return recording.named_events()


def _train(layout: Layout, recording: Recording) -> None:
    config = layout.config
    mesh = build_mesh(config, rank=layout.rank, world_size=layout.world_size, device=DEVICE)
    stages = build_stages(config, mesh)
    with closing(build_optimizer(config, stages.values(), mesh)) as optimizer:
        optimizer.load_weights(InitialWeights(1, config.model.initializer_range))
        runtime = PipelineRuntime(stages, optimizer, mesh, config, dtype=compute_dtype(config))
        upload = Upload(mesh.device)
        batches = upload.send(_batches(config, mesh))
        numbers = None
        for _ in range(layout.steps):
            upload.wait()
            now = batches
            batches = upload.send(_batches(config, mesh))
            clip = config.optimizer.clip_grad
            optimizer.announce_step(_LR, clip=clip)
            loss = runtime.step(now)
            result = optimizer.step(_LR, clip=clip)
            before = numbers
            numbers = Readback([loss, result.grad_norm, result.skipped])
            if before is not None:
                before.read()
        optimizer.settle()
        _name(optimizer, recording)


def _batches(config: Config, mesh: Mesh) -> list[Batch]:
    training = config.training
    count = training.global_batch_size // (training.micro_batch_size * mesh.data_size)
    shape = training.seq_length, training.micro_batch_size
    ids = torch.arange(shape[0] * shape[1]).view(shape) % config.model.vocab_size
    return [Batch(ids.clone(), ids.clone()) for _ in range(count)]


def _name(optimizer: OverlappedDistributedOptimizer, recording: Recording) -> None:
    """Name the engine's buffers."""
    plan = optimizer.bucket_plan
    parameters = optimizer.parameters
    gradients = optimizer.gradients
    for slot, tensor in parameters._slots.items():
        recording.name(tensor, f"parameter slot {slot}")
    for slot, tensor in gradients._slots.items():
        recording.name(tensor, f"gradient slot {slot}")
    for bucket, tensor in enumerate(parameters.shards):
        recording.name(tensor, f"parameter shard of {plan.label(bucket)}")
    for bucket, tensor in gradients.shards.items():
        recording.name(tensor, f"gradient shard of {plan.label(bucket)}")
    for bucket, tensor in enumerate(optimizer.masters):
        recording.name(tensor, f"master of {plan.label(bucket)}")
    for bucket in gradients.trainable:
        for what, tensor in optimizer.rules.by_bucket[bucket].state(bucket).items():
            recording.name(tensor, f"{what} of {plan.label(bucket)}")
    recording.name(optimizer._squared_norms, "squared norms of shards")
    recording.name(optimizer._total, "squared norm of the gradient")


def _config(**parallel: object) -> Config:
    return Config(
        model=_MODEL,
        parallel=ParallelConfig(reduce_bucket_size=4000, **parallel),  # type: ignore[arg-type]
        training=TrainingConfig(bf16=False, seq_length=16, micro_batch_size=1, global_batch_size=4),
        optimizer=OptimizerConfig(lr=_LR, clip_grad=1.0),
    )


def layouts() -> Mapping[str, Callable[[Site | None], list[Event]]]:
    """Return every layout by its name, as a function that records it: its argument is the site
    whose waits and records are left out."""
    found: dict[str, Layout] = {}
    for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
        found[strategy] = Layout(_config(data_parallel_sharding_strategy=strategy), 2)
    return {name: partial(record, layout) for name, layout in found.items()}
