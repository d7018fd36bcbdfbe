"""Steps of an engine, as loops of other libraries make them: they clip first, and step then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_llama.engine.shard.engine import ModuleEngine
from megatron_llama.engine.shard.shard import shard
from megatron_llama.errors import ConfigError, TrainingError
from megatron_llama.integrations.schedulers import Following

OF_THE_LOOP = ("optimizer", "clip")
"""Arguments of ``shard`` that the loop has in words of its own."""


def shard_for_loop(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    sharding: Mapping[str, Any],
    following: Following,
    *,
    microbatches: int,
    clips_by: str,
) -> ModuleEngine:
    """Return the engine of a loop's model and optimizer, whose schedulers go over to it.
    ``sharding`` has the user's arguments for ``shard``; ``clips_by`` says where the loop is told of
    clipping. Collective."""
    given = [name for name in OF_THE_LOOP if name in sharding]
    if given:
        raise ConfigError(
            "sharding",
            got=", ".join(given),
            expected="arguments that the loop does not have",
            do=f"clip with {clips_by}, and give the optimizer to the loop",
        )
    with following.detached():
        engine = shard(model, optimizer=optimizer, **{"microbatches": microbatches, **sharding})
    following.follow(engine)
    return engine


class PendingNorm(Tensor):
    """The norm of the gradient before clipping, of a step that is still to come: the engine knows
    it when the optimizer steps. Until then reading it raises TrainingError, afterwards it is a
    tensor like others."""

    _known: Tensor | None

    @staticmethod
    def __new__(cls) -> PendingNorm:
        """Make the norm of the step that comes next."""
        made = Tensor._make_subclass(cls, torch.zeros(()))
        made._known = None
        return made

    def become(self, norm: Tensor) -> None:
        """Take the value: the step has been made."""
        self._known = norm

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "PendingNorm(no step yet)" if self._known is None else repr(self._known)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*map(_known, args), **{k: _known(v) for k, v in (kwargs or {}).items()})


def _known(value: Any) -> Any:
    """Return an argument with the norm itself in it."""
    if isinstance(value, PendingNorm):
        if value._known is None:
            raise TrainingError(
                "the norm of the gradient",
                got="a read before the step",
                expected="one after it: gradients are still on their way",
                do="read it after optimizer.step()",
            )
        return value._known
    if type(value) in (list, tuple):
        return type(value)(map(_known, value))
    return value


class EngineSteps:
    """The steps of one engine."""

    def __init__(self, engine: ModuleEngine) -> None:
        self.engine = engine
        self._norms: list[PendingNorm] = []
        self._own = {id(parameter) for parameter in engine.model.parameters()}
        self._trained = {id(p) for p in engine.model.parameters() if p.requires_grad}

    def owns(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are the parameters whose gradient the engine clips. Raises ConfigError if
        they are only some of them, or others beside them."""
        given = {id(parameter) for parameter in parameters}
        if given.isdisjoint(self._own):
            return False
        if not self._trained <= given <= self._own:
            raise ConfigError(
                "clip_grad_norm_",
                got=f"{len(given & self._trained)} of the {len(self._trained)} trained parameters "
                f"of a model, and {len(given - self._own)} of others",
                expected="all parameters of one model: its engine clips by the norm of them all",
                do="give model.parameters()",
            )
        return True

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradient of the step that comes next, and only that. Returns its norm, which may
        be read after the step. ``max_norm`` may be infinite: then nothing is clipped."""
        if not max_norm > 0.0 or float(norm_type) != 2.0:
            raise ConfigError(
                "clip_grad_norm_",
                got=f"max_norm={max_norm}, norm_type={norm_type}",
                expected="a positive max_norm, and norm_type=2",
                do="clip by the L2 norm; leave the call out where nothing is clipped",
            )
        self.engine.clip = 0.0 if max_norm == inf else float(max_norm)
        self._norms.append(PendingNorm())
        return self._norms[-1]

    def step(self) -> None:
        """Make a step with the backward passes so far: the last one of an epoch has fewer."""
        result = self.engine.step(fewer=True)
        for norm in self._norms:
            norm.become(result.grad_norm)
        self._norms.clear()
        self.engine.clip = 0.0


def save_engine(engine: ModuleEngine, folder: str) -> None:
    """Save the state of an engine, each rank its own part. Collective."""
    save({"engine": engine.state_dict()}, checkpoint_id=folder)


def load_engine(engine: ModuleEngine, folder: str) -> None:
    """Take over what ``save_engine`` has saved, on any number of ranks. Collective."""
    state = {"engine": engine.state_dict()}
    load(state, checkpoint_id=folder)
    engine.load_state_dict(state["engine"])
