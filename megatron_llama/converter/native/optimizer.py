"""Reads the optimizer's state of a native checkpoint, without an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from torch import Tensor

from megatron_llama.checkpoint.adapters import saved_lora
from megatron_llama.checkpoint.chunks import state_key
from megatron_llama.checkpoint.meta import CheckpointMeta
from megatron_llama.checkpoint.model_folders.native.reader import NativeReader
from megatron_llama.checkpoint.model_folders.optimizer_state import STATES, OptimizerState
from megatron_llama.config.schema import Config, DataConfig, OptimizerConfig, TrainingConfig
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.engine.options import EIGHT_BIT
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.train.run.lr import learning_rate

Section = TypeVar("Section", OptimizerConfig, TrainingConfig, DataConfig)


def optimizer_problems(meta: CheckpointMeta) -> Iterator[str]:
    """Yield the reasons why other trainers have no optimizer for the state."""
    if saved_lora(meta.config).lora_rank:
        yield "it is that of low-rank adapters (--lora-rank)"
    if meta.config["optimizer"].get("optimizer", "adam") != "adam":
        yield f"it is that of --optimizer {meta.config['optimizer']['optimizer']}"
    moments = {meta.config["optimizer"].get(f"{name}_dtype") for name in STATES}
    if EIGHT_BIT in moments:
        yield "its moments are in 8 bits"
    if meta.config["optimizer"].get("freeze"):
        yield "frozen weights have none (--freeze)"
    if meta.config["optimizer"].get("param_group"):
        yield "some parameters have a learning rate or decay of their own (--param-group)"
    if meta.config.get("offload", {}).get("optimizer_offload") == "zenflow":
        yield "part of the gradients has no update yet (--optimizer-offload zenflow)"
    if meta.config["training"].get("fp64"):
        yield "it is in double precision (--fp64)"
    if meta.config["training"].get("fp16"):
        yield "it has a loss scale of its own (--fp16)"


def open_optimizer(reader: NativeReader) -> OptimizerState:
    """Open the optimizer's state of a checkpoint that has one without ``optimizer_problems``."""
    meta = reader.weights.meta
    config = Config(
        optimizer=_section(OptimizerConfig, meta.config["optimizer"]),
        training=_section(TrainingConfig, meta.config["training"]),
        data=_section(DataConfig, meta.config.get("data", {})),
    )
    iteration = meta.state.iteration
    consumed = meta.state.consumed_samples
    return OptimizerState(
        {state: _source(reader, state) for state in STATES},
        step=meta.optimizer_step,
        iteration=iteration,
        consumed_samples=consumed,
        lr=learning_rate(config.optimizer, config.training.train_iters, iteration, consumed),
        config=config,
    )


def _section(kind: type[Section], saved: Mapping[str, Any]) -> Section:
    """Return a section of the configuration. Fields that only other versions have are left out;
    missing ones get their defaults."""
    known = {field.name: saved[field.name] for field in fields(kind) if field.name in saved}
    # JSON has lists for tuples.
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in known.items()
    }
    return kind(**values)


def _source(reader: NativeReader, state: str) -> WeightSource:
    def read(rectangle: Rectangle, out: Tensor) -> None:
        reader.weights.stored(replace(rectangle, name=state_key(state, rectangle.name)), out)

    return read
