"""One rank of a run that is recorded, whatever it trains."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from megatron_llama.engine.offload.zenflow.rule import ZenFlow
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.rules.muon import Muon
from tools.stream_check.communicators import process_group
from tools.stream_check.events import Event, Site
from tools.stream_check.recording import Recording
from tools.stream_check.substitutes import substituted


def recorded(
    train: Callable[[Recording], object], rank: int, world_size: int, skip: Site | None
) -> list[Event]:
    """Return what one rank of ``world_size`` does in ``train``, as ``record`` does."""
    recording = Recording(skip)
    collecting = gc.isenabled()
    # Without garbage collection a storage ends when its last reference goes, always at one place.
    gc.disable()
    gc.freeze()  # what exists already is not looked at below
    try:
        with process_group(recording, rank, world_size), substituted(recording), recording.seeing():
            train(recording)
            gc.collect()  # reference cycles hold memory, and how it ends is part of the recording
            recording.end_messages()
            recording.close()
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()
    return recording.named_events()


def name_buffers(recording: Recording, optimizer: OverlappedDistributedOptimizer) -> None:
    """Name the engine's buffers."""
    plan = optimizer.bucket_plan
    parameters = optimizer.parameters
    gradients = optimizer.gradients
    for rule in optimizer.rules.distinct:
        for what, buffer in getattr(rule, "_buffers", {}).items():
            if isinstance(rule, Muon):
                recording.name(buffer, f"matrices, {what}")
            elif buffer.nbytes:
                recording.name(buffer._whole, f"offload buffer for {what}")
        for what, held in (vars(rule._scratch) if isinstance(rule, ZenFlow) else {}).items():
            for number, tensor in enumerate(held if isinstance(held, list) else [held]):
                if isinstance(tensor, torch.Tensor):
                    recording.name(tensor, f"scratch {what} {number}")
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
