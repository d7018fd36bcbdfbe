"""Passes of blocks as graphs of the device (--cuda-graph-scope block): captured once, then replayed
by one call of the host in place of one for each kernel.

A graph runs the same kernels on the same addresses each time, and nothing of the host. So a pass of
a block is cut in three:

    before   The host waits for the block's weights and opens its gradient slots.
    graph    Kernels, and the messages of tensor parallelism, which run in the same stream.
    after    The host reports the weight gradients, and the engine sends the full buckets.

Layers ask the handles of their parameters for weights and gradients. ``_Handle`` stands between:
while a pass is captured it answers with the fixed views, and notes which gradients are written.

A stage has a ``_Buffers`` for each microbatch in flight: inputs, outputs and what autograd keeps
from forward to backward. The graphs of its forward passes share a pool, in which a graph may use
memory that a later one keeps: so they are replayed in the order of the blocks, and begin again only
when the first block has run backward. Backward passes keep nothing, and all of them share one pool.
Their gradient with respect to the activations has one place, from block to block.

The first step runs as without graphs: it compiles kernels, chooses algorithms, connects ranks and
shows the views of gradients. ``begin`` comes after it. Passes without gradients, those of
evaluations, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from megatron_llama.engine.backward import backward
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.exchange import same_place
from megatron_llama.engine.comm.recorder import Recorder, Traffic
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.param_handle import ParamHandle, attach_param_handle, param_handle_of
from megatron_llama.model.llama import Stage
from megatron_llama.model.nn.functional import Residual
from megatron_llama.model.positions import Positions

FIRST = 0.0
"""The factor of what a gradient slot holds before the first contribution of a round."""
FURTHER = 1.0
"""The same before the others."""


class BlockGraphs:
    """The graphs of all blocks of this process."""

    def __init__(
        self, stages: Mapping[int, Stage], optimizer: OverlappedDistributedOptimizer, mesh: Mesh
    ) -> None:
        """Stand between the blocks and the engine, which has attached their parameters."""
        gradients = optimizer.gradients
        betas = (FIRST,) if gradients.reduce_every_microbatch else (FIRST, FURTHER)
        shared = _Shared(mesh, betas)
        self._shared = shared
        self._stages = [_StageGraphs(stage, shared) for stage in stages.values()]

    def begin(self) -> None:
        """Capture passes from now on, each when it is first needed. Called between two steps, of
        which the first has run; after that it does nothing."""
        if not self._shared.begun:
            # What the first step used goes back to the device: graphs have memory of their own.
            devices.release_memory(self._shared.mesh.device)
            self._shared.begun = True

    @property
    def buffers(self) -> int:
        """The number of microbatches in flight, counted for each stage, that have buffers."""
        return sum(stage.made for stage in self._stages)


@dataclass
class _Shared:
    """The common state of all graphs of a process."""

    mesh: Mesh
    betas: tuple[float, ...]
    """The factors with which a backward pass may find its gradient slots."""
    begun: bool = False
    beta: float | None = None
    """The factor of the pass that is being captured; None while none is."""
    written: list[_Handle] = field(default_factory=list)
    """The gradients that this pass has written so far, in order."""
    grad: Tensor | None = None
    """The gradient of the activations between two blocks."""

    def __post_init__(self) -> None:
        # One stream: autograd runs the nodes of a backward pass in the stream of their forward
        # pass, and a capture may not wait for another stream.
        self.stream = devices.new_stream(self.mesh.device)
        self.backward_pool = devices.graph_pool()

    def grad_like(self, x: Tensor) -> Tensor:
        """Return the place of the gradient of activations."""
        if self.grad is None:
            self.grad = torch.empty_like(x, requires_grad=False)
        return self.grad


class _Handle:
    """The handle of a parameter of a captured block. The engine is asked before and after a graph,
    and otherwise only by passes that run without one."""

    def __init__(self, engine: ParamHandle, shared: _Shared) -> None:
        self.engine = engine
        self.view: Tensor | None = None
        self._shared = shared

    def wait_unsharded(self) -> int:
        return self.engine.wait_unsharded() if self._shared.beta is None else 0

    def check_version(self, version: int) -> None:
        if self._shared.beta is None:
            self.engine.check_version(version)

    def grad_view(self) -> tuple[Tensor, float]:
        beta = self._shared.beta
        if beta is None:
            self.view, beta = self.engine.grad_view()
            return self.view, beta
        assert self.view is not None, "the first step has written every gradient"
        again = self in self._shared.written
        self._shared.written.append(self)
        return self.view, FURTHER if again else beta

    def grad_written(self) -> None:
        if self._shared.beta is None:
            self.engine.grad_written()

    def keep_wgrad(self, work: Callable[[], object]) -> bool:
        return self._shared.beta is None and self.engine.keep_wgrad(work)


class _Graph:
    """A captured pass. ``result`` is what ``work`` returned, at the address that each replay
    writes."""

    def __init__(
        self, shared: _Shared, pool: Any, work: Callable[[], Tensor | None], beta: float
    ) -> None:
        self._recorder = shared.mesh.recorder
        self.result: Tensor | None = None
        self.written: tuple[_Handle, ...] = ()
        """The gradients that it writes, in order."""

        def noted() -> Tensor | None:
            shared.beta = beta
            shared.written = []
            try:
                result = work()
                self.written = tuple(shared.written)
            finally:
                shared.beta = None
            return result

        before = _messages(self._recorder)
        self.result, self._replay = devices.capture(noted, pool, shared.stream)
        # Nothing has been sent: each replay sends it.
        self._sent = _less(_messages(self._recorder), before)
        _set_messages(self._recorder, {**dict.fromkeys(self._sent, Traffic()), **before})

    def replay(self) -> None:
        """Do all of it, in the current stream."""
        sent = _plus(_messages(self._recorder), self._sent) if self._sent else None
        self._replay()
        if sent is not None:
            _set_messages(self._recorder, sent)


class _Pass:
    """The passes of one block over one microbatch in flight."""

    def __init__(
        self, block: _Block, shared: _Shared, pool: Any, x: Tensor, positions: Positions
    ) -> None:
        self._block = block
        self._shared = shared
        self._versions: Sequence[int] = ()
        self._input = x
        self._output = x
        """With the graph of autograd that leads to ``_input``."""
        self._grad = shared.grad_like(x)

        def run_forward() -> Tensor:
            with torch.enable_grad():
                self._output = block.forward(Residual(self._input), positions).sum()
            return self._output.detach()

        def run_backward() -> None:
            # Kept, because another factor needs another graph of it, and so that no memory of what
            # forward kept goes to others.
            backward(self._output, self._grad, retain_graph=True)
            grad = self._input.grad
            assert grad is not None
            self._input.grad = None
            self._grad.copy_(grad)

        self._forward = _Graph(shared, pool, run_forward, FIRST)
        self._run_backward = run_backward
        self._backward: dict[float, _Graph] = {}

    @property
    def result(self) -> Tensor:
        """The output of the block."""
        assert self._forward.result is not None
        return self._forward.result

    def capture_backward(self) -> None:
        """Capture the backward passes, behind the forward passes of all blocks."""
        shared = self._shared
        for beta in shared.betas:
            self._backward[beta] = _Graph(shared, shared.backward_pool, self._run_backward, beta)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for the input x."""
        self._versions = [handle.engine.wait_unsharded() for handle in self._block.handles]
        if not same_place(x, self._input):
            self._input.detach().copy_(x)
        self._forward.replay()
        # Not the same tensor: autograd gives each result a node. A stage's output may be sent for
        # longer than its place belongs to this microbatch.
        return self.result.clone() if self._block.is_sent else self.result.detach()

    def backward(self, grad: Tensor) -> Tensor:
        """Return the gradient of the input for the one of the output."""
        block = self._block
        for handle, version in zip(block.handles, self._versions, strict=True):
            handle.engine.check_version(version)
        graph = self._backward[self._open(self._backward[FIRST].written)]
        if not same_place(grad, self._grad):
            self._grad.copy_(grad)
        graph.replay()
        for handle in graph.written:
            handle.engine.grad_written()
        # The gradient of a stage's input outlives the next backward pass, which writes this place.
        return self._grad.clone() if block.is_first else self._grad.detach()

    def _open(self, written: Sequence[_Handle]) -> float:
        """Open the slots of these gradients, and return the factor of what they hold."""
        opened = [handle.engine.grad_view() for handle in written]
        first = opened[0][1]
        for place, (handle, (view, beta)) in enumerate(zip(written, opened, strict=True)):
            expected = FURTHER if handle in written[:place] else first
            if view is not handle.view or beta != expected:
                raise RuntimeError(
                    f"{self._block.name}: gradients of one pass have moved, or are not all the "
                    "first of their round; no graph of it was captured"
                )
        return first


