"""Differentiation of layers that autograd sees as one function: a tape of their calls, played
backward.

A call of a function written in Python costs autograd 6 microseconds beside what it computes,
forward and backward, and a tape less than
4. A block has ten, and a stage many blocks, which shows where a model is small
   (docs/performance.md). The tape runs the functions'
own ``forward`` and ``backward``, so whatever they save, wait for and deliver is the same, and so is
every number.

Calls of ``Function`` are recorded, nothing else. What other operators compute with followed tensors
belongs into ``differentiated``; where it does not, the output of some function never gets its
gradient, and backward says of which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_llama.distributed.comm.function import Function, is_followed


class _Context:
    """What a function's ``forward`` tells its ``backward``: the part of torch's that ours use."""

    saved_tensors: Sequence[Tensor | None] = ()
    constant: tuple[Tensor, ...] = ()

    def __init__(self, needs_input_grad: Sequence[bool]) -> None:
        self.needs_input_grad = needs_input_grad

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.constant = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Its place passes to the output, which is the same tensor."""

    def set_materialize_grads(self, value: bool) -> None:
        """A tape makes no zeros."""


_Call = tuple[type[Function], _Context, list[int | Tensor | None], list[int | None], int]
"""A function, what it keeps, of each argument its place or the weight that it is, of each output
its place, and how many tensors it has saved. None: no gradient."""


class Tape:
    """The calls by which one tensor becomes another."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._places = 0
        self._first: int | None = None
        self._last: int | None = None
        self._profiled = torch._C._autograd._profiler_enabled()

    def begin(self, tensor: Tensor, *, wanted: bool) -> Tensor:
        """The first tensor, as one that is followed. ``wanted``: it has a gradient."""
        alias = tensor.detach()
        self._first = self._follow(alias, wanted)
        return alias

    def _follow(self, tensor: Tensor, wanted: bool) -> int | None:
        place = None
        if wanted:
            place = self._places
            self._places = place + 1
        tensor.followed = self, place  # type: ignore[attr-defined]
        return place

    def run(self, function: type[Function], args: tuple[Any, ...]) -> Any:
        """Call a function, and remember the call if it has gradients to compute."""
        inputs = [_place(arg) if isinstance(arg, Tensor) else None for arg in args]
        needs = [place is not None for place in inputs]
        context = _Context(needs)
        wanted = True in needs
        forward = function.forward
        name = function.__name__
        result = (
            _named(name, forward, context, *args) if self._profiled else forward(context, *args)
        )
        if isinstance(result, Tensor):
            places = [self._follow(result, wanted)]
        else:
            constant = [id(tensor) for tensor in context.constant]
            places = [
                self._follow(out, wanted)
                if isinstance(out, Tensor) and id(out) not in constant
                else None
                for out in result
            ]
        if wanted:
            self._calls.append((function, context, inputs, places, len(context.saved_tensors)))
        return result

    def end(self, tensor: Tensor) -> Iterator[Tensor | None]:
        """The last tensor, which nobody follows any more. What the calls have saved goes to whoever
        keeps it until ``play``."""
        followed: tuple[Tape, int | None] | None = getattr(tensor, "followed", None)
        if followed is None:
            raise RuntimeError("the result comes from an operator that is on no tape")
        _, self._last = followed
        del tensor.followed  # type: ignore[attr-defined]
        for _, context, *_ in self._calls:
            yield from context.saved_tensors
            context.saved_tensors = context.constant = ()

    def play(self, grad: Tensor, saved: list[Tensor | None]) -> Tensor | None:
        """Backward, from the gradient of the last tensor to that of the first, which is None where
        it is not wanted. Gradients of weights without a home are added to their ``grad``. ``saved``
        is emptied: what a call has saved may go when it has been used."""
        grads = {self._last: grad}
        # what a function keeps goes with its call, also where a weight gradient that is put off
        # keeps the tape
        while self._calls:
            function, context, inputs, outputs, kept = self._calls.pop()
            first = len(saved) - kept
            context.saved_tensors = saved[first:]
            del saved[first:]
            try:
                given = [None if place is None else grads.pop(place) for place in outputs]
            except KeyError:
                problem = f"{function.__name__}: no gradient came back to an output: what has read it is on no tape"
                raise RuntimeError(problem) from None
            backward = function.backward
            name = function.__name__
            found = (
                _named(f"{name}Backward", backward, context, *given)
                if self._profiled
                else backward(context, *given)
            )
            context.saved_tensors = ()
            del given
            for place, part in zip(
                inputs, found if isinstance(found, tuple) else (found,), strict=True
            ):
                if part is None or place is None:
                    continue
                if isinstance(place, Tensor):
                    place.grad = part if place.grad is None else place.grad + part
                else:
                    grads[place] = grads[place] + part if place in grads else part
        return grads.get(self._first)


def _place(tensor: Tensor) -> int | Tensor | None:
    """Of a tensor that is followed where its gradient is put, None where there is none; a weight
    that is trained itself."""
    followed: tuple[Tape, int | None] | None = getattr(tensor, "followed", None)
    if followed is not None:
        return followed[1]
    return tensor if tensor.requires_grad else None


def _named(name: str, call: Callable[..., Any], *args: Any) -> Any:
    """A call as autograd shows it to a profiler."""
    with torch.profiler.record_function(name):
        return call(*args)


class _Taped(Function):
    """``anchor`` has no value and no gradient: it requires grad, so that backward comes here when
    the input does not."""

    clear_saved_tensors_on_access = True

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor | None, function: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.tape = tape = Tape()
        output = function(tape.begin(x, wanted=ctx.needs_input_grad[0]))
        ctx.save_for_backward(*tape.end(output))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.tape.play(grad, list(ctx.saved_tensors)), None, None


def taped(
    function: Callable[[Tensor], Tensor], x: Tensor, *, weights: Iterable[Tensor] = ()
) -> Tensor:
    """``function(x)``, whose calls of ``Function`` are differentiated by a tape. ``weights``: those
    that it reads."""
    if not torch.is_grad_enabled():
        return function(x)
    if x.requires_grad:
        return _Taped.apply(x, None, function)  # type: ignore[no-any-return]
    if not any(weight.requires_grad for weight in weights):
        return function(x)
    return _Taped.apply(x, torch.empty(0, requires_grad=True), function)  # type: ignore[no-any-return]


class _Root(Function):
    """A number whose gradient with respect to ``output`` is ``grad``."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return output.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.grad, None


