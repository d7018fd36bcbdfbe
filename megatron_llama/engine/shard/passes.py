"""The forward passes and steps of a user's model, as the engine sees them.

    forward     A call of a unit is an access: what it lacks is gathered, the next unit's weights
                are prefetched, and the modules hold their parameters until the call ends.
    backward    ``backward.py``
    the step    All backward passes have ended. The first step is recorded: its accesses and
                gradients are the plan of the next ones.

A call inside a backward pass recomputes what torch.utils.checkpoint has not kept. It is an access
only if another unit came in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from megatron_llama.engine.comm.object_collectives import AGREEMENT, all_gather_object
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer, StepResult
from megatron_llama.engine.pieces import rule_progress
from megatron_llama.engine.shard.accesses import Accesses, PassError, Unit, in_backward_pass
from megatron_llama.engine.shard.backward import BackwardPasses, unannounced
from megatron_llama.engine.shard.buffers import broadcast_buffers
from megatron_llama.engine.shard.casts import Casts, unit_casts
from megatron_llama.engine.shard.holders import Holders, UnitHolders
from megatron_llama.engine.shard.intercept import Forward, Interceptor, intercept, intercept_model
from megatron_llama.engine.shard.names import clean_name
from megatron_llama.engine.shard.order import (
    BUFFERS,
    DISCARD,
    EVALUATION,
    MODEL_STATE,
    OPTIMIZER_STATE,
    STEP,
    AccessOrder,
)
from megatron_llama.engine.shard.peers import OrderError, Peers
from megatron_llama.engine.shard.placeholders import Placeholder, ShardedParameterError
from megatron_llama.engine.shard.positions import Counts, Position
from megatron_llama.engine.shard.specs import ModuleUnit

if TYPE_CHECKING:
    from megatron_llama.engine.shard.alternatives import ByUnit

COMPILE_HINT = (
    "shard() announces each call of a unit: compile units with module.compile(), or with "
    "torch.compile before shard()"
)
"""The hint of torch.compile's error if a region with fullgraph=True has a sharded unit."""


@dataclass(eq=False)
class _Call:
    """One call of a unit."""

    unit: Unit
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    recomputes: bool
    """Whether it is inside a backward pass."""
    outermost: bool
    again: bool
    """Whether it is inside another call of the same unit."""
    position: int
    """How many accesses of the plan had been made."""
    begin: int
    """Autograd gives this number, or a higher one, to what is computed in it."""
    reads: AbstractContextManager[None]
    """Checks in backward that saved weights are there, where that has to be found out."""


