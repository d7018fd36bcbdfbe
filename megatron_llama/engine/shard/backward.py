"""The backward passes of a user's model, and where its gradients go.

announced   Hooks on the outputs that were computed in a unit announce its backward pass.
            Autograd goes through the operators in exactly the reverse order, so the units come
            in the reverse order of their calls, and no unit's backward pass is interrupted but
            by that of a unit inside it.
gradients   AccumulateGrad calls a hook of the parameter, which adds ``.grad`` to the slot.
the end     A callback of the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from megatron_llama.engine.comm.object_collectives import all_gather_object
from megatron_llama.engine.param_handle import param_handle_of
from megatron_llama.engine.shard.accesses import Accesses, PassError, Unit
from megatron_llama.engine.shard.order import END_OF_BACKWARD
from megatron_llama.engine.shard.peers import OrderError
from megatron_llama.engine.tensors import accumulate, inner


class BackwardPasses:
    """The backward passes of a model, as the engine sees them.

    On a device autograd calls this in a thread of its own."""

    def __init__(self, accesses: Accesses) -> None:
        self._accesses = accesses
        self._engine = accesses.engine
        self._step = accesses.step
        self._scaled_in: int | None = None
        """The backward pass, by autograd's number, that has begun at a scaled loss."""
        self._hooks: list[RemovableHandle] = []
        holders = accesses.holders
        for name, parameter in holders.parameters.items():
            if accesses.freezing.may_train(name):
                self.deliver_from(parameter, name)
                if name in accesses.part_of:
                    # A torch.autograd.Function of the user gets the placeholder itself.
                    self.deliver_from(holders.placeholders[name], name)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def watch_outputs(self, unit: Unit, output: Any, begin: int) -> None:
        """Announce the backward pass of what a call of a unit has computed since it began:
        autograd has given that the number ``begin``, or a higher one."""
        hook: _BeforeBackward | None = None
        for value in _tensors(output):
            if unit.pooled and self._accesses.order.plan is None:
                self._refuse_view(unit, value)
            if not value.requires_grad:
                continue
            # An input that is handed on, or what others have computed, comes later in backward.
            node = value.grad_fn
            if node is not None and node._sequence_nr() >= begin:
                hook = hook or _BeforeBackward(
                    self, unit, self._step.generation, outside=self._accesses.frozen
                )
                value.register_hook(hook)  # type: ignore[no-untyped-call]

    def _refuse_view(self, unit: Unit, value: Tensor) -> None:
        storage = inner(value).untyped_storage().data_ptr()
        for bucket, name in unit.reads:
            slot = self._engine.parameters.unsharded[bucket].untyped_storage().data_ptr()
            if storage == slot != 0:
                raise PassError(
                    f"the output of {unit.name}",
                    got=f"a view of memory that {name} shares with other units",
                    expected="a tensor of its own",
                    do="return a clone(), or leave the module out of units",
                )

    def begin_unit(self, unit: Unit, generation: int, *, outside: bool) -> None:
        """The backward pass of one call of a unit begins. ``generation`` is that of the call;
        ``outside`` says that nothing was trained then."""
        if generation != self._step.generation:
            raise self._accesses.refuse(
                PassError(
                    f"the backward pass of {unit.name}",
                    got="a forward pass from before the parameters changed",
                    expected="one since the last engine.step() or engine.discard()",
                    do="call backward before engine.step()",
                )
            )
        # Autograd computes with gradients in a backward pass only for create_graph=True.
        if unit.slots and torch.is_grad_enabled():
            raise self._accesses.refuse(
                PassError(
                    f"the backward pass of {unit.name}",
                    got="create_graph=True",
                    expected="a graph that is not differentiated again: that would read weights of "
                    "units that nobody announces",
                    do='take strategy="optim_grads", or param_slots="all"',
                )
            )
        self.enter(outside=outside)
        if unit.pooled and self._accesses.current is not unit:
            self._accesses.access(unit, backward=True)
            self._accesses.hold_in_backward(unit)
        alternatives = self._accesses.alternatives
        if alternatives is not None and not self._step.outside:
            alternatives.begin(unit.index, opens=self._accesses.open_counting is not None)

    def enter(self, *, outside: bool = False) -> None:
        """Something happens in a backward pass: begin it, unless it has begun. ``outside`` says
        that it belongs to no step."""
        step = self._step
        if step.in_backward:
            return
        self._accesses.require_usable()
        if not outside:
            self._require_planned()
            self._require_scaled()
        self._accesses.listed = not outside
        step.outside = outside
        step.in_backward = True
        self._accesses.current = None
        Variable._execution_engine.queue_callback(self._end)

    def begin_scaled(self) -> None:
        """A backward pass begins at a loss that the engine has scaled."""
        self._scaled_in = torch._C._current_graph_task_id()

    def _require_scaled(self) -> None:
        """Raise PassError for gradients in fp16 that no factor keeps from vanishing."""
        scales = self._engine.loss_scale.dynamic
        if scales and self._scaled_in != torch._C._current_graph_task_id():
            raise self._accesses.refuse(
                PassError(
                    "backward",
                    got="a loss that the engine has not scaled",
                    expected="engine.backward(loss), or engine.scale(loss).backward(): gradients "
                    "in torch.float16 vanish without a factor",
                    do="call that, and no GradScaler of torch",
                )
            )

    def _require_planned(self) -> None:
        """Raise PassError for a backward pass that the step does not have."""
        step = self._step
        if not step.begun:
            raise PassError(
                "backward", got="no forward pass of this step", expected="one", do="run the model"
            )
        if step.backward_passes == step.microbatches:
            raise self._accesses.refuse(
                PassError(
                    f"backward pass {step.backward_passes + 1} of a step",
                    got=f"shard(microbatches={step.microbatches})",
                    expected="as many backward passes, among them torch.autograd.grad through "
                    "units, and those of another model's loss (a GAN's generator)",
                    do="call engine.step() after the last, or engine.discard() where no step uses "
                    "it; set engine.microbatches to count all of a step; compute the gradient of "
                    "an input in a step of its own",
                )
            )

    def _end(self) -> None:
        """Every gradient of a backward pass has been delivered."""
        if self._accesses.alternatives is not None:
            self._accesses.alternatives.end_all()
        self._accesses.release_held()
        if self._step.outside:
            self._step.in_backward = False
            return
        self._accesses.order.agree_unplanned(END_OF_BACKWARD)
        self._require_same_gradients()
        try:
            with self._accesses.peers.explained():
                self._engine.end_backward()
        except OrderError:
            raise
        except RuntimeError as error:
            raise self._accesses.refuse(
                PassError(
                    "backward",
                    got=str(error),
                    expected="the gradients of the first step",
                    do="shard(find_unused=True) for a model that leaves parameters out, "
                    "shard(static_order=False) for one that takes another way each time",
                )
            ) from error
        self._step.in_backward = False
        self._step.backward_passes += 1

    def _require_same_gradients(self) -> None:
        """Make sure that all ranks have had the same gradients in the same order in this pass:
        while the order is unknown these decide what is reduced next and, in a step that is
        recorded, what later ones reduce and when. Raises PassError on all ranks."""
        counting = self._accesses.open_counting
        order = self._accesses.order
        axis = self._accesses.peers.axis
        if counting is None or counting.allows_unused or axis.size == 1:
            return
        if not (order.static or self._engine.gradients.reduce_every_microbatch):
            return  # the end of the step reduces everything, in the order of the plan
        with self._accesses.peers.explained():
            by_rank = all_gather_object(tuple(counting.sequence), axis)
        rank = next((rank for rank, sequence in enumerate(by_rank) if sequence != by_rank[0]), None)
        if rank is None:
            return
        alone = [
            f"{', '.join(names)} on rank {having} and not on rank {lacking}"
            for having, lacking in ((0, rank), (rank, 0))
            if (names := sorted(set(by_rank[having]) - set(by_rank[lacking])))
        ]
        raise PassError(
            f"backward pass {self._step.backward_passes + 1} of a step",
            got=f"gradients of {'; '.join(alone)}"
            if alone
            else f"gradients in another order on rank {rank} than on rank 0",
            expected="the same on all ranks",
            do="let every rank use the same parameters in the same order, or "
            "shard(find_unused=True)",
        )

    def deliver_from(self, parameter: nn.Parameter, name: str) -> None:
        """Give what autograd accumulates in ``parameter``, or in what stands for it, to the slot of
        the parameter of this name."""
        # Python's collector does not look into the hooks of a tensor: with a reference to the
        # engine there, an engine that nobody holds any more would never be free.
        passes = ref(self)

        def deliver(accumulated: Tensor) -> None:
            # First of all: what stayed here after an error would be added to the next gradient.
            with torch._C.DisableTorchFunctionSubclass():
                grad = accumulated.grad
                accumulated.grad = None
            of_engine = passes()
            if of_engine is not None:
                of_engine._deliver(name, grad)

        with torch._C.DisableTorchFunctionSubclass():
            trained = parameter.requires_grad
            # One that is frozen now may be trained later, and takes no hook.
            parameter.requires_grad_(True)
            add_hook = parameter.register_post_accumulate_grad_hook
            self._hooks.append(add_hook(deliver))  # type: ignore[no-untyped-call]
            parameter.requires_grad_(trained)

    def _deliver(self, name: str, grad: Tensor | None) -> None:
        """Add a gradient to the slot of the parameter of this name."""
        self.enter()
        if grad is None:
            return  # a linear layer has written the slot itself
        if grad.layout is not torch.strided:
            raise self._accesses.refuse(
                PassError(
                    name,
                    got="a sparse gradient",
                    expected="a dense one",
                    do="make the embedding with sparse=False",
                )
            )
        part = self._accesses.holders.layouts.gradient(name, grad)
        handle = param_handle_of(self._accesses.holders.parameters[name])
        assert handle is not None
        # An operator has read the weight a moment ago. Raises if it was not there.
        with self._accesses.peers.explained():
            self._engine.parameters.wait_unsharded(self._accesses.bucket_of[name], name)
            view, beta = handle.grad_view()
        with torch.no_grad():  # with create_graph=True backward has gradients
            accumulate(view, beta, part)
        handle.grad_written()


class _BeforeBackward:
    """A hook on the outputs of one call."""

    def __init__(
        self, passes: BackwardPasses, unit: Unit, generation: int, *, outside: bool
    ) -> None:
        self._passes = passes
        self._unit = unit
        self._generation = generation
        self._outside = outside

    def __call__(self, grad: Tensor) -> None:
        self._passes.begin_unit(self._unit, self._generation, outside=self._outside)


def unannounced(name: str) -> PassError:
    """Return the error for weights of a unit that are read in a backward pass which no output of
    the unit has announced."""
    return PassError(
        f"the backward pass of {name}",
        got="one that did not begin at its outputs",
        expected="a unit that returns all that the loss is computed from",
        do="return what the module keeps (an auxiliary loss); return a clone() of a view that is "
        "changed in place afterwards; or leave the module out of units",
    )


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in the output of a module: in containers of Python, in those that are
    registered with torch's pytree, and in dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif is_dataclass(output) and not isinstance(output, Mapping | type):
        for field in fields(output):
            yield from _tensors(getattr(output, field.name))
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
    else:
        leaves: Iterable[Any] = tree_leaves(output)
        for value in leaves:
            if value is not output:
                yield from _tensors(value)