def backward(output: Tensor, grad: Tensor) -> None:
    """``torch.autograd.backward(output, grad)``, but for torch's check of the gradient's shape, for
    which it loads sympy: half a second of a program's start."""
    with torch.enable_grad():  # there is none inside a backward pass
        root = _Root.apply(output, grad)
    torch.autograd.backward(root)


class _Differentiated(Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *inputs, function, count = args
        with torch.enable_grad():
            leaves = [
                x.detach().requires_grad_(wanted)
                for x, wanted in zip(inputs[:count], ctx.needs_input_grad, strict=False)
            ]
            output: Tensor = function(*leaves)
        ctx.leaves = leaves
        ctx.output = output
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (leaves, output) = (ctx.leaves, ctx.output)
        rest = len(ctx.needs_input_grad) - len(ctx.leaves)
        del ctx.leaves, ctx.output
        backward(output, grad)
        return (*(leaf.grad for leaf in leaves), *[None] * rest)


def differentiated(
    function: Callable[..., Tensor], *inputs: Tensor, weights: Iterable[Tensor] = ()
) -> Tensor:
    """``function(*inputs)``, differentiated by autograd also on a tape. ``weights``: those that it
    reads, to which their gradients get by themselves."""
    if not is_followed(inputs[0]):
        return function(*inputs)
    return _Differentiated.apply(*inputs, *weights, function, len(inputs))  # type: ignore[no-any-return]
