"""The passes that run in a user's model, as accesses to the weights of units.

A unit's forward or backward pass is an access: missing weights are gathered, the next unit's are
prefetched, and the unit that is about to run waits for its own. A *root part* (parameters in no
unit) has slots that nothing else takes, so it may be read anywhere while the model runs: the first
read of one outside of its call is an access too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron_llama.engine.counting import Counting
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.plan.weight_access import WeightAccess
from megatron_llama.engine.shard.casts import Casts
from megatron_llama.engine.shard.freezing import Freezing
from megatron_llama.engine.shard.holders import Holders, UnitHolders
from megatron_llama.engine.shard.open_counting import OpenCounting, UnusedCounting
from megatron_llama.engine.shard.order import REDUCTION, STEP, AccessOrder, StepPlan
from megatron_llama.engine.shard.peers import OrderError, Peers
from megatron_llama.engine.shard.placeholders import Placeholder, Resolve
from megatron_llama.engine.shard.short_steps import EndableCounting
from megatron_llama.engine.shard.specs import ModuleUnit
from megatron_llama.engine.shard.values import named
from megatron_llama.errors import TrainingError, UserError

if TYPE_CHECKING:
    from megatron_llama.engine.shard.alternatives import Alternatives
    from megatron_llama.engine.shard.unused import Unused


class PassError(TrainingError, RuntimeError):
    """Forward and backward passes that do not make a step."""


@dataclass(eq=False)
class Unit:
    """A unit or root part at run time, or the model itself."""

    module: nn.Module
    name: str
    index: int
    """Its number; -1 for the model, where this is neither a unit nor a root part."""
    reads: Sequence[tuple[int, str]]
    """The buckets that it reads, each with the name of one of its parameters."""
    holders: UnitHolders
    pooled: bool
    """Whether it is a unit and no root part: its slots may be taken by others."""
    inside: frozenset[int]
    slots: frozenset[int]
    """The addresses of the memory that it shares with other units, if what autograd saves there can
    be looked at."""
    casts: Casts
    late: frozenset[int] = frozenset()
    """The buckets that forward passes do not wait for: each linear layer waits for its own when it
    is called, so that those in front of it compute meanwhile."""

    def related(self, other: Unit) -> bool:
        """Whether one of two units is inside the other."""
        return self.index in other.inside or other.index in self.inside


@dataclass(eq=False)
class StepProgress:
    """How far the step under way has come."""

    microbatches: int
    """The backward passes of a step."""
    begun: bool = False
    """Whether a pass of it has begun."""
    in_backward: bool = False
    outside: bool = False
    """Whether the backward pass under way belongs to no step: its forward pass trained nothing."""
    backward_passes: int = 0
    """Those that have ended."""
    broken: str | None = None
    """Why its passes cannot go on."""
    generation: int = 0
    """How often the values of the parameters have changed."""


class Accesses:
    """The units that run now, and their accesses to weights.

    Called by the thread that computes, which in a backward pass on a device is autograd's."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ModuleUnit],
        engine: OverlappedDistributedOptimizer,
        holders: Holders,
        order: AccessOrder,
        peers: Peers,
        *,
        microbatches: int,
        casts: Sequence[Casts],
        find_unused: bool,
        skips_unused: bool = False,
    ) -> None:
        """``casts`` has those of each unit; ``find_unused`` says whether ranks may leave out
        different parameters, ``skips_unused`` whether no update is made of what all leave out."""
        self.engine = engine
        self.holders = holders
        self.order = order
        self.peers = peers
        self.step = StepProgress(microbatches)
        self._find_unused = find_unused
        self._gathers = engine.mesh.dp_gather.size > 1
        self.open_counting: OpenCounting | None = None
        """The gradients of this step as they are found out; None: they are planned."""
        self.planned_counting: EndableCounting | None = None
        """Those of the last step that was planned."""
        self.suspended = False
        """Whether the modules hold whole parameters, so that calls are none of the engine's
        business."""
        self.freezing = Freezing(engine, holders)
        self.alternatives: Alternatives | None = None
        """The parameters of units that a pass may leave out; None: there are none."""
        self.unused: Unused | None = None
        """Finds what no rank has used, so that the step leaves it out; None: nothing does."""
        if skips_unused:
            from megatron_llama.engine.shard.unused import Unused

            self.unused = Unused(engine)
        self.refusal: str | None = None
        """Why no pass may run any more."""
        self.listed = False
        """Whether accesses belong to the step: not those of evaluation."""
        self.active: list[Unit] = []
        """The units whose calls have begun and not ended, the outermost first."""
        self.held: list[Unit] = []
        """The units whose modules hold their parameters in this backward pass."""
        self.current: Unit | None = None
        """The unit that was accessed last in this backward pass."""
        plan = engine.bucket_plan
        self.bucket_of = {p.spec.name: b.index for b in plan.buckets for p in b.placements}
        """By parameter."""
        self.units = [
            Unit(
                unit.module,
                unit.name,
                unit.index,
                tuple({self.bucket_of[name]: name for name in unit.parameters}.items()),
                holders.of_unit(unit),
                not unit.is_root_part,
                frozenset(unit.inside),
                frozenset(
                    engine.parameters.unsharded[bucket].untyped_storage().data_ptr()
                    for bucket in {self.bucket_of[name] for name in unit.parameters}
                    # What nothing else can take is never wrong, and need not be looked at.
                    if not plan.has_own_slot(bucket)
                ),
                unit_casts,
            )
            for unit, unit_casts in zip(units, casts, strict=True)
        ]
        self.part_of = {
            name: self.units[unit.index]
            for unit in units
            if unit.is_root_part
            for name in unit.parameters
        }
        """By parameter that is in no unit."""
        owners = {name: unit for unit in reversed(units) for name in unit.parameters}
        holders.make_placeholders(
            {
                name: self._resolver(self.part_of[name], parameter)
                if name in self.part_of
                else self._refuser(model, owners[name])
                for name, parameter in holders.parameters.items()
            },
            self.freezing.ask,
        )

    @property
    def frozen(self) -> bool:
        """Whether nothing is trained: then no pass belongs to a step, and gradients may flow
        through the model at any time, to its inputs."""
        return self.freezing.everything

    def train_what_is_asked(self) -> None:
        """Let the passes from now on train the parameters that ``requires_grad_`` was called for.
        Collective if there are others than before. Raises PassError within a step."""
        if not self.freezing.asked:
            return
        if self.step.begun:
            raise self.refuse(
                PassError(
                    "requires_grad_",
                    got=f"another value for {named(self.freezing.asked)} within a step",
                    expected="calls between steps, or back to what it was before the next pass",
                    do="call it after engine.step(), or run what needs no gradients under "
                    "torch.no_grad()",
                )
            )
        # What a run that only trains does not need is imported where it is asked for.
        from megatron_llama.engine.shard.requires_grad import train_what_is_asked

        train_what_is_asked(self.engine, self.freezing, self.order)

    def begin_step(self) -> None:
        """Begin a step of the engine, by the plan if there is one."""
        self.begin_announced(self.order.begin_step(self.step.microbatches))

    def begin_announced(self, plan: StepPlan | None) -> None:
        """Begin a step of the engine whose plan ``order.begin_step`` has returned."""
        microbatches = self.step.microbatches
        gradients = self.engine.gradients
        counting: Counting
        if plan is None or self._find_unused:
            # Ranks that may leave out different parameters have no rounds in common.
            make = UnusedCounting if self._find_unused else OpenCounting
            counting = self.open_counting = make(
                gradients, self._agree_to_reduce, self.freezing.names
            )
        else:
            counting = EndableCounting(plan.rounds, self.engine.bucket_plan.label)
            self.planned_counting = counting
            self.open_counting = None
        if self.alternatives is not None:
            self.alternatives.begin_step()
        with self.peers.explained():
            self.engine.begin_step(microbatches, () if plan is None else plan.accesses, counting)
        self.step.begun = True
        self.step.backward_passes = 0

    def end_early(self) -> None:
        """The step ends after the backward passes so far, which are fewer than it was begun with.
        All ranks do that together. Raises OrderError."""
        self.order.shorten(self.step.backward_passes)
        # Ranks that go on to the next pass would wait for gathers, and these for gradients.
        if self.order.plan is not None:
            self.order.agree(STEP)
        if self.open_counting is None:
            assert self.planned_counting is not None
            self.planned_counting.end_early()
        self.engine.parameters.abandon()

    def _agree_to_reduce(self, bucket: int) -> None:
        self.order.agree_unplanned(REDUCTION - bucket)

    def require_working(self) -> None:
        """Raise PassError or OrderError if the engine has come to its end."""
        if self.refusal is not None:
            raise PassError(
                "engine", got=self.refusal, expected="a working engine", do="make a new one"
            )
        if self.peers.left is not None:
            raise OrderError(self.peers.left)

    def require_usable(self) -> None:
        """Raise PassError or OrderError if no pass may run any more."""
        self.require_working()
        if self.step.broken is not None:
            raise self.refuse(
                PassError(
                    "engine",
                    got=self.step.broken,
                    expected="passes without an error",
                    do="call engine.discard() on all ranks where all come to it, or make a new "
                    "engine",
                )
            )

    def refuse(self, error: UserError) -> UserError:
        """Return an error that only this rank may have. In a planned step ranks do not ask what the
        others do, and would wait for this rank: they are told."""
        if self.order.plan is not None and self.step.begun and self.peers.axis.size > 1:
            self.peers.leave(f"rank {self.peers.axis.rank}: {error}")
        return error

    def access(self, unit: Unit, *, backward: bool) -> None:
        """Gather what a unit reads, and wait for it."""
        access = WeightAccess(unit.index, backward)
        parameters = self.engine.parameters
        with self.peers.explained():
            if self.listed and self.order.enter(access):
                self.engine.access(unit.index, backward)
            else:
                following = self.order.expected_after(access)
                # What is whole on every rank is not sent, and each may evaluate as it likes.
                if not self.listed and self._gathers and self._lacks(unit, following):
                    self.order.enter_in_evaluation(access)
                self.engine.access_unplanned(unit.index, following)
            for bucket, name in unit.reads:
                # In forward a linear layer waits for its own weight when it is called.
                if backward or bucket not in unit.late:
                    parameters.wait_unsharded(bucket, name)

    def _lacks(self, unit: Unit, following: int | None) -> bool:
        """Whether an access in no plan may launch a gather, also for the unit that follows."""
        units = (unit,) if following is None else (unit, self.units[following])
        holds = self.engine.parameters.holds
        return not all(holds(bucket) for read in units for bucket, _ in read.reads)

    def access_and_return(self, unit: Unit, *, backward: bool) -> None:
        """Access a unit or root part. After a part the unit in which it is read is accessed again:
        the plan takes the slots of an earlier access for free."""
        self.access(unit, backward=backward)
        if unit.pooled:
            return
        active = (caller for caller in reversed(self.active) if caller.pooled)
        around = self.current if backward else next(active, None)
        if around is not None:
            self.access(around, backward=backward)

    def require_nested(self, unit: Unit) -> None:
        """Raise PassError for a unit that another one calls without having it: while the inner one
        runs, nothing keeps the weights of the outer one."""
        pooled = [caller for caller in self.active if caller.pooled and caller is not unit]
        for caller in pooled if unit.pooled else ():
            if caller.index not in unit.inside:
                raise PassError(
                    unit.name,
                    got=f"a call inside of {caller.name}",
                    expected="a call from outside of units, or from a unit that contains it",
                    do="register it in that module, or leave one of them out of units",
                )

    def hold_in_backward(self, unit: Unit) -> None:
        """Let a unit's modules hold its parameters, for what is recomputed in them, and those of
        units that are done with hold placeholders."""
        self.current = unit
        # Its slot may be taken by the next unit; a placeholder raises where a view would be wrong.
        for held in self.held:
            if held is not unit and not held.related(unit):
                held.holders.hold_placeholders()
                if self.alternatives is not None:
                    self.alternatives.end(held.index)
        self.held = [held for held in self.held if held.related(unit)]
        self.held.append(unit)
        unit.holders.hold_parameters()

    def release_held(self) -> None:
        """Let the modules of all units hold placeholders: a backward pass is over."""
        for unit in self.held:
            unit.holders.hold_placeholders()
        self.held.clear()
        self.current = None

    def _resolver(self, part: Unit, parameter: nn.Parameter) -> Resolve:
        """Return what lets a root part be read anywhere while the model runs."""

        def resolve(placeholder: Placeholder) -> nn.Parameter | None:
            if self.suspended or not (self.active or self.step.in_backward):
                return None
            # A call of the part that is under way has announced it already.
            if part not in self.active:
                self.access_and_return(part, backward=in_backward_pass())
            return parameter

        return resolve

    def _refuser(self, model: nn.Module, owner: ModuleUnit) -> Resolve:
        """Return what refuses to read a unit's parameter outside of the unit: its slot may hold
        another one."""

        def refuse(placeholder: Placeholder) -> None:
            if self.active and not self.suspended:
                from megatron_llama.engine.shard.readers import outside_of_its_unit

                raise outside_of_its_unit(
                    placeholder.parameter_name, model, owner.module, owner.name, owner.owned
                )

        return refuse


def in_backward_pass() -> bool:
    """Whether autograd calls this thread inside of a backward pass."""
    return torch._C._current_graph_task_id() != -1