class Passes:
    """The passes of a model, and the steps that they make."""

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
        cast_to: torch.dtype | None,
        find_unused: bool,
        skips_unused: bool,
        alternatives: ByUnit,
        ignored: Collection[nn.Parameter],
        shares_buffers: bool,
        require_values: Callable[[], None],
    ) -> None:
        """``cast_to`` is the dtype to which floating inputs of the model are cast; None: they are
        not. ``alternatives`` are parameters of units that a pass may leave out. ``ignored`` are
        parameters that the engine does not have. ``shares_buffers`` says
        whether rank 0's buffers are those of all ranks. ``require_values`` raises while parameters
        have no values, or others than their masters."""
        self._model = model
        self._engine = engine
        self._holders = holders
        self._order = order
        self._peers = peers
        peers.end_waits = WeakMethod(engine.fail)
        peers.counts = WeakMethod(self._counts)
        peers.position = WeakMethod(self._position)
        self._ignored = frozenset(ignored)
        self._shares_buffers = shares_buffers
        self._shared_before: int | None = None
        """The backward pass of the step for which buffers were shared last."""
        self._require_values = require_values
        self.shows_masters = False
        """Whether the whole parameters that modules hold while calls are none of the engine's
        business are in the dtype of the masters."""
        self._accesses = Accesses(
            model,
            units,
            engine,
            holders,
            order,
            peers,
            microbatches=microbatches,
            casts=unit_casts(units, model, cast_to, engine.dtype),
            find_unused=find_unused,
            skips_unused=skips_unused,
        )
        if alternatives:
            from megatron_llama.engine.shard.alternatives import Alternatives

            self._accesses.alternatives = Alternatives(engine, holders, alternatives)
        self._step = self._accesses.step
        self._backward = BackwardPasses(self._accesses)
        # Calls of the model begin and end its passes, where it is no unit as well.
        around = (
            [] if any(unit.module is model for unit in units) else [_whole(model, Casts(cast_to))]
        )
        for unit in (*around, *self._accesses.units):
            self._intercept(unit)

    def _intercept(self, unit: Unit) -> None:
        # What happens here is not for the graph of a compiled region around the unit; what the
        # unit computes may be.
        hidden = partial(torch.compiler.disable, reason=COMPILE_HINT)
        begin = hidden(self._begin)
        finish = hidden(self._finish)
        fail = hidden(self._fail)
        cast_inputs = hidden(unit.casts.cast_inputs)
        cast_outputs = hidden(unit.casts.cast_outputs)

        def called(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call = begin(unit, args, kwargs)
            if call is None:
                # Masters all have one dtype, but frozen parameters have no others than those that
                # compute; ``gathered(only=)`` may have chosen this unit's alone.
                if not self.shows_masters or _dtype(unit.module) == unit.casts.inputs:
                    args, kwargs = cast_inputs(args, kwargs)
                output = forward(*args, **kwargs)
                return output if self.shows_masters else cast_outputs(output)
            try:
                output = cast_outputs(forward(*call.args, **call.kwargs))
            except BaseException as error:
                fail(call, error)
                raise
            finish(call, output)
            return output

        interceptor: Interceptor = hidden(called, recursive=False)
        if unit.module is self._model:
            intercept_model(self._model, interceptor, require_no_gradient=self.require_no_gradient)
        else:
            intercept(unit.module, interceptor)

    # Between steps

    @property
    def microbatches(self) -> int:
        """The backward passes of a step."""
        return self._step.microbatches

    @microbatches.setter
    def microbatches(self, count: int) -> None:
        """Set the number, between steps."""
        self._step.microbatches = count

    @property
    def between_steps(self) -> bool:
        """Whether no pass of a step has begun."""
        return not self._step.begun

    @property
    def suspended(self) -> bool:
        """Whether the modules hold whole parameters, so that calls are none of the engine's
        business."""
        return self._accesses.suspended

    @suspended.setter
    def suspended(self, suspended: bool) -> None:
        """Say that modules hold whole parameters from now on, or no longer."""
        self._accesses.suspended = suspended

    def values_changed(self) -> None:
        """The parameters have other values: no backward pass may follow a forward pass that is
        over."""
        self._step.generation += 1

    def meet(self, code: int) -> None:
        """Make sure that all ranks do together what ``code`` of ``order.py`` stands for.
        Collective, unless no rank needs another one for it."""
        reads = code in (MODEL_STATE, OPTIMIZER_STATE) and self._engine.mesh.dp_gather.size == 1
        # Updates that are put off are made before anything is read. On one rank alone they would
        # come earlier than on the others, and replicas would go apart.
        if not reads or rule_progress(self._engine) is not None:
            self._order.agree(code)
            # Whichever rank writes a buffer to a checkpoint. What each has whole asks nobody.
            if code == MODEL_STATE and self._shares_buffers:
                self._receive_buffers()

    def _counts(self) -> Counts:
        order, engine = self._order, self._engine
        return Counts(order.made, order.steps, engine.parameters.launched, engine.gradients.reduced)

    def _position(self) -> Position:
        """Return where this rank is. Called by a thread."""
        # First what grows, then the meeting since which it is counted: what comes between lets this
        # rank seem to have done less, never more.
        counts = self._counts()
        awaited = self._engine.parameters.awaited
        meeting = self._peers.meeting
        return Position(
            meeting.number,
            meeting.said,
            counts.since(meeting.at),
            awaited - meeting.at.launched,
            self._peers.waited() > 0,
            self._order.words,
        )

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the factor of this step."""
        loss_scale = self._engine.loss_scale
        if not loss_scale.dynamic:
            return loss
        from megatron_llama.engine.shard.scaled_loss import scaled

        return scaled(loss, loss_scale.value, self._backward.begin_scaled)

    def require_usable(self) -> None:
        """Raise PassError if no pass may run any more."""
        self._accesses.require_usable()

    def require_no_gradient(self, what: str) -> None:
        """Raise PassError between a backward pass and its step: ``what`` would take its gradients
        back, and they may be on their way already."""
        if self._step.in_backward or self._step.backward_passes:
            raise PassError(
                what,
                got="gradients that no step has used",
                expected="a call before the first backward pass of a step",
                do="call engine.step() first, or engine.discard() to throw them away",
            )

    def tell_peers(self, error: BaseException) -> None:
        """This rank leaves with an error that ends its training."""
        rank = self._peers.axis.rank
        if not isinstance(error, OrderError):
            self._peers.leave(
                f"rank {rank}: got {type(error).__name__} ({error}), expected no error; see there"
            )

    def close(self) -> None:
        """Let no pass run any more."""
        self._note_broken_backward()
        if self._step.broken is not None:
            # A closed engine leaves in peace, but its peers may be waiting for this step.
            with suppress(PassError, OrderError):
                self._accesses.require_usable()
        self._accesses.refusal = (
            self._accesses.refusal or self._step.broken or "engine.close() before"
        )
        self._peers.close()
        self._backward.close()

    # Forward

    def _begin(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        """A unit is called. Returns None if the engine has nothing to do with that."""
        accesses = self._accesses
        if accesses.suspended:
            return None
        recomputes = in_backward_pass()
        outermost = not accesses.active
        if recomputes:
            self._backward.enter(outside=self._accesses.frozen)
        elif outermost:
            self._begin_forward()
        args, kwargs = unit.casts.cast_inputs(args, kwargs)
        call = _Call(
            unit,
            args,
            kwargs,
            recomputes,
            outermost,
            unit in accesses.active,
            self._order.position,
            torch._C._autograd._get_sequence_nr(),
            self._checked_reads(unit),
        )
        accesses.active.append(unit)
        call.reads.__enter__()
        try:
            if unit.index >= 0 and not call.again:
                if not recomputes:
                    accesses.require_nested(unit)
                    accesses.access_and_return(unit, backward=False)
                    unit.holders.hold_in_forward()
                elif not unit.pooled:
                    accesses.access_and_return(unit, backward=True)
                    accesses.held.append(unit)
                    unit.holders.hold_parameters()
                elif accesses.current is not unit:
                    accesses.access(unit, backward=True)
                    accesses.hold_in_backward(unit)
        except BaseException as error:
            self._fail(call, error)
            raise
        return call

    def _checked_reads(self, unit: Unit) -> AbstractContextManager[None]:
        """Check what is read in backward where a slot may hold another unit."""
        if not unit.slots or not torch.is_grad_enabled():
            return nullcontext()
        from megatron_llama.engine.shard.saved_weights import checks_reads

        def require_announced() -> None:
            if unit not in self._accesses.held:
                raise self._accesses.refuse(unannounced(unit.name))

        return checks_reads(unit.slots, require_announced)

    def _leave(self, call: _Call) -> None:
        call.reads.__exit__(None, None, None)
        self._accesses.active.pop()
        if not call.again and call.unit not in self._accesses.held:
            call.unit.holders.hold_placeholders()

    def _fail(self, call: _Call, error: BaseException) -> None:
        """A call has ended with an error."""
        self._leave(call)
        if isinstance(error, PassError | ShardedParameterError):
            self._accesses.refuse(error)
        if call.outermost and self._accesses.listed and not call.recomputes:
            self._break_off(call, error)

    def _finish(self, call: _Call, output: Any) -> None:
        """A call has ended."""
        unit = call.unit
        try:
            if (name := unit.holders.changed()) is not None:
                raise PassError(
                    name,
                    got=f"requires_grad={self._holders.parameters[name].requires_grad}, set inside "
                    "of the model",
                    expected="what it was when the pass began",
                    do="call requires_grad_ between steps",
                )
            if (name := unit.holders.written()) is not None:
                raise PassError(
                    name,
                    got="a change in place inside of the model",
                    expected="changes by engine.step() only: others are lost, or made on one rank",
                    do="change weights inside engine.gathered(modify=True), between two steps (an "
                    "embedding's max_norm as well)",
                )
            if torch.is_grad_enabled():
                self._backward.watch_outputs(unit, output, call.begin)
        except BaseException as error:
            self._fail(call, error)
            raise
        self._leave(call)

    def _begin_forward(self) -> None:
        """A call from outside of the model begins."""
        self._note_broken_backward()
        self._accesses.require_usable()
        self._require_values()
        trains = torch.is_grad_enabled()
        if trains:
            self._accesses.train_what_is_asked()
        self._accesses.listed = trains and not self._accesses.frozen
        if not self._accesses.listed:
            self._order.begin_evaluation()
            if not self._step.begun:
                if self._settling_sends():
                    self._order.agree(EVALUATION)
                self._engine.begin_evaluation(())
        elif not self._step.begun:
            self._accesses.begin_step()
        # Not between the forward passes of one backward pass: it would read other buffers than
        # they did.
        shares = self._accesses.listed and self._shares_buffers
        if shares and self._shared_before != self._step.backward_passes:
            self._order.agree(BUFFERS)
            self._receive_buffers()
            self._shared_before = self._step.backward_passes

    def _receive_buffers(self) -> None:
        with self._peers.explained(), self._peers.axis.recorder.waiting(AGREEMENT):
            broadcast_buffers(self._model, self._engine.mesh.dp)

    def _settling_sends(self) -> bool:
        """Whether the beginning of an evaluation may gather weights: those of updates that were put
        off, or averages."""
        engine = self._engine
        changes = bool(engine.evaluation_weights.buckets) or rule_progress(engine) is not None
        return changes and engine.mesh.dp_gather.size > 1

    def _break_off(self, call: _Call, error: BaseException) -> None:
        """A forward pass of the step has ended with an error."""
        self._order.break_off(call.position)
        if self._order.plan is not None and self._peers.axis.size > 1:
            # It is unknown whether the peers have come to the same error: a repeated pass would
            # gather buckets that they do not gather again. They are told with the next call, unless
            # that is ``discard``.
            self._step.broken = self._step.broken or (
                f"a forward pass of {call.unit.name} that ended with "
                f"{type(error).__name__} ({error}) on rank {self._peers.axis.rank}"
            )

    def _note_broken_backward(self) -> None:
        """Outside of autograd a backward pass that has not ended is one that raised an error."""
        if self._step.in_backward:
            self._step.broken = self._step.broken or "a backward pass that ended with an error"

    def _let_layers_wait(self) -> None:
        """From now on units begin their forward passes before those of their weights are there for
        which linear layers have waited in the first step.

        Such a layer finds a placeholder, which waits for its bucket and gives the parameter."""
        buckets = self._engine.bucket_plan.buckets
        for unit in self._accesses.units:
            if not unit.pooled:
                continue
            names = {
                bucket: [placed.spec.name for placed in buckets[bucket].placements]
                for bucket, _ in unit.reads
            }
            unit.late = frozenset(
                bucket for bucket in names if self._holders.waited_for_when_read(names[bucket])
            )
            unit.holders.let_wait(
                {
                    name: self._late(unit, bucket, name)
                    for bucket in unit.late
                    for name in names[bucket]
                }
            )

    def _late(self, unit: Unit, bucket: int, name: str) -> Placeholder:
        parameter = self._holders.parameters[name]

        def resolve(placeholder: Placeholder) -> nn.Parameter | None:
            if unit not in self._accesses.active and unit not in self._accesses.held:
                return None
            with self._peers.explained():
                self._engine.parameters.wait_unsharded(bucket, name)
            return parameter

        made = self._holders.stand_in(name, resolve)
        if self._accesses.freezing.may_train(name):
            self._backward.deliver_from(made, name)
        return made

    # The step

    def end_step(self, step: Callable[[], StepResult], *, fewer: bool = False) -> StepResult:
        """Run the engine's step if the passes of one have been made, or with ``fewer`` some of
        them. Raises PassError."""
        self._note_broken_backward()
        self._accesses.require_usable()
        if self._accesses.frozen:
            raise PassError(
                "engine.step()",
                got="a model without trained parameters",
                expected="something to train",
                do="leave the call out, or let parameters require gradients",
            )
        made = self._step.backward_passes
        if fewer and 0 < made < self._step.microbatches:
            self._accesses.end_early()
        elif made != self._step.microbatches or not self._step.begun:
            raise self._accesses.refuse(
                PassError(
                    "engine.step()",
                    got=f"{made} backward passes",
                    expected=f"{self._step.microbatches}, as shard(microbatches=) says",
                    do="call it after so many, set engine.microbatches before the step, give "
                    "engine.step(fewer=True), or throw the passes away with engine.discard()",
                )
            )
        if (following := self._order.expected) is not None:
            raise self._accesses.refuse(
                OrderError(
                    "engine.step()",
                    got="the end of the step",
                    expected=f"{following} as in the first step",
                    do="shard(static_order=False) for a model that takes another way each time",
                )
            )
        self._order.agree_unplanned(STEP)
        if self._order.plan is None:
            self._require_known()
            self._require_gradients()
        self._order.close_step()
        counting = self._accesses.open_counting
        with self._peers.explained():
            if self._accesses.unused is not None and counting is not None:
                self._accesses.unused.ask(counting.written)
            if self._accesses.alternatives is not None:
                self._accesses.alternatives.leave_out_unused(self._accesses.freezing.names)
            result = step()
        if counting is not None and self._order.end_step(counting.rounds):
            self._let_layers_wait()
        self._forget_passes()
        return result

    def discard(self) -> None:
        """Throw away the passes of the step under way, on all ranks. Collective."""
        accesses = self._accesses
        accesses.require_working()
        if accesses.active or in_backward_pass():
            raise PassError(
                "engine.discard()",
                got="a call inside of the model",
                expected="one between its passes",
                do="call it where engine.step() would be called",
            )
        # A rank may fail before its first pass of a step that others have begun.
        plan = None
        if not self._step.begun:
            accesses.train_what_is_asked()
            plan = self._order.begin_step(self._step.microbatches)
        self._order.agree(DISCARD)
        made = (self._step.begun, self._order.position, self._engine.gradients.reduced_rounds)
        with self._peers.explained():
            by_rank = all_gather_object(made, self._peers.axis)
        if any(begun for begun, _, _ in by_rank):
            if not self._step.begun:
                accesses.begin_announced(plan)
            # Where a pass has ended with an error, others may have gone on to its end. Buckets that
            # they have gathered are gathered here as well, so that all ranks go on from one state.
            furthest = max(position for begun, position, _ in by_rank if begun)
            for access in self._order.accesses_until(furthest):
                self._engine.access(access.unit, access.backward)
            reduced = [rounds if begun else () for begun, _, rounds in by_rank]
            if any(sum(rounds) for rounds in reduced) and len(set(reduced)) > 1:
                raise accesses.refuse(
                    PassError(
                        "engine.discard()",
                        got="backward passes that have come to different ends on the ranks",
                        expected="the same gradients on all ranks",
                        do="make a new engine",
                    )
                )
            with self._peers.explained():
                self._engine.discard_step()
        accesses.release_held()
        self._forget_passes()

    def _forget_passes(self) -> None:
        """The step is over: nothing of its passes may be used any more."""
        self._step.begun = False
        self._step.in_backward = False
        self._step.broken = None
        self._step.backward_passes = 0
        self._shared_before = None
        self._step.generation += 1
        self._order.forget()

    def _require_known(self) -> None:
        """Raise PassError for parameters that have come into the model after ``shard``."""
        added = [
            clean_name(name)
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
            and not isinstance(parameter, Placeholder)
            and parameter not in self._ignored
        ]
        if added:
            raise PassError(
                "engine.step()",
                got=f"parameters that were added after shard(): {', '.join(added)}",
                expected="those that shard() has found",
                do="build the whole model before shard()",
            )

    def _require_gradients(self) -> None:
        """Raise PassError on all ranks for parameters that got no gradient on some rank."""
        counting = self._accesses.open_counting
        if counting is not None and counting.allows_unused:
            return
        trained = self._holders.trained
        missing = tuple(n for n in self._engine.gradients.without_gradient() if trained[n])
        by_rank = all_gather_object(missing, self._peers.axis)
        if any(by_rank):
            rank = next(rank for rank, names in enumerate(by_rank) if names)
            unused = ", ".join(by_rank[rank])
            raise PassError(
                "engine.step()",
                got=f"no gradient of {unused}"
                + (f" on rank {rank}" if self._peers.axis.size > 1 else ""),
                expected="one of every trainable parameter",
                do="freeze what is not used, or shard(find_unused=True)",
            )


def _dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of the first parameter of a module; None if it has none."""
    return next((parameter.dtype for parameter in module.parameters()), None)


def _whole(model: nn.Module, casts: Casts) -> Unit:
    """Return the model as what runs around its units: it reads no weights itself."""
    return Unit(
        module=model,
        name="the model",
        index=-1,
        reads=(),
        holders=UnitHolders((), {}, {}, {}),
        pooled=False,
        inside=frozenset(),
        slots=frozenset(),
        casts=casts,
    )
