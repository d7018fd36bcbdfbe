"""The engine in loops of Hugging Face's Accelerate.

    model, optimizer, loader, scheduler = prepare(
        accelerator, model, optimizer, loader, scheduler, sharding={"units": [Block]}
    )

stands for ``accelerator.prepare(...)``, and the loop stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn

from megatron_llama.engine.shard.engine import ModuleEngine
from megatron_llama.errors import ConfigError, listing
from megatron_llama.integrations.accelerator import Engines
from megatron_llama.integrations.schedulers import Following
from megatron_llama.integrations.steps import EngineSteps, shard_for_loop

SAVED_BESIDE = "megatron_llama_engine"
"""In the optimizer's file: its state is in the engine's folder."""
_ENGINES = "_megatron_llama_engines"


class EngineOptimizer(AcceleratedOptimizer):
    """The optimizer of an engine, as a loop of Accelerate has it: ``step`` and ``zero_grad`` do
    nothing until the gradients of a step are there."""

    def __init__(self, engine: ModuleEngine, microbatches: Callable[[], int] | None) -> None:
        """``microbatches()`` is asked after each step for those of the next one; None: they stay
        as they are."""
        super().__init__(engine.optimizer, device_placement=False)
        self.engine = engine
        self.steps = EngineSteps(engine)
        self._microbatches = microbatches
        # Or ``accelerator.prepare`` would put another one around it.
        self._is_accelerate_prepared = True

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Make a step of the engine, if the loop has come to its end."""
        if not self.gradient_state.sync_gradients:
            return
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.steps.step()
        if self._microbatches is not None:
            self.engine.microbatches = self._microbatches()

    def state_dict(self) -> dict[str, Any]:
        """Return what stands in the optimizer's file: the state itself is saved with the model's,
        each rank its own part. ``engine.optimizer.state_dict()`` has it."""
        return {SAVED_BESIDE: True, "state": {}, "param_groups": []}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the state of a run without the engine; its own was loaded with the model's."""
        if SAVED_BESIDE not in state_dict:
            super().load_state_dict(state_dict)


def prepare(accelerator: Accelerator, *objects: Any, sharding: Mapping[str, Any]) -> Any:
    """Prepare objects as ``accelerator.prepare`` does, with the engine around the one model and the
    one optimizer among them. ``sharding`` has arguments of ``ml.shard``: ``units``, ``strategy``
    and others. The engine is ``optimizer.engine``. Collective.

    ``accelerator.accumulate``, ``backward``, ``clip_grad_norm_``, ``get_state_dict``,
    ``save_model``, ``save_state`` and ``load_state`` then do for this model what they do for
    others. A loop that accumulates without ``accelerator.accumulate`` gives ``microbatches`` in
    ``sharding``. The norm that ``clip_grad_norm_`` returns may be read after the step."""
    models = [given for given in objects if isinstance(given, nn.Module)]
    optimizers = [given for given in objects if isinstance(given, torch.optim.Optimizer)]
    if len(models) != 1 or len(optimizers) != 1:
        raise ConfigError(
            "prepare(accelerator, ...)",
            got=f"{len(models)} models and {len(optimizers)} optimizers",
            expected="one of each",
            do="call it once for each pair, and accelerator.prepare for what is not trained",
        )
    [model], [optimizer] = models, optimizers
    schedulers = [o for o in objects if isinstance(o, torch.optim.lr_scheduler.LRScheduler)]
    state = accelerator.gradient_state
    microbatches = None if "microbatches" in sharding else lambda: int(state.num_steps)
    own = attach(accelerator, model, optimizer, sharding, schedulers, microbatches)
    return accelerator.prepare(*(own if given is optimizer else given for given in objects))


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sharding: Mapping[str, Any],
    schedulers: Sequence[Any] = (),
    microbatches: Callable[[], int] | None = None,
) -> EngineOptimizer:
    """Shard a model, and let an accelerator know of it. ``schedulers`` are those of ``optimizer``,
    which go over to the engine. Collective."""
    _require_plain(accelerator)
    if accelerator.device_placement and not any(p.is_meta for p in model.parameters()):
        model.to(accelerator.device)
    engine = shard_for_loop(
        model,
        optimizer,
        sharding,
        Following(schedulers, optimizer),
        microbatches=1 if microbatches is None else microbatches(),
        clips_by="accelerator.clip_grad_norm_, or max_grad_norm of the trainer",
    )
    # Without DDP around it, but with autocast.
    accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    model._is_accelerate_prepared = True  # type: ignore[assignment]
    own = EngineOptimizer(engine, microbatches)
    known = vars(accelerator).get(_ENGINES)
    if known is None:
        known = vars(accelerator)[_ENGINES] = Engines(accelerator)
    known.add(own.steps)
    return own


def _require_plain(accelerator: Accelerator) -> None:
    """Raise ConfigError for what an accelerator would do beside the engine, or in its place."""
    problems = []
    if accelerator.distributed_type in (
        DistributedType.FSDP,
        DistributedType.DEEPSPEED,
        DistributedType.MEGATRON_LM,
        DistributedType.XLA,
    ):
        problems.append(
            f"{accelerator.distributed_type}: the engine shards itself; take its plugin out"
        )
    if accelerator.parallelism_config is not None:
        problems.append("a ParallelismConfig: the engine is for data parallelism; take it out")
    if accelerator.mixed_precision not in ("no", "bf16"):
        problems.append(
            f"mixed_precision={accelerator.mixed_precision}: its scaler reads gradients, which "
            'live in the engine; take "bf16", or sharding={"dtype": torch.bfloat16}'
        )
    if accelerator.state.dynamo_plugin.backend.value not in (None, "NO"):
        problems.append("torch.compile of the whole model: call module.compile() of its units")
    if problems:
        raise ConfigError(listing("Accelerator with megatron_llama's engine: got", problems))
