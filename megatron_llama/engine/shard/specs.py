"""The units of a user's module, and the parameters of each as the plans read them.

Everything that is gathered together is a ``ModuleUnit``: a module that the user named as a unit, or
a *root part*, which is what no unit has: the topmost modules without units below them, and what is
owned directly by a module around units. A parameter belongs to the innermost unit around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn

from megatron_llama.engine.plan.specs import HFSlice, ParamSpec, UnitSpec
from megatron_llama.engine.shard.names import WRAPPERS, ParameterNames, clean_name
from megatron_llama.engine.shard.optimizer import ParameterGroup
from megatron_llama.engine.shard.unit_policies import UnitPolicy, policy_of, unwrapped

IsUnit = Callable[[nn.Module], bool]
NO_POLICY = UnitPolicy(nn.Module, explicit=False)
"""That of root parts."""
NO_DTYPES: Mapping[str, str] = MappingProxyType({})


@dataclass
class ModuleUnit:
    """A module whose calls are accesses to the weights of a unit."""

    index: int
    """Its number among all units and root parts, in the order of registration."""
    name: str
    """The module's name, for messages."""
    module: nn.Module
    is_root_part: bool
    inside: tuple[int, ...]
    """The numbers of the units around it, the outermost first."""
    owned: list[nn.Module] = field(default_factory=list)
    """The modules whose own parameters belong to it."""
    parameters: list[str] = field(default_factory=list)
    """The parameters of these modules by name."""
    policy: UnitPolicy = NO_POLICY


def module_units(
    model: nn.Module, names: ParameterNames, policies: Sequence[UnitPolicy]
) -> list[ModuleUnit]:
    """Return the units and root parts of a model in the order of registration, without those that
    have no parameters. A module that some policy matches is a unit."""
    search = _Search(names, lambda module: any(policy.matches(module) for policy in policies))
    search.visit(model, "", None)
    # There is nothing to gather for the others, and a plan of units has no empty ones.
    kept = [unit for unit in search.units if unit.parameters]
    numbers = {unit.index: number for number, unit in enumerate(kept)}
    for number, unit in enumerate(kept):
        unit.index = number
        unit.inside = tuple(numbers[outer] for outer in unit.inside if outer in numbers)
        if not unit.is_root_part:
            unit.policy = policy_of(policies, unit.module)
    return kept


class _Search:
    """A walk over the modules of a model, each in the order in which it was registered."""

    def __init__(self, names: ParameterNames, is_unit: IsUnit) -> None:
        self._names = names
        self._is_unit = is_unit
        self.units: list[ModuleUnit] = []
        self._by_module: dict[nn.Module, ModuleUnit] = {}
        self._has_units: dict[nn.Module, bool] = {}
        self._visited: set[tuple[int, int]] = set()

    def visit(self, module: nn.Module, name: str, owner: ModuleUnit | None) -> None:
        """Give the parameters of ``module``, and of all below it, to their units. ``owner`` is the
        unit or root part that it is in, None above all of them."""
        if self._is_unit(module):
            if module in self._by_module:
                return  # registered a second time
            owner = self._add(module, name, owner, is_root_part=False)
        elif owner is None and (not self._units_below(module) or any(True for _ in _own(module))):
            if module in self._by_module:
                return
            root_part = self._add(module, name, None, is_root_part=True)
            if not self._units_below(module):
                owner = root_part
            else:
                self._give(module, root_part)
        if owner is not None:
            # A module that two units share is visited once for each.
            if (id(module), owner.index) in self._visited:
                return
            self._visited.add((id(module), owner.index))
            self._give(module, owner)
        for child_name, child in module.named_children():
            # The wrapper of torch.compile is the unit: what it wraps matches the same classes.
            if child_name == WRAPPERS[0] and owner is not None and owner.module is module:
                self._inside(child, name, owner)
            else:
                self.visit(child, f"{name}.{child_name}" if name else child_name, owner)

    def _inside(self, module: nn.Module, name: str, owner: ModuleUnit) -> None:
        """Visit a module that torch.compile has wrapped, as a part of the wrapper's unit."""
        self._give(module, owner)
        for child_name, child in module.named_children():
            self.visit(child, f"{name}.{child_name}" if name else child_name, owner)

    def _add(
        self, module: nn.Module, name: str, owner: ModuleUnit | None, *, is_root_part: bool
    ) -> ModuleUnit:
        inside = () if owner is None or owner.is_root_part else (*owner.inside, owner.index)
        unit = ModuleUnit(
            len(self.units), clean_name(name) or "the model", module, is_root_part, inside
        )
        self.units.append(unit)
        self._by_module[module] = unit
        return unit

    def _give(self, module: nn.Module, owner: ModuleUnit) -> None:
        owner.owned.append(module)
        for parameter in _own(module):
            if parameter not in self._names:
                continue  # the user leaves it out
            name = self._names[parameter][0]
            # A weight that is shared within a unit is gathered once.
            if name not in owner.parameters:
                owner.parameters.append(name)

    def _units_below(self, module: nn.Module) -> bool:
        if module not in self._has_units:
            # Kept: nested containers would ask the same modules again at every level.
            self._has_units[module] = any(
                self._is_unit(below) for below in module.modules() if below is not module
            )
        return self._has_units[module]


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    return module.parameters(recurse=False)