@dataclass(frozen=True)
class _Block:
    """A block, without its graphs."""

    name: str
    forward: Callable[[Residual, Positions], Residual]
    handles: tuple[_Handle, ...]
    """Those of all its parameters."""
    is_first: bool
    """Whether the block is the first of its stage."""
    is_sent: bool
    """Whether its output goes to another stage."""


class _Buffers:
    """What belongs to one microbatch in flight at a stage."""

    def __init__(
        self, blocks: Sequence[_Block], shared: _Shared, x: Tensor, positions: Positions
    ) -> None:
        pool = devices.graph_pool()
        tables = _tables(positions)
        self._kept = [table.clone() for table in tables.values()]
        fixed = replace(positions, **cast(Any, dict(zip(tables, self._kept, strict=True))))
        self.passes: list[_Pass] = []
        place = torch.empty_like(x, requires_grad=False)
        for block in blocks:
            leaf = place.detach().requires_grad_()
            self.passes.append(_Pass(block, shared, pool, leaf, fixed))
            place = self.passes[-1].result
        for one in reversed(self.passes):
            one.capture_backward()

    def take(self, positions: Positions) -> None:
        """Take the positions of another microbatch."""
        for kept, table in zip(self._kept, _tables(positions).values(), strict=True):
            kept.copy_(table)


