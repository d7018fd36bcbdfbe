"""Compute as timed waits: a half block takes a given time, most of it asleep, so that every rank
has a "device" of its own and the host's cores are free for the transport. What is really computed
counts as part of the time.

A half block is a norm with the attention or MLP behind it. Forward, the wait ends the half: by then
its weights have arrived. Backward, it comes first, before any gradient of the half exists.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Ready = Callable[[Sequence[str]], None]
"""Returns when the named parameters may be read: a backward pass must not start its wait before its
weights are there."""


class Clock:
    """The time of half blocks, for contenders that run one after the other.

    What counts as work is the calling thread's: CPU time, and time in which it could have run but
    other processes had the cores. Waiting for messages is neither."""

    def __init__(self) -> None:
        self.forward_seconds = 0.0
        """Of the forward pass of half a block; backward takes twice that. 0: as long as the work
        takes."""
        self._mark = 0.0
        self._spent = 0.0
        """``_spent``: what is to be taken from the next wait, of work and of earlier waits that
        took too long."""

    def restart(self) -> None:
        """Another contender comes: nothing is owed."""
        self._spent = 0.0

    def begin(self) -> None:
        """A half block starts to compute."""
        self._mark = _worked()

    def end(self) -> None:
        """It has computed."""
        self._spent += _worked() - self._mark

    def wait_forward(self) -> None:
        """After the half has computed: the rest of its time."""
        self._wait(self.forward_seconds)

    def wait_backward(self) -> None:
        """Before it computes: its time, less what the half before it took beyond its wait."""
        self._wait(2 * self.forward_seconds)

    def _wait(self, seconds: float) -> None:
        begin = time.perf_counter()
        if self._spent < seconds:
            time.sleep(seconds - self._spent)
        self._spent = max(0.0, self._spent + time.perf_counter() - begin - seconds)


def _worked() -> float:
    """Seconds in which this thread ran or waited for a core."""
    with open("/proc/thread-self/schedstat") as counters:
        return time.thread_time() + int(counters.read().split()[1]) / 1e9


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        clock.begin()
        return x.detach()  # not a view for autograd: what comes next may change it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.clock.end()
        return grad, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, ready: Callable[[], None]) -> Tensor:
        ctx.clock = clock
        ctx.ready = ready
        clock.end()
        clock.wait_forward()
        return x.detach()  # not a view for autograd: what comes next may change it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.ready()
        ctx.clock.wait_backward()
        ctx.clock.begin()
        return grad, None, None


def install(
    blocks: Sequence[tuple[str, nn.Module]], clock: Clock, ready: Ready = lambda names: None
) -> None:
    """Make the half blocks of transformer blocks, given with the prefixes of their parameters'
    names, take their time."""
    for prefix, block in blocks:
        for norm, body in (("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp")):
            _install(
                prefix,
                block.get_submodule(norm),
                block.get_submodule(body),
                clock,
                ready,
                (norm, body),
            )


def _install(
    prefix: str,
    norm: nn.Module,
    body: nn.Module,
    clock: Clock,
    ready: Ready,
    parts: tuple[str, str],
) -> None:
    modules = zip(parts, (norm, body), strict=True)
    names = [
        f"{prefix}.{part}.{name}"
        for part, module in modules
        for name, _ in module.named_parameters()
    ]

    def enter(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (_Enter.apply(inputs[0], clock), *inputs[1:])  # type: ignore[no-untyped-call]

    def leave(_: nn.Module, inputs: object, output: Any) -> Any:
        # Transformers' attention returns its weights, too, in a tuple.
        out = output[0] if isinstance(output, tuple) else output
        left = _Leave.apply(out, clock, lambda: ready(names))  # type: ignore[no-untyped-call]
        return (left, *output[1:]) if isinstance(output, tuple) else left

    norm.register_forward_pre_hook(enter)
    body.register_forward_hook(leave)