def own_dtypes(units: Sequence[ModuleUnit]) -> dict[str, torch.dtype]:
    """Return the dtypes of the parameters whose units have one of their own, by name."""
    return {
        name: unit.policy.dtype
        for unit in units
        if unit.policy.dtype is not None
        for name in unit.parameters
    }


def own_reduce_dtypes(units: Sequence[ModuleUnit]) -> dict[str, torch.dtype]:
    """Return the dtypes in which the gradients of parameters travel whose units have one of their
    own, by name."""
    return {
        name: unit.policy.reduce_dtype
        for unit in units
        if unit.policy.reduce_dtype is not None
        for name in unit.parameters
    }


def kept_parameters(units: Sequence[ModuleUnit]) -> frozenset[str]:
    """Return the parameters that are gathered once in a step, by name."""
    return frozenset(name for unit in units if unit.policy.keep for name in unit.parameters)


def unit_specs(
    names: ParameterNames,
    units: Sequence[ModuleUnit],
    groups: Sequence[ParameterGroup],
    dtypes: Mapping[str, str] = NO_DTYPES,
    reduce_dtypes: Mapping[str, str] = NO_DTYPES,
) -> tuple[UnitSpec, ...]:
    """Return what the plans know of each unit. A spec and its only slice have the parameter's
    name. ``dtypes`` has those of parameters that compute in another one than the engine,
    ``reduce_dtypes`` those of parameters whose gradients travel in another one."""
    group_of = {name: number for number, group in enumerate(groups) for name in group.names}
    specs = {
        name: _spec(
            name,
            parameter,
            group_of.get(name, 0),
            dtypes.get(name, ""),
            reduce_dtypes.get(name, ""),
            muon=name in group_of and groups[group_of[name]].by_muon,
        )
        for parameter, (name, *_) in names.items()
    }
    return tuple(
        UnitSpec(
            unit.name,
            tuple(specs[name] for name in unit.parameters),
            is_root_part=unit.is_root_part,
            inside=unit.inside,
            module_class=type(unwrapped(unit.module)).__qualname__,
        )
        for unit in units
    )


def _spec(
    name: str, parameter: nn.Parameter, group: int, dtype: str, reduces_in: str, *, muon: bool
) -> ParamSpec:
    shape = tuple(parameter.shape)
    return ParamSpec(
        name,
        shape,
        (HFSlice(name, shape, 0, shape[0] if shape else 1),),
        decay=parameter.requires_grad,  # by the group's weight decay, which may change
        trainable=parameter.requires_grad,
        group=group,
        resident=len(shape) < 2,
        muon=muon,
        dtype=dtype,
        reduces_in=reduces_in,
    )
