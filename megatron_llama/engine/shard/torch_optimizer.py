"""The engine as a torch.optim.Optimizer: for learning-rate schedulers, Accelerate and Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from torch import nn

from megatron_llama.engine.options import UpdateOptions
from megatron_llama.engine.shard.names import ParameterNames
from megatron_llama.engine.shard.optimizer import ParameterGroup
from megatron_llama.errors import ConfigError


class EngineOptimizer(torch.optim.Optimizer):
    """``step``, ``zero_grad``, ``state_dict`` and ``param_groups`` of an engine, as torch.optim has
    them. All options of the groups may change between steps: schedulers change ``lr``, and some
    ``betas``, ``momentum`` or ``weight_decay``.

    The groups have their parameters' names as ``param_names``. Their ``params`` are placeholders:
    gradients are the engine's, so nothing can be done with them here."""

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        parameters: Mapping[str, nn.Parameter],
        state_names: Mapping[str, Sequence[str]],
        *,
        step: Callable[[], object],
        require_no_gradient: Callable[[str], None],
        state_dict: Callable[[], dict[str, Any]],
        load_state_dict: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """``state_names`` has the names of the state of each trained parameter. ``step`` makes a
        step of the engine, with ``learning_rates()``; ``require_no_gradient`` raises, in the name
        of its argument, between a backward pass and its step; the others are those of the engine,
        for the optimizer's part."""
        self._complete = False
        super().__init__(
            [
                {
                    "params": [(name, parameters[name]) for name in group.names],
                    "param_names": [],
                    "lr": group.lr,
                    **group.options,
                }
                for group in groups
            ],
            # OneCycleLR and CyclicLR look here for what they may change beside the rate: what all
            # groups have, which torch would give to those that lack it.
            {
                "lr": groups[0].lr,
                **{
                    name: value
                    for name, value in groups[0].options.items()
                    if all(name in group.options for group in groups)
                },
            },
        )
        self._complete = True
        self._placeholders = parameters
        # The state is the engine's. torch.distributed.checkpoint takes an optimizer without any for
        # one that has to make a step first, and reads the names of what a parameter has.
        for name, names in state_names.items():
            self.state[parameters[name]] = dict.fromkeys(names)
        self._given: tuple[torch.optim.Optimizer, ...] = ()
        self._given_rates: list[Any] = []
        self.made = tuple(groups)
        """The groups as ``shard`` has got them."""
        self._step = step
        self._require_no_gradient = require_no_gradient
        self._state_dict = state_dict
        self._load_state_dict = load_state_dict

    def learning_rates(self) -> list[float]:
        """Return the learning rate of each group. Raises ConfigError if a scheduler changes the
        optimizer that ``shard`` was given."""
        given = [group["lr"] for old in self._given for group in old.param_groups]
        # A schedule of the old optimizer would be without effect, and without an error.
        if given != self._given_rates:
            raise ConfigError(
                "the optimizer that shard() was given",
                got=f"learning rates {given}",
                expected=f"{self._given_rates} as before: this engine has an optimizer of its own",
                do="make schedulers of engine.optimizer, or give engine.step(lr=)",
            )
        return [float(group["lr"]) for group in self.param_groups]

    def update_options(self) -> tuple[UpdateOptions, ...]:
        """Return the other options of each group as they are now. Raises ConfigError for a value
        that the optimizer does not have."""
        result = []
        for index, (made, group) in enumerate(zip(self.made, self.param_groups, strict=True)):
            options = {name: group[name] for name in made.options}
            made.require_valid(f"engine.optimizer.param_groups[{index}]", options)
            result.append(made.update_options(options))
        return tuple(result)

    def take_over(self, given: Sequence[torch.optim.Optimizer], names_of: ParameterNames) -> None:
        """This optimizer has the groups of ``given``, which are optimizers no more (``Retired``).
        A learning rate that a scheduler changes there, where it has no effect, is an error of the
        next step. ``names_of`` has the names of their parameters."""
        self._given = tuple(given)
        self._given_rates = [group["lr"] for old in given for group in old.param_groups]
        for old in given:
            # State that a constructor makes is of whole parameters.
            old.state.clear()
            for group in old.param_groups:
                group["params"] = [self._placeholders[names_of[own][0]] for own in group["params"]]
            old.__class__ = _retired_class(type(old))  # type: ignore[arg-type]

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
        """Return the optimizer's part of ``engine.state_dict()`` as torch.optim has it: numbers
        stand for the names, which are the groups' ``param_names``. Collective."""
        state = self._state_dict()
        numbers = {name: number for number, name in enumerate(self._names())}
        return {
            "state": {numbers[name]: value for name, value in state["state"].items()},
            "param_groups": [
                {
                    **group,
                    "params": [numbers[name] for name in group["params"]],
                    "param_names": group["params"],
                }
                for group in state["param_groups"]
            ],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state as ``engine.load_state_dict`` does, with names or with the numbers of
        torch.optim, which stand for ``param_names`` or else for the parameters in their order here.
        Collective."""
        groups = state_dict.get("param_groups", ())
        saved = [number for group in groups for number in group.get("params", ())]
        names = [name for group in groups for name in group.get("param_names", ())]
        if len(names) != len(saved):
            names = self._names()
        # Numbers of another count of parameters stay, and are named as unexpected.
        name_of = dict(zip(saved, names, strict=False)) if len(names) == len(saved) else {}
        if any(isinstance(number, int) for number in saved):
            state_dict = {
                **state_dict,
                "state": {
                    name_of.get(number, number): value
                    for number, value in state_dict.get("state", {}).items()
                },
                "param_groups": [
                    {**group, "params": [name_of.get(n, n) for n in group.get("params", ())]}
                    for group in groups
                ],
            }
        self._load_state_dict(state_dict)

    def _names(self) -> list[str]:
        return [name for group in self.param_groups for name in group["param_names"]]


class Retired(torch.optim.Optimizer):
    """An optimizer whose parameters ``shard`` has taken. Its groups hold placeholders: with the
    parameters themselves it would keep the whole model in memory. Scripts that go on to use it
    would train, clear or save nothing, so everything that does so raises ConfigError."""

    def step(self, closure: object = None) -> NoReturn:
        """Raise ConfigError."""
        raise _retired("step()", "engine.step()")

    def zero_grad(self, set_to_none: bool = True) -> NoReturn:
        """Raise ConfigError."""
        raise _retired("zero_grad()", "nothing, since each step starts with gradients of zero")

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Raise ConfigError."""
        raise _retired("add_param_group()", "it before shard(), with all groups")

    def state_dict(self) -> NoReturn:
        """Raise ConfigError."""
        raise _retired("state_dict()", "engine.state_dict() or engine.optimizer.state_dict()")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> NoReturn:
        """Raise ConfigError."""
        raise _retired("load_state_dict()", "engine.load_state_dict()")


def _retired(what: str, instead: str) -> ConfigError:
    return ConfigError(
        "the optimizer that shard() was given",
        got=what,
        expected="calls of the engine, which has an optimizer of its own",
        do=f"call {instead}; engine.optimizer is the engine as a torch.optim.Optimizer",
    )


@cache
def _retired_class(base: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return the class of retired optimizers of class ``base``."""
    return type(base.__name__, (Retired, base), {"__module__": base.__module__})
