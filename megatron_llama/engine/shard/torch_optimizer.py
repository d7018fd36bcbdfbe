"""The engine as a torch.optim.Optimizer: for learning-rate schedulers, Accelerate and Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron_llama.engine.shard.names import clean_name
from megatron_llama.engine.shard.optimizer import ParameterGroup
from megatron_llama.engine.shard.state import OPTIONS
from megatron_llama.errors import ConfigError


class EngineOptimizer(torch.optim.Optimizer):
    """``step``, ``zero_grad``, ``state_dict`` and ``param_groups`` of an engine, as torch.optim has
    them. A scheduler changes ``lr`` of the groups; the other options cannot change.

    The groups have their parameters' names as ``param_names``. Their ``params`` are placeholders:
    gradients are the engine's, so nothing can be done with them here."""

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        parameters: Mapping[str, nn.Parameter],
        *,
        step: Callable[[], object],
        require_no_gradient: Callable[[str], None],
        state_dict: Callable[[], dict[str, Any]],
        load_state_dict: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """``step`` makes a step of the engine, with ``learning_rates()``; ``require_no_gradient``
        raises, in the name of its argument, between a backward pass and its step; the others are
        those of the engine, for the optimizer's part."""
        self._complete = False
        super().__init__(
            [
                {
                    "params": [(clean_name(name), parameters[name]) for name in group.names],
                    "param_names": [],
                    "lr": group.lr,
                    "betas": group.betas,
                    "eps": group.eps,
                    "weight_decay": group.weight_decay,
                }
                for group in groups
            ],
            # No defaults: a scheduler that would change betas as well asks here, and says so.
            {},
        )
        self._complete = True
        self._given: torch.optim.Optimizer | None = None
        self._given_rates: list[Any] = []
        self._options = [[group[name] for name in OPTIONS] for group in self.param_groups]
        self._step = step
        self._require_no_gradient = require_no_gradient
        self._state_dict = state_dict
        self._load_state_dict = load_state_dict

    def learning_rates(self) -> list[float]:
        """Return the learning rate of each group. Raises ConfigError if another option of a group
        has been changed."""
        for index, (group, before) in enumerate(zip(self.param_groups, self._options, strict=True)):
            for name, value in zip(OPTIONS, before, strict=True):
                if group[name] != value:
                    raise ConfigError(
                        f"engine.optimizer.param_groups[{index}]",
                        got=f"{name}={group[name]!r}",
                        expected=f"{value!r}, as shard(optimizer=) says: only lr may change",
                        do="choose a scheduler that leaves it alone (cycle_momentum=False)",
                    )
        given = [] if self._given is None else [group["lr"] for group in self._given.param_groups]
        # A schedule of the old optimizer would be without effect, and without an error.
        if given != self._given_rates:
            raise ConfigError(
                "the optimizer that shard() was given",
                got=f"learning rates {given}",
                expected=f"{self._given_rates} as before: this engine has an optimizer of its own",
                do="make schedulers of engine.optimizer, or give engine.step(lr=)",
            )
        return [float(group["lr"]) for group in self.param_groups]

    def take_over(self, given: torch.optim.Optimizer) -> None:
        """This optimizer has the groups of ``given``: a learning rate that a scheduler changes
        there, where it has no effect, is an error of the next step."""
        self._given = given
        self._given_rates = [group["lr"] for group in given.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step of the engine. Returns what ``closure`` returns, which is called before it
        and runs the backward passes."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: every step begins with gradients of zero. Raises PassError between a backward
        pass and its step, because its gradients cannot be taken back."""
        self._require_no_gradient("engine.optimizer.zero_grad")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ConfigError: the engine has all parameters from the beginning."""
        if self._complete:
            raise ConfigError(
                "engine.optimizer.add_param_group",
                got="another group",
                expected="the groups that shard() got",
                do="give shard(optimizer=) all groups",
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's part of ``engine.state_dict()``, with names for numbers.
        Collective."""
        return self._state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state as ``engine.load_state_dict`` does. Collective."""
        self._load_state_dict(state_dict)