class _StageGraphs:
    """The graphs of the blocks of one stage, which they replace."""

    def __init__(self, stage: Stage, shared: _Shared) -> None:
        self._shared = shared
        self._free: list[_Buffers] = []
        self._current: _Buffers | None = None
        self._shapes: Sequence[torch.Size] = ()
        """Those of the inputs for which the graphs are captured."""
        self.made = 0
        layers = stage.model.layers
        last = len(layers) - 1
        self._blocks: list[_Block] = []
        for place, (name, block) in enumerate(layers.items()):
            handles = []
            for parameter in block.parameters():
                engine = param_handle_of(parameter)
                assert engine is not None
                handles.append(_Handle(engine, shared))
                attach_param_handle(cast(Any, parameter), handles[-1])
            self._blocks.append(
                _Block(
                    f"layers.{name}",
                    block.forward,
                    tuple(handles),
                    is_first=place == 0,
                    is_sent=place == last and not stage.is_last,
                )
            )
            block.forward = partial(self._run, place)

    def _run(self, place: int, residual: Residual, positions: Positions) -> Residual:
        block = self._blocks[place]
        if not (self._shared.begun and torch.is_grad_enabled()):
            return block.forward(residual, positions)
        if place == 0:
            self._current = self._taken(residual.stream, positions)
        if self._current is None:
            return block.forward(residual, positions)
        release = partial(self._free.append, self._current) if place == 0 else None
        # A graph writes one tensor, the complete stream.
        out: Tensor = _Replayed.apply(  # type: ignore[no-untyped-call]
            residual.sum(), self._current.passes[place], release
        )
        return Residual(out)

    def _taken(self, x: Tensor, positions: Positions) -> _Buffers | None:
        """Return the buffers of a microbatch that begins, whose graphs no other one uses. None for
        one of another shape, such as the last one of a pass over the samples: it runs without."""
        if positions.documents is not None or positions.mask is not None or not x.requires_grad:
            raise RuntimeError(
                "--cuda-graph-scope block: got documents, a mask or an input without gradient, "
                "expected passes that all launch the same kernels"
            )
        shapes = [tensor.shape for tensor in (x, *_tables(positions).values())]
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            return None
        if not self._free:
            self.made += 1
            return _Buffers(self._blocks, self._shared, x, positions)
        buffers = self._free.pop()
        buffers.take(positions)
        return buffers


class _Replayed(torch.autograd.Function):
    """The passes of a block by its graphs. ``release`` is called behind the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, one: _Pass, release: Callable[[], None] | None) -> Tensor:
        ctx.one = one
        ctx.release = release
        return one.forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x_grad = ctx.one.backward(grad)
        if ctx.release is not None:
            ctx.release()
        return x_grad, None, None


def _tables(positions: Positions) -> dict[str, Tensor]:
    """Return the rotary tables of a microbatch by their names."""
    names = ("cos", "sin", "sliding_cos", "sliding_sin")
    tables = {name: getattr(positions, name) for name in names}
    return {name: table for name, table in tables.items() if table is not None}


_Messages = Mapping[tuple[str, str], Traffic]
"""Counts of messages by (axis, operation)."""
_AXIS = "tp"
"""The axis whose messages are part of a block. Only the thread that computes sends any."""


def _messages(recorder: Recorder) -> _Messages:
    return {key: replace(sent) for key, sent in recorder.traffic.items() if key[0] == _AXIS}


def _set_messages(recorder: Recorder, messages: _Messages) -> None:
    recorder.traffic.update({key: replace(sent) for key, sent in messages.items()})


def _less(messages: _Messages, before: _Messages) -> _Messages:
    none = Traffic()
    return {
        key: Traffic(
            sent.calls - before.get(key, none).calls, sent.bytes - before.get(key, none).bytes
        )
        for key, sent in messages.items()
        if sent != before.get(key)
    }


def _plus(messages: _Messages, sent: _Messages) -> _Messages:
    none = Traffic()
    return {
        key: Traffic(
            messages.get(key, none).calls + more.calls, messages.get(key, none).bytes + more.bytes
        )
        for key, more in sent.items()
    }
