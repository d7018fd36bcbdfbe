"""Parameters of which a pass uses some, as its data say: experts that a module keeps in a list.

A list of modules (nn.ModuleList) has no forward, so which of its modules run is decided by the code
around it. Where they are *alike*, of one class with parameters of the same shapes, they may stand
for each other, and a pass may leave any of them out, on each rank other ones.

What is sent must not depend on that. A contribution to such a parameter is therefore not counted
when it is written, but when the backward pass of its unit ends. Then every alternative of the unit
is counted once, in one order on all ranks, and one that was not used has a gradient of zero. So a
unit has the same contributions in each pass, and buckets are reduced in the order of the plan. They
are complete at the end of their unit instead of a few operators before it.

A parameter that no rank has used in a whole step is left out of the step, as torch.optim leaves out
one without a gradient (``unused.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from megatron_llama.engine.handle import BucketParamHandle
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.param_handle import attach_param_handle, param_handle_of
from megatron_llama.engine.shard.holders import Holders
from megatron_llama.engine.shard.names import ParameterNames
from megatron_llama.engine.shard.optimizer import ParameterGroup
from megatron_llama.engine.shard.specs import ModuleUnit
from megatron_llama.engine.shard.unused import DIVISIBLE, Unused

ByUnit = Mapping[int, Sequence[str]]
"""By the number of a unit, the names of its alternatives in the order of registration."""


def alternatives_in_units(
    units: Sequence[ModuleUnit],
    names: ParameterNames,
    groups: Sequence[ParameterGroup],
    optimizer_offload: str,
) -> ByUnit:
    """Return the parameters of alike modules in a list inside of a unit, which no other unit reads.

    There are none where updates cannot leave out single parameters: what becomes of an expert
    that no rank has used is then for the user to say (``shard(unused="zero")``)."""
    if optimizer_offload != "none" or any(group.rule not in DIVISIBLE for group in groups):
        return {}
    readers = Counter(name for unit in units for name in unit.parameters)
    found: dict[int, Sequence[str]] = {}
    for unit in units:
        if unit.is_root_part:
            continue  # it is read anywhere, so nothing shows the end of its backward pass
        listed = {
            names[parameter][0]
            for module in unit.module.modules()
            for parameter in _alternatives(module)
            if parameter in names and parameter.requires_grad
        }
        own = [name for name in unit.parameters if name in listed and readers[name] == 1]
        if own:
            found[unit.index] = own
    return found


def _alternatives(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of what a list holds, if it holds several of one kind."""
    members: Iterable[nn.Module | nn.Parameter]
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        members = module.children()
    elif isinstance(module, nn.ParameterList | nn.ParameterDict):
        members = module.parameters(recurse=False)
    else:
        return
    members = list(members)
    if len(members) < 2 or len({_described(member) for member in members}) > 1:
        return
    for member in members:
        yield from (member,) if isinstance(member, nn.Parameter) else member.parameters()


def _described(member: nn.Module | nn.Parameter) -> tuple[object, ...]:
    """Return what members that stand for each other have in common."""
    if isinstance(member, nn.Parameter):
        return (member.shape,)
    shapes = ((name, parameter.shape) for name, parameter in member.named_parameters())
    return type(member), *shapes


class Alternatives:
    """The alternatives of a model's units, and which of them a step has used."""

    def __init__(
        self, engine: OverlappedDistributedOptimizer, holders: Holders, by_unit: ByUnit
    ) -> None:
        """Count their contributions from now on."""
        self._by_unit = by_unit
        self._trained = holders.trained
        self._written: set[str] = set()
        """Those with a contribution that has not been counted."""
        self._used: set[str] = set()
        """Those that some pass of this step has used on this rank."""
        self._begun: set[int] = set()
        """The units whose backward passes are under way."""
        self._handles: dict[str, BucketParamHandle] = {}
        for name in (name for names in by_unit.values() for name in names):
            parameter = holders.parameters[name]
            handle = param_handle_of(parameter)
            assert isinstance(handle, BucketParamHandle)
            self._handles[name] = handle
            attach_param_handle(parameter, _CountedLater(**vars(handle), note=self._written.add))
        self._unused = Unused(engine)

    def begin_step(self) -> None:
        """Forget the passes before: a step begins."""
        self._written.clear()
        self._used.clear()
        self._begun.clear()

    def begin(self, unit: int, *, opens: bool) -> None:
        """The backward pass of a unit begins, or goes on. With ``opens`` its buckets take their
        slots at once: in a step that is recorded ranks agree on that, so that it must not wait for
        a contribution that some rank may not have."""
        if unit in self._begun or unit not in self._by_unit:
            return
        self._begun.add(unit)
        if opens:
            one_of_each = {self._handles[n].bucket: n for n in self._present(unit)}
            for name in one_of_each.values():
                self._fill(name)

    def end(self, unit: int) -> None:
        """The backward pass of a unit ends, if one has begun: count all its alternatives."""
        if unit not in self._begun:
            return
        self._begun.remove(unit)
        for name in self._present(unit):
            if name in self._written:
                self._written.remove(name)
                self._used.add(name)
            else:
                self._fill(name)
            self._handles[name].grad_written()

    def end_all(self) -> None:
        """A backward pass of the model ends."""
        for unit in sorted(self._begun, reverse=True):
            self.end(unit)

    def leave_out_unused(self, frozen: Collection[str]) -> None:
        """Leave out of the coming updates what no rank has used in this step, and what is
        ``frozen``. Collective; does not wait."""
        left_out = self._handles.keys() - self._used
        self._unused.ask({n for n in self._unused.names if n not in left_out and n not in frozen})

    def _present(self, unit: int) -> Iterator[str]:
        """Yield the alternatives of a unit that are not frozen."""
        return (name for name in self._by_unit[unit] if self._trained[name])

    def _fill(self, name: str) -> None:
        """Let the slot of a parameter have a gradient of zero, if it has none in this round."""
        view, beta = self._handles[name].grad_view()
        if beta == 0:
            view.zero_()


@dataclass(frozen=True, kw_only=True)
class _CountedLater(BucketParamHandle):
    """The handle of an alternative, whose contributions are noted, and counted later."""

    note: Callable[[str], object]

    def grad_written(self) -> None:
        self.note(self.placement.spec.name)
