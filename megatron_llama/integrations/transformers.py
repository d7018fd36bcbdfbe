"""The engine in Hugging Face's Trainer, and in trainers that are derived from it, such as TRL's.

EngineTrainer(model, args, train_dataset=data, sharding={"units": [LlamaDecoderLayer]}).train()

class EngineDPOTrainer(EngineMixin, DPOTrainer): ...
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer

from megatron_llama.engine.shard.engine import ModuleEngine
from megatron_llama.errors import ConfigError
from megatron_llama.integrations.accelerate import attach
from megatron_llama.integrations.steps import load_engine, save_engine

FOLDER = "engine"
"""In a checkpoint: weights and optimizer state, each rank its own part."""


class EngineMixin:
    """What makes a Trainer train with the engine: put it first among the bases. ``sharding`` has
    arguments of ``ml.shard``.

    ``save_model`` writes what the Trainer writes, whole; a ``checkpoint-*`` has the folder
    ``engine`` as well, and is resumed with the same bits. A checkpoint of the Trainer without the
    engine is resumed, too."""

    engine: ModuleEngine | None = None
    """Of the model that is trained, from the beginning of ``train``."""
    # The Trainer's own:
    accelerator: Any
    args: Any
    lr_scheduler: Any
    model: Any
    optimizer: Any

    def __init__(self, *args: Any, sharding: Mapping[str, Any], **kwargs: Any) -> None:
        """``args`` and ``kwargs`` are those of the Trainer."""
        if "microbatches" in sharding:
            raise ConfigError(
                "sharding",
                got="microbatches",
                expected="those of TrainingArguments",
                do="set gradient_accumulation_steps",
            )
        self._sharding = sharding
        super().__init__(*args, **kwargs)
        self._require_one_device_each()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the Trainer's optimizer, and the engine from it. Collective."""
        if self.engine is not None:
            return self.optimizer
        given = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        schedulers = [] if self.lr_scheduler is None else [self.lr_scheduler]
        own = attach(self.accelerator, self.model, given, self._sharding, schedulers)
        self.engine = own.engine
        self.optimizer = own
        return own

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Say how many microbatches a step has: fewer in the last one of an epoch."""
        samples = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        if self.engine is not None and len(samples[0]):
            self.engine.microbatches = len(samples[0])
        return samples

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is not None:
            return grad_norm
        return self.accelerator.clip_grad_norm_(model.parameters(), float("inf"))

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the model as the Trainer does, whole, by rank 0. Collective."""
        if self.engine is None:
            return super().save_model(*args, **kwargs)  # type: ignore[misc,no-any-return]
        with self.engine.gathered(to="cpu", rank0=not self.args.save_on_each_node):
            super().save_model(*args, **kwargs)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.engine is not None:
            save_engine(self.engine, str(Path(output_dir, FOLDER)))
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None and self.engine is not None:
            folder = Path(checkpoint, FOLDER)
            if folder.is_dir():
                load_engine(self.engine, str(folder))

    def _require_one_device_each(self) -> None:
        """Raise ConfigError where the Trainer would spread one process over several devices."""
        if self.args.n_gpu > 1:
            raise ConfigError(
                type(self).__name__,
                got=f"one process with {self.args.n_gpu} GPUs",
                expected="a process for each",
                do="start it with torchrun --nproc-per-node",
            )


class EngineTrainer(EngineMixin, Trainer):
    """Hugging Face's Trainer with the engine."""
