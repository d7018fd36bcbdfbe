"""What happens around the calls of a user's modules: forward and backward passes as accesses to
weights.

The model, its units and its root parts get a class of their own, derived from theirs, whose
``__call__`` comes before everything else: before hooks that users add, sooner or later, before a
compiled forward (``module.compile()``), and before what a library does in ``__call__``. So a unit
is announced once for a call, no hook is inside of a compiled region, and a user's hooks see the
parameters themselves.

    forward     A call of a unit is an access: what it lacks is gathered, the next unit's weights
                are prefetched, and the modules hold their parameters until the call ends.
    backward    Hooks on the outputs that were computed in the unit announce its backward pass.
                Autograd goes through the operators in exactly the reverse order, so the units come
                in the reverse order of their calls, and no unit's backward pass is interrupted but
                by that of a unit inside it.
    gradients   AccumulateGrad calls a hook of the parameter, which adds ``.grad`` to the slot.
    the end     A callback of the backward pass.

A call inside a backward pass recomputes what torch.utils.checkpoint has not kept. It is an access
only if another unit came in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from megatron_llama.distributed.comm.object_collectives import all_gather_object
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer, StepResult
from megatron_llama.errors import TrainingError
from megatron_llama.nn.ops import accumulate
from megatron_llama.nn.param_handle import param_handle_of
from megatron_llama.plans.weight_access import WeightAccess
from megatron_llama.sharding.holders import Holders, UnitHolders
from megatron_llama.sharding.names import clean_name
from megatron_llama.sharding.order import END_OF_BACKWARD, STEP, AccessOrder
from megatron_llama.sharding.peers import OrderError, Peers
from megatron_llama.sharding.placeholders import Placeholder, ShardedParameterError
from megatron_llama.sharding.saved_weights import checks_reads
from megatron_llama.sharding.specs import ModuleUnit

Forward = Callable[..., Any]
_INTERCEPTOR = "_megatron_llama_interceptor"
_PASSES = "_megatron_llama_passes"
COMPILE_HINT = (
    "shard() announces each call of a unit: compile units with module.compile(), or with "
    "torch.compile before shard()"
)
"""What torch.compile says where a region with fullgraph=True has a sharded unit in it."""


class PassError(TrainingError, RuntimeError):
    """Forward and backward passes that do not make a step."""


class Intercepted(nn.Module):
    """A module whose calls go to the engine first."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as an access to its weights."""
        return self.__dict__[_INTERCEPTOR](super().__call__, args, kwargs)


class InterceptedModel(Intercepted):
    """The model that was given to ``shard``."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert the buffers, where ``to`` and its like leave the parameters as they are. Raises
        ShardedParameterError where they would change."""
        sharded = [p for p in self.parameters() if isinstance(p, Placeholder)]
        if not sharded:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            return self
        probe = torch.empty(0, dtype=sharded[0].dtype, device=sharded[0].device)
        found = fn(probe)
        if (found.dtype, found.device) != (probe.dtype, probe.device):
            raise ShardedParameterError(
                "model",
                got=f"a move to {found.dtype} on {found.device}",
                expected=f"{probe.dtype} on {probe.device}, as in shard()",
                do="move it before shard(), or give shard(dtype=)",
            )
        for module in self.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else fn(buffer)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: each step starts with the gradients of its own backward passes. Raises
        TrainingError between a backward pass and its step, because its gradients cannot be taken
        back."""
        self.__dict__[_PASSES].require_no_gradient("model.zero_grad")


@cache
def _intercepted(base: type[nn.Module], mixin: type[Intercepted]) -> type[nn.Module]:
    """Return the class of modules of class ``base`` whose calls go to the engine."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (mixin, base), names)


def intercept(module: nn.Module, interceptor: Callable[..., Any], *, is_model: bool) -> None:
    """Let calls of a module go to ``interceptor(forward, args, kwargs)``."""
    object.__setattr__(module, _INTERCEPTOR, interceptor)
    mixin = InterceptedModel if is_model else Intercepted
    module.__class__ = _intercepted(type(module), mixin)  # type: ignore[arg-type]


