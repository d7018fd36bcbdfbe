"""The engine in Lightning.

Trainer(strategy=EngineStrategy(sharding={"units": [Block]}), devices=8).fit(module, loader)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partialmethod
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from megatron_llama.engine.shard.engine import ModuleEngine
from megatron_llama.errors import ConfigError, listing
from megatron_llama.integrations.schedulers import Following
from megatron_llama.integrations.steps import EngineSteps, shard_for_loop


class EngineStrategy(DDPStrategy):
    """Trains a LightningModule with the engine. Processes are started, and validation and tests
    without ``fit`` are run, as by ``DDPStrategy``.

    Checkpoints are Lightning's files: whole weights (the masters) and the state of the optimizer as
    torch.optim has it. Runs with and without the engine load each other's."""

    model: Any
    optimizers: Any

    def __init__(self, *, sharding: Mapping[str, Any], **kwargs: Any) -> None:
        """``sharding`` has arguments of ``ml.shard``: ``units``, ``strategy`` and others.
        ``kwargs`` are those of ``DDPStrategy``."""
        super().__init__(**kwargs)
        self._sharding = sharding
        self._steps: EngineSteps | None = None

    @property
    def engine(self) -> ModuleEngine | None:
        """The engine, from the beginning of ``fit``."""
        return None if self._steps is None else self._steps.engine

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Load checkpoints into the engine."""
        return True

    def setup(self, trainer: Trainer) -> None:
        """Build the engine for ``fit``. Collective."""
        if trainer.state.fn != TrainerFn.FITTING:
            if self._steps is None:
                super().setup(trainer)
            else:
                self.accelerator.setup(trainer)
            return
        self._require_plain(trainer)
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ConfigError(
                "configure_optimizers",
                got=f"{len(self.optimizers)} optimizers",
                expected="one",
                do="give one optimizer with several groups",
            )
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        engine = shard_for_loop(
            self.lightning_module,
            self.optimizers[0],
            self._sharding,
            Following(schedulers, self.optimizers[0]),
            microbatches=trainer.accumulate_grad_batches,
            clips_by="Trainer(gradient_clip_val=)",
        )
        self._steps = EngineSteps(engine)
        self.optimizers = [engine.optimizer]
        self.setup_precision_plugin()
        # Gradients are the engine's: there are none that the plugin could clip.
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm
        self.precision_plugin.clip_grad_by_value = _refuse_values

    def on_train_start(self) -> None:
        """Let callbacks know that the step of a loaded checkpoint is saved: they would save it
        again, and with accumulation that would be in the middle of the next step."""
        trainer = self.lightning_module.trainer
        for callback in trainer.checkpoint_callbacks:
            vars(callback)["_last_global_step_saved"] = trainer.global_step

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a step of the module as its forward pass, which the engine sees."""
        if self._steps is None:
            return getattr(super(), name)(*args, **kwargs)
        with self.precision_plugin.forward_context():
            module = self.lightning_module
            return self._forward_redirection(module, module, name, *args, **kwargs)

    training_step = partialmethod(_call, "training_step")
    validation_step = partialmethod(_call, "validation_step")
    test_step = partialmethod(_call, "test_step")
    predict_step = partialmethod(_call, "predict_step")

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run the passes that are left, and make a step of the engine: the last one of an epoch has
        fewer passes."""
        assert self._steps is not None
        step = _Step(self._steps)
        return self.precision_plugin.optimizer_step(
            step, model=model or self.lightning_module, closure=closure, **kwargs
        )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return whole masters on rank 0, for a checkpoint. Collective."""
        state: dict[str, Any] = super().lightning_module_state_dict()
        return self._whole_on_rank_0(state)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the whole state of the optimizer on rank 0. Collective."""
        return self._whole_on_rank_0(super().optimizer_state(optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take over the optimizer's state from a checkpoint. Collective."""
        [state] = checkpoint["optimizer_states"]
        self.optimizers[0].load_state_dict(state)

    def teardown(self) -> None:
        """End what Lightning has begun. The engine stays, for ``test`` after ``fit``:
        ``strategy.engine.close()`` ends it."""
        if self._steps is None:
            super().teardown()
            return
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        assert self._steps is not None
        self._steps.clip(float(clip_val))

    def _whole_on_rank_0(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state with whole tensors in the host's memory; on other ranks an empty one."""

        def whole(part: DTensor) -> Tensor | None:
            tensor = part.full_tensor()
            return tensor.cpu() if self.is_global_zero else None

        made: dict[str, Any] = tree_map_only(DTensor, whole, state)
        return made if self.is_global_zero else {}

    def _require_plain(self, trainer: Trainer) -> None:
        """Raise ConfigError for what Lightning would do beside the engine, or twice."""
        problems = []
        if self._steps is not None:
            problems.append("a second fit: build a Trainer, a strategy and a module for it")
        if str(trainer.precision) not in ("32-true", "32", "bf16-mixed"):
            problems.append(
                f'precision={trainer.precision}: take "32-true" and '
                'sharding={"dtype": torch.bfloat16}, or "bf16-mixed"'
            )
        if self._layer_sync is not None:
            problems.append("sync_batchnorm: batch norm sees its own samples only; take it out")
        if problems:
            raise ConfigError(listing("EngineStrategy: got", problems))


class _Step:
    """What a precision plugin steps."""

    def __init__(self, steps: EngineSteps) -> None:
        self._steps = steps
        self.param_groups = steps.engine.param_groups

    def step(self, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the passes of the closure, then step."""
        with torch.enable_grad():
            result = closure()
        self._steps.step()
        return result


def _refuse_values(optimizer: Any, clip_val: float) -> None:
    raise ConfigError(
        "Trainer(gradient_clip_algorithm=)",
        got="value",
        expected="norm: single gradients are sharded and on their way",
        do='give gradient_clip_algorithm="norm"',
    )
