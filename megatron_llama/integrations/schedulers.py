"""Schedulers that were made of an optimizer before the engine was made from it, as loops of other
libraries do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from megatron_llama.engine.shard.engine import ModuleEngine
from megatron_llama.errors import ConfigError


class Following:
    """Schedulers of an optimizer, which go over to the engine that is made from it."""

    def __init__(self, schedulers: Sequence[Any], optimizer: torch.optim.Optimizer) -> None:
        """Raises ConfigError for a scheduler of another optimizer."""
        self._schedulers = [inner for given in schedulers for inner in _all(given)]
        self._optimizer = optimizer
        for scheduler in self._schedulers:
            if scheduler.optimizer is not optimizer:
                raise ConfigError(
                    type(scheduler).__name__,
                    got=f"a scheduler of another {type(scheduler.optimizer).__name__}",
                    expected="one of the optimizer that is given beside it",
                    do="make it of that optimizer",
                )
        self._began: list[Any] = []

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Let the optimizer look as if it had no schedulers, while the engine is made from it."""
        groups = self._optimizer.param_groups
        if not self._schedulers:
            yield  # those that are not given would go on to change it, which ``shard`` refuses
            return
        self._began = [group.pop("initial_lr") for group in groups]
        try:
            yield
        except BaseException:
            for group, began in zip(groups, self._began, strict=True):
                group["initial_lr"] = began
            raise

    def follow(self, engine: ModuleEngine) -> None:
        """Let the schedulers change the engine's groups from now on."""
        if not self._schedulers:
            return
        own = engine.optimizer
        pairs = zip(own.param_groups, self._optimizer.param_groups, strict=True)
        for (group, before), began in zip(pairs, self._began, strict=True):
            # Some keep there what they go between.
            group.update({name: before[name] for name in before.keys() - group.keys()})
            group["initial_lr"] = began
        for scheduler in self._schedulers:
            scheduler.optimizer = own
        _mark_step(own)


def _all(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler and those that it is made of."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _all(inner)


def _mark_step(optimizer: torch.optim.Optimizer) -> None:
    """Let schedulers know that steps are counted: they warn of an optimizer that was not wrapped
    when they were made."""
    step = optimizer.step

    @wraps(step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = counted  # type: ignore[method-assign]