@dataclass(eq=False)
class _Unit:
    """A unit or root part at run time, or the model itself."""

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
    casts: bool
    """Whether floating inputs are cast to the compute dtype."""
    late: dict[int, Mapping[str, Placeholder]] = field(default_factory=dict)
    """By bucket, what stands for the parameters that forward passes do not wait for: each linear
    layer waits for its own when it is called, so that those in front of it compute meanwhile."""

    def related(self, other: _Unit) -> bool:
        """Whether one of two units is inside the other."""
        return self.index in other.inside or other.index in self.inside


@dataclass(eq=False)
class _Call:
    """One call of a unit."""

    unit: _Unit
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
    """The forward and backward passes of a model, as the engine sees them.

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
        find_unused: bool,
        cast_to: torch.dtype | None,
        require_values: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._require_values = require_values
        self._holders = holders
        self._order = order
        self._peers = peers
        self._cast_to = cast_to
        self._find_unused = find_unused
        self.microbatches = microbatches
        self.suspended = False
        """Whether the modules hold whole parameters, so that calls are none of the engine's
        business."""
        self.refusal: str | None = None
        """Why no pass may run any more."""
        self.generation = 0
        """How often the values of the parameters have changed."""
        self._active: list[_Unit] = []
        self._listed = False
        """Whether accesses belong to the step: not those of evaluation."""
        self._in_step = False
        self._in_backward = False
        self._backward_passes = 0
        self._current: _Unit | None = None
        """The unit that was accessed last in this backward pass."""
        self._held: list[_Unit] = []
        """The units whose modules hold their parameters in this backward pass."""
        plan = engine.bucket_plan
        bucket_of = {p.spec.name: b.index for b in plan.buckets for p in b.placements}
        self._bucket_of = bucket_of
        self._units = [
            _Unit(
                unit.name,
                unit.index,
                tuple({bucket_of[name]: name for name in unit.parameters}.items()),
                holders.of_unit(unit),
                not unit.is_root_part,
                frozenset(unit.inside),
                frozenset(
                    engine.parameters.unsharded[bucket].untyped_storage().data_ptr()
                    for bucket in {bucket_of[name] for name in unit.parameters}
                    if not plan.has_own_slot(bucket)
                ),
                cast_to is not None and (not unit.is_root_part or unit.module is model),
            )
            for unit in units
        ]
        part_of = {
            name: unit
            for unit, at_run_time in zip(units, self._units, strict=True)
            if unit.is_root_part
            for name in unit.parameters
        }
        holders.make_placeholders(
            {
                name: self._resolver(self._units[part_of[name].index], parameter)
                if name in part_of
                else _unreadable
                for name, parameter in holders.parameters.items()
            }
        )
        self._hooks: list[RemovableHandle] = []
        for name, parameter in holders.parameters.items():
            if parameter.requires_grad:
                self._hook(parameter, name)
                if name in part_of:
                    # A torch.autograd.Function of the user gets the placeholder itself.
                    self._hook(holders.placeholders[name], name)
        self._model = model
        object.__setattr__(model, _PASSES, self)
        root = next((unit for unit in units if unit.module is model), None)
        if root is None:
            whole = _Unit(
                name="the model",
                index=-1,
                reads=(),
                holders=UnitHolders((), {}, {}),
                pooled=False,
                inside=frozenset(),
                slots=frozenset(),
                casts=cast_to is not None,
            )
            self._intercept(model, whole, is_model=True)
        for unit, at_run_time in zip(units, self._units, strict=True):
            self._intercept(unit.module, at_run_time, is_model=unit.module is model)

    def _intercept(self, module: nn.Module, unit: _Unit, *, is_model: bool) -> None:
        # What happens here is not for the graph of a compiled region around the unit; what the
        # unit computes may be.
        hidden = partial(torch.compiler.disable, reason=COMPILE_HINT)
        begin = hidden(self._begin)
        finish = hidden(self._finish)
        fail = hidden(self._fail)

        def called(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call = begin(unit, args, kwargs)
            if call is None:
                return forward(*args, **kwargs)
            try:
                output = forward(*call.args, **call.kwargs)
            except BaseException as error:
                fail(call, error)
                raise
            finish(call, output)
            return output

        intercept(module, hidden(called, recursive=False), is_model=is_model)

    def tell_peers(self, error: BaseException) -> None:
        """This rank leaves with an error that ends its training."""
        rank = self._peers.axis.rank
        if not isinstance(error, OrderError):
            self._peers.leave(
                f"rank {rank}: got {type(error).__name__} ({error}), expected no error; see there"
            )

    def close(self) -> None:
        """Let no pass run any more."""
        self.refusal = self.refusal or "engine.close() before"
        self._peers.close()
        # The hooks of a tensor are where Python's collector does not look: they lead to the engine,
        # which holds the tensor, and its memory would never be free again.
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # Forward

    def _begin(self, unit: _Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        """A unit is called. Returns None if the engine has nothing to do with that."""
        if self.suspended:
            return None
        recomputes = torch._C._current_graph_task_id() != -1
        outermost = not self._active
        if recomputes:
            self._enter_backward()
        elif outermost:
            self._begin_forward()
        if unit.casts:
            args, kwargs = tree_map_only(Tensor, self._cast, (args, kwargs))
        call = _Call(
            unit,
            args,
            kwargs,
            recomputes,
            outermost,
            unit in self._active,
            self._order.position,
            torch._C._autograd._get_sequence_nr(),
            self._checked_reads(unit),
        )
        self._active.append(unit)
        call.reads.__enter__()
        try:
            if unit.index >= 0 and not call.again:
                if not recomputes:
                    self._require_nested(unit)
                    self._access_and_return(unit, backward=False)
                    unit.holders.hold_parameters(
                        {name: late for each in unit.late.values() for name, late in each.items()}
                    )
                elif not unit.pooled:
                    self._access_and_return(unit, backward=True)
                    self._held.append(unit)
                    unit.holders.hold_parameters()
                elif self._current is not unit:
                    self._access(unit, backward=True)
                    self._hold_in_backward(unit)
        except BaseException as error:
            self._fail(call, error)
            raise
        return call

    def _checked_reads(self, unit: _Unit) -> AbstractContextManager[None]:
        """Check what is read in backward where a slot may hold another unit."""
        if not unit.slots or not torch.is_grad_enabled():
            return nullcontext()

        def require_announced() -> None:
            if unit not in self._held:
                raise _unannounced(unit.name)

        return checks_reads(unit.slots, require_announced)

    def _leave(self, call: _Call) -> None:
        call.reads.__exit__(None, None, None)
        self._active.pop()
        if not call.again and call.unit not in self._held:
            call.unit.holders.hold_placeholders()

    def _fail(self, call: _Call, error: BaseException) -> None:
        """A call has ended with an error."""
        self._leave(call)
        if call.outermost and self._listed and not call.recomputes:
            self._break_off(call, error)

    def _finish(self, call: _Call, output: Any) -> None:
        """A call has ended."""
        unit = call.unit
        try:
            if (name := unit.holders.changed()) is not None:
                raise PassError(
                    clean_name(name),
                    got=f"requires_grad={self._holders.parameters[name].requires_grad}",
                    expected="what it was in shard()",
                    do="freeze parameters before shard()",
                )
            if (name := unit.holders.written()) is not None:
                raise PassError(
                    clean_name(name),
                    got="a change in place inside of the model",
                    expected="changes by engine.step() only: others are lost, or made on one rank",
                    do="change weights inside engine.gathered(modify=True), between two steps (an "
                    "embedding's max_norm as well)",
                )
            if torch.is_grad_enabled():
                self._watch_outputs(unit, output, call.begin)
        except BaseException as error:
            self._fail(call, error)
            raise
        self._leave(call)

    def _begin_forward(self) -> None:
        """A call from outside of the model begins."""
        self.require_usable()
        if self._in_backward:
            self.refusal = "a backward pass ended with an error"
            self.require_usable()
        self._require_values()
        self._listed = torch.is_grad_enabled()
        if not self._listed:
            if not self._in_step:
                self._engine.begin_evaluation(())
        elif not self._in_step:
            self._begin_step()

    def _begin_step(self) -> None:
        plan = self._order.begin_step(self.microbatches)
        accesses, rounds = (None, None) if plan is None else (plan.accesses, plan.rounds)
        with self._peers.explained():
            self._engine.begin_step(self.microbatches, accesses, rounds)
        self._in_step = True
        self._backward_passes = 0

    def require_usable(self) -> None:
        """Raise PassError if no pass may run any more."""
        if self.refusal is not None:
            raise PassError(
                "engine", got=self.refusal, expected="a working engine", do="make a new one"
            )
        if self._peers.left is not None:
            raise OrderError(self._peers.left)

    def _break_off(self, call: _Call, error: BaseException) -> None:
        """A forward pass of the step has ended with an error."""
        self._order.break_off(call.position)
        if self._order.plan is not None and self._peers.axis.size > 1 and self.refusal is None:
            # Nobody knows whether the peers have come to the same error: a pass that is repeated
            # would gather what they do not gather again.
            self.refusal = (
                f"a forward pass of {call.unit.name} that ended with "
                f"{type(error).__name__} ({error}) on rank {self._peers.axis.rank}"
            )
            self._peers.leave(f"engine: got {self.refusal}, expected one on no rank; see there")

    def _access(self, unit: _Unit, *, backward: bool) -> None:
        """Gather what a unit reads, and wait for it."""
        access = WeightAccess(unit.index, backward)
        with self._peers.explained():
            if self._listed and self._order.enter(access):
                self._engine.access(unit.index, backward)
            else:
                following = self._order.expected_after(access)
                self._engine.access_unplanned(unit.index, following)
            for bucket, name in unit.reads:
                if backward or bucket not in unit.late:
                    self._engine.parameters.wait_unsharded(bucket, name)

    def _access_and_return(self, unit: _Unit, *, backward: bool) -> None:
        """Access a unit or root part. After a part the unit in which it is read is accessed again:
        the plan takes the slots of an earlier access for free."""
        self._access(unit, backward=backward)
        if unit.pooled:
            return
        active = (other for other in reversed(self._active) if other.pooled)
        around = self._current if backward else next(active, None)
        if around is not None:
            self._access(around, backward=backward)

    def _require_nested(self, unit: _Unit) -> None:
        """Raise PassError for a unit that another one calls without having it: while the inner one
        runs, nothing keeps the weights of the outer one."""
        pooled = [other for other in self._active if other.pooled and other is not unit]
        for other in pooled if unit.pooled else ():
            if other.index not in unit.inside:
                raise PassError(
                    unit.name,
                    got=f"a call inside of {other.name}",
                    expected="a call from outside of units, or from a unit that contains it",
                    do="register it in that module, or leave one of them out of units",
                )

    def _let_layers_wait(self) -> None:
        """From now on units begin their forward passes before those of their weights are there for
        which linear layers have waited in the first step.

        Such a layer finds a placeholder, which waits for its bucket and gives the parameter."""
        for unit in self._units:
            if not unit.pooled:
                continue
            for bucket, _ in unit.reads:
                placements = self._engine.bucket_plan.buckets[bucket].placements
                names = [placed.spec.name for placed in placements]
                if self._holders.waited_for_when_read(names):
                    unit.late[bucket] = {name: self._late(unit, bucket, name) for name in names}

    def _late(self, unit: _Unit, bucket: int, name: str) -> Placeholder:
        parameter = self._holders.parameters[name]

        def resolve(placeholder: Placeholder) -> nn.Parameter | None:
            if unit not in self._active and unit not in self._held:
                return None
            with self._peers.explained():
                self._engine.parameters.wait_unsharded(bucket, clean_name(name))
            return parameter

        made = self._holders.placeholder(name, resolve)
        if parameter.requires_grad:
            self._hook(made, name)
        return made

    def _hook(self, parameter: nn.Parameter, name: str) -> None:
        """Let what autograd accumulates for a parameter go to its slot."""
        with torch._C.DisableTorchFunctionSubclass():
            add_hook = parameter.register_post_accumulate_grad_hook
            self._hooks.append(add_hook(self._deliver(name)))  # type: ignore[no-untyped-call]

    def _resolver(self, part: _Unit, parameter: nn.Parameter) -> Callable[..., Any]:
        """Return what lets a root part be read anywhere while the model runs: it has a slot of its
        own, which nothing else takes."""

        def resolve(placeholder: Placeholder) -> nn.Parameter | None:
            if self.suspended or not (self._active or self._in_backward):
                return None
            if part not in self._active:
                self._access_and_return(part, backward=torch._C._current_graph_task_id() != -1)
            return parameter

        return resolve

    def _cast(self, value: Tensor) -> Tensor:
        if value.is_floating_point() and value.dtype != self._cast_to:
            return value.to(self._cast_to)
        return value

    def _watch_outputs(self, unit: _Unit, output: Any, begin: int) -> None:
        """Announce the backward pass of what has been computed since the call began."""
        hook: _BeforeBackward | None = None
        for value in _tensors(output):
            if unit.pooled and self._order.plan is None:
                self._refuse_view(unit, value)
            if not value.requires_grad:
                continue
            # An input that is handed on, or what others have computed, comes later in backward.
            node = value.grad_fn
            if node is not None and node._sequence_nr() >= begin:
                hook = hook or _BeforeBackward(self, unit, self.generation)
                value.register_hook(hook)  # type: ignore[no-untyped-call]

    def _refuse_view(self, unit: _Unit, value: Tensor) -> None:
        storage = value.untyped_storage().data_ptr()
        for bucket, name in unit.reads:
            slot = self._engine.parameters.unsharded[bucket].untyped_storage().data_ptr()
            if storage == slot != 0:
                raise PassError(
                    f"the output of {unit.name}",
                    got=f"a view of memory that {clean_name(name)} shares with other units",
                    expected="a tensor of its own",
                    do="return a clone(), or leave the module out of units",
                )

    # Backward

    def before_backward(self, unit: _Unit, generation: int) -> None:
        """The backward pass of one call of a unit begins."""
        if generation != self.generation:
            raise PassError(
                f"the backward pass of {unit.name}",
                got="a forward pass from before the parameters changed",
                expected="one since the last engine.step()",
                do="call backward before engine.step()",
            )
        # Autograd computes with gradients in a backward pass only for create_graph=True.
        if unit.slots and torch.is_grad_enabled():
            raise PassError(
                f"the backward pass of {unit.name}",
                got="create_graph=True",
                expected="a graph that is not differentiated again: that would read weights of "
                "units that nobody announces",
                do='take strategy="optim_grads", or param_slots="all"',
            )
        self._enter_backward()
        if unit.pooled and self._current is not unit:
            self._access(unit, backward=True)
            self._hold_in_backward(unit)

    def _enter_backward(self) -> None:
        if self._in_backward:
            return
        self.require_usable()
        if not self._in_step:
            raise PassError(
                "backward", got="no forward pass of this step", expected="one", do="run the model"
            )
        if self._backward_passes == self.microbatches:
            raise PassError(
                f"backward pass {self._backward_passes + 1} of a step",
                got=f"shard(microbatches={self.microbatches})",
                expected="as many backward passes",
                do="call engine.step() after the last, or set engine.microbatches",
            )
        self._listed = True
        self._in_backward = True
        self._current = None
        Variable._execution_engine.queue_callback(self._end_backward)

    def _hold_in_backward(self, unit: _Unit) -> None:
        """Let a unit's modules hold its parameters, for what is recomputed in them, and those of
        units that are done with hold placeholders."""
        self._current = unit
        for other in self._held:
            if other is not unit and not other.related(unit):
                other.holders.hold_placeholders()
        self._held = [other for other in self._held if other.related(unit)]
        self._held.append(unit)
        unit.holders.hold_parameters()

    def _end_backward(self) -> None:
        """Every gradient of a backward pass has been delivered."""
        for unit in self._held:
            unit.holders.hold_placeholders()
        self._held.clear()
        self._order.agree(END_OF_BACKWARD)
        with self._peers.explained():
            try:
                self._engine.end_backward()
            except RuntimeError as error:
                self._peers.leave(f"rank {self._peers.axis.rank}: {error}")
                raise
        self._in_backward = False
        self._backward_passes += 1

    def _deliver(self, name: str) -> Callable[[Tensor], None]:
        """Return the hook that gives what autograd has accumulated to the parameter's slot."""
        parameters = self._engine.parameters
        bucket = self._bucket_of[name]
        handle = param_handle_of(self._holders.parameters[name])
        assert handle is not None

        def deliver(parameter: Tensor) -> None:
            self._enter_backward()
            with torch._C.DisableTorchFunctionSubclass():
                grad = parameter.grad
                parameter.grad = None
            if grad is None:
                return  # a linear layer has written the slot itself
            if grad.layout is not torch.strided:
                raise PassError(
                    clean_name(name),
                    got="a sparse gradient",
                    expected="a dense one",
                    do="make the embedding with sparse=False",
                )
            # An operator has read the weight a moment ago. Raises if it was not there.
            with self._peers.explained():
                parameters.wait_unsharded(bucket, clean_name(name))
                view, beta = handle.grad_view()
            with torch.no_grad():  # with create_graph=True backward has gradients
                accumulate(view, beta, grad)
            handle.grad_written()

        return deliver

    # The step

    def end_step(self, step: Callable[[], StepResult]) -> StepResult:
        """Run the engine's step if the passes of one have been made. Raises PassError."""
        self.require_usable()
        if self._in_backward:
            raise PassError(
                "engine.step()",
                got="a backward pass that ended with an error",
                expected="one that ended",
                do="make a new engine",
            )
        if self._backward_passes != self.microbatches or not self._in_step:
            raise PassError(
                "engine.step()",
                got=f"{self._backward_passes} backward passes",
                expected=f"{self.microbatches}, as shard(microbatches=) says",
                do="call it after so many, or set engine.microbatches before the step",
            )
        if (following := self._order.expected) is not None:
            raise OrderError(
                "engine.step()",
                got="the end of the step",
                expected=f"{following} as in the first step",
                do="shard(static_order=False) for a model that takes another way each time",
            )
        self._order.agree(STEP)
        if self._order.plan is None:
            self._require_known()
            self._require_gradients()
        with self._peers.explained():
            result = step()
        if self._order.end_step(self._engine.recorded_rounds):
            self._let_layers_wait()
        self._in_step = False
        self._backward_passes = 0
        self.generation += 1
        return result

    def _require_known(self) -> None:
        """Raise PassError for parameters that have come into the model after ``shard``."""
        added = [
            clean_name(name)
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad and not isinstance(parameter, Placeholder)
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
        if self._find_unused:
            return
        missing = self._engine.gradients.without_gradient()
        by_rank = all_gather_object(missing, self._peers.axis)
        if any(by_rank):
            rank = next(rank for rank, names in enumerate(by_rank) if names)
            found = ", ".join(map(clean_name, by_rank[rank]))
            raise PassError(
                "engine.step()",
                got=f"no gradient of {found}"
                + (f" on rank {rank}" if self._peers.axis.size > 1 else ""),
                expected="one of every trainable parameter",
                do="freeze what is not used, or shard(find_unused=True)",
            )

    def require_no_gradient(self, what: str) -> None:
        """Raise PassError between a backward pass and its step: ``what`` would take its gradients
        back, and they may be on their way already."""
        if self._in_backward or self._backward_passes:
            raise PassError(
                what,
                got="gradients that no step has used",
                expected="a call before the first backward pass of a step",
                do="call engine.step() first, or give shard(microbatches=) the number of passes of "
                "a step",
            )

    @property
    def between_steps(self) -> bool:
        """Whether no pass of a step has begun."""
        return not self._in_step


class _BeforeBackward:
    """A hook on the outputs of one call."""

    def __init__(self, passes: Passes, unit: _Unit, generation: int) -> None:
        self._passes = passes
        self._unit = unit
        self._generation = generation

    def __call__(self, grad: Tensor) -> None:
        self._passes.before_backward(self._unit, self._generation)


def _unannounced(name: str) -> PassError:
    return PassError(
        f"the backward pass of {name}",
        got="one that did not begin at its outputs",
        expected="a unit that returns all that the loss is computed from",
        do="return what the module keeps (an auxiliary loss); return a clone() of a view that is "
        "changed in place afterwards; or leave the module out of units",
    )


def _unreadable(placeholder: Placeholder) -> None:
    """A unit's parameter is read outside of the unit: its slot may hold another one."""


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in the output of a module: in containers of Python, in those that are
    registered with torch's pytree, and in dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif is_dataclass(output) and not isinstance(output, Mapping | type):
        for each in fields(output):
            yield from _tensors(getattr(output, each.name))
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
    else:
        leaves: Iterable[Any] = tree_leaves(output)
        for value in leaves:
            if value is not output:
                yield from _tensors(value)
