"""Where modules hold their parameters, and what stands there now: the parameters themselves while
their unit runs, placeholders otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron_llama.engine.handle import BucketParamHandle
from megatron_llama.engine.param_handle import attach_param_handle
from megatron_llama.engine.plan.buckets import PlacedParam
from megatron_llama.engine.shard.linear import waits_itself
from megatron_llama.engine.shard.names import ParameterNames
from megatron_llama.engine.shard.placeholders import (
    AskToTrain,
    Placeholder,
    Resolve,
    ShardedParameterError,
)
from megatron_llama.engine.shard.specs import ModuleUnit
from megatron_llama.engine.shard.tensor_layouts import ALL_PLAIN, TensorLayouts


@dataclass(frozen=True)
class Place:
    """One registration of a parameter in a module."""

    module: nn.Module
    leaf: str
    name: str
    """The parameter's name."""

    def put(self, parameter: nn.Parameter) -> None:
        """Let the module hold another parameter here."""
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.leaf] = parameter
        else:
            # A module with further references to its parameters, such as nn.LSTM, keeps them here.
            setattr(self.module, self.leaf, parameter)


Explained = Callable[[], AbstractContextManager[None]]
"""Makes a section in which the end of a wait becomes the reason of the rank that has left."""


class Holders:
    """The parameters of a model, which are views of the engine's slots, and their placeholders."""

    def __init__(
        self,
        model: nn.Module,
        names: ParameterNames,
        explained: Explained,
        layouts: TensorLayouts = ALL_PLAIN,
    ) -> None:
        self._explained = explained
        self.layouts = layouts
        self.places: dict[str, list[Place]] = {own[0]: [] for own in names.values()}
        """By parameter, every place where it is registered: a tied weight has several."""
        for module in model.modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None and parameter in names:
                    name = names[parameter][0]
                    self.places[name].append(Place(module, leaf, name))
        self.attributes = {own[0]: dict(vars(parameter)) for parameter, own in names.items()}
        """By parameter, what others have attached to it, such as ``no_weight_decay``."""
        self.parameters: dict[str, nn.Parameter] = {}
        """By name, the parameter whose values are in the engine's slot while its unit runs."""
        self.placeholders: dict[str, Placeholder] = {}
        self.trained: dict[str, bool] = {}
        """By name, whether the parameter requires a gradient in the passes that run."""
        self._ask_to_train: AskToTrain | None = None
        self._stand_ins: dict[str, list[nn.Parameter]] = {name: [] for name in self.places}
        """By name, what stands for the parameter in some passes, beside its placeholder."""

    def attach(self, placed: PlacedParam, view: Tensor, handle: BucketParamHandle) -> None:
        """Make the parameter of a view of a slot: the engine calls this for each."""
        name = placed.spec.name
        parameter = self.layouts.parameter(name, view, requires_grad=placed.spec.trainable)
        vars(parameter).update(self.attributes[name])
        attach_param_handle(parameter, replace(handle, waits=self._explained))
        self.parameters[name] = parameter
        self.trained[name] = placed.spec.trainable

    def make_placeholders(self, resolve: Mapping[str, Resolve], ask_to_train: AskToTrain) -> None:
        """Make the placeholder of each parameter, with what it asks before it refuses.
        ``ask_to_train`` is told what ``requires_grad`` shall be."""
        self._ask_to_train = ask_to_train
        for name in self.parameters:
            self.placeholders[name] = self.placeholder(name, resolve[name])

    def set_trained(self, name: str, trained: bool) -> None:
        """Let a parameter require a gradient from the next pass on, or none."""
        self.trained[name] = trained
        for stand_in in (self.parameters[name], *self._stand_ins[name]):
            with torch._C.DisableTorchFunctionSubclass():
                stand_in.requires_grad_(trained)

    def placeholder(self, name: str, resolve: Resolve) -> Placeholder:
        """Return a new placeholder of a parameter."""
        parameter = self.parameters[name]
        made = Placeholder(
            name,
            parameter.shape,
            parameter.dtype,
            parameter.device,
            resolve,
            requires_grad=parameter.requires_grad,
            ask_to_train=self._ask_to_train,
        )
        vars(made).update(self.attributes[name])
        return made

    def stand_in(self, name: str, resolve: Resolve) -> Placeholder:
        """Return a placeholder that stands for a parameter in some passes, and requires a gradient
        where that does."""
        made = self.placeholder(name, resolve)
        self._stand_ins[name].append(made)
        return made

    def waited_for_when_read(self, names: Iterable[str]) -> bool:
        """Whether the modules that hold these parameters wait for them when they are called."""
        return all(
            waits_itself(place.module, place.leaf) for name in names for place in self.places[name]
        )

    def install(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Let the modules hold the given parameters, in all places of each."""
        for name, parameter in parameters.items():
            for place in self.places[name]:
                place.put(parameter)

    def uninstall(self) -> None:
        """Let the modules hold placeholders."""
        self.install(self.placeholders)

    def of_unit(self, unit: ModuleUnit) -> UnitHolders:
        """Return the places of one unit, for swapping."""
        # A module may be in two units, and then both swap its parameters.
        owned = set(unit.owned)
        return UnitHolders(
            [p for places in self.places.values() for p in places if p.module in owned],
            self.parameters,
            self.placeholders,
            self.trained,
        )


class UnitHolders:
    """The places of one unit, which change before and after each of its passes."""

    def __init__(
        self,
        places: Iterable[Place],
        parameters: Mapping[str, nn.Parameter],
        placeholders: Mapping[str, nn.Parameter],
        trained: Mapping[str, bool],
    ) -> None:
        self._direct: list[tuple[MutableMapping[str, nn.Parameter | None], str, str]] = []
        self._others: list[Place] = []
        for place in places:
            if type(place.module).__setattr__ is nn.Module.__setattr__:
                self._direct.append((place.module._parameters, place.leaf, place.name))
            else:
                self._others.append(place)
        self._parameters = parameters
        self._placeholders = placeholders
        names = dict.fromkeys(name for *_, name in self._direct)
        names |= dict.fromkeys(place.name for place in self._others)
        self._in_forward = parameters
        self._trained = trained
        self._own = [(parameters[name], name) for name in names]
        # They count what users write: gathers and updates write the slot, which has its own.
        self._versions = [parameter._version for parameter, _ in self._own]

    def changed(self) -> str | None:
        """Return the name of a parameter whose ``requires_grad`` is no longer what it was."""
        for parameter, name in self._own:
            if parameter.requires_grad is not self._trained[name]:
                return name
        return None

    def written(self) -> str | None:
        """Return the name of a parameter that has been changed in place since this was asked last.
        Gathers and updates write the slot and count no change (``Tensor.data``)."""
        for position, (parameter, name) in enumerate(self._own):
            if parameter._version != self._versions[position]:
                self._versions[position] = parameter._version
                return name
        return None

    def let_wait(self, late: Mapping[str, nn.Parameter]) -> None:
        """Let what is in ``late`` stand for parameters in forward passes from now on."""
        self._in_forward = {name: late.get(name, self._parameters[name]) for _, name in self._own}

    def hold_in_forward(self) -> None:
        """Let the unit's modules hold the parameters themselves, or what stands for them."""
        self._hold(self._in_forward)

    def hold_parameters(self) -> None:
        """Let the unit's modules hold the parameters themselves."""
        self._hold(self._parameters)

    def hold_placeholders(self) -> None:
        """Let the unit's modules hold placeholders."""
        self._hold(self._placeholders)

    def _hold(self, chosen: Mapping[str, nn.Parameter]) -> None:
        for held, leaf, name in self._direct:
            present = held[leaf]
            # Another tensor comes from the user: to put ours over it would undo that in silence.
            if (
                present is not self._placeholders[name]
                and present is not self._in_forward[name]
                and present is not self._parameters[name]
            ):
                raise ShardedParameterError(
                    name,
                    got="another tensor in its place",
                    expected="the parameter that shard() has found there",
                    do="tie weights before shard(); change values by engine.load_state_dict or "
                    "inside engine.gathered(modify=True); call a functional model there, too",
                )
            held[leaf] = chosen[name]
        for place in self._others:
            place.put(chosen[place.name])
