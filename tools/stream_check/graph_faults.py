"""Faults of passes that run as graphs. Each is planted in a layout, and has to be found for what it
is: a check that finds nothing would not find it either."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron_llama.engine.comm import collectives
from megatron_llama.model import llama
from megatron_llama.model.nn import functional
from megatron_llama.model.nn.functional import Residual
from megatron_llama.pipeline.runtime import PipelineRuntime
from megatron_llama.train.run import block_graphs
from tools.stream_check.graphs import (
    ESCAPES,
    HOST,
    IN_USE,
    OTHER,
    OUTSIDE,
    READ,
    SYNC,
    UNJOINED,
    GraphResult,
    graph_layouts,
    measured_graphs,
)


@contextmanager
def _reads_a_number() -> Iterator[None]:
    """A block looks at a value."""
    forward = llama.MLP.forward

    def looking(mlp: llama.MLP, x: Any) -> Tensor:
        out = forward(mlp, x)
        return out if out.detach().sum().item() < 1e30 else -out

    with patch.object(llama.MLP, "forward", looking):
        yield


@contextmanager
def _takes_a_number_of_the_host() -> Iterator[None]:
    """A block multiplies by a tensor that comes from the host."""
    forward = llama.MLP.forward

    def scaling(mlp: llama.MLP, x: Any) -> Tensor:
        weight = next(mlp.parameters())
        factor = torch.ones(1).to(weight.device, non_blocking=True)
        return forward(mlp, x) * factor.to(torch.bfloat16)

    with patch.object(llama.MLP, "forward", scaling):
        yield


@contextmanager
def _copies_a_weight() -> Iterator[None]:
    """Each step makes a copy of the norms' weights, which the blocks read."""
    step = PipelineRuntime.step

    def copying(runtime: PipelineRuntime, batches: Any) -> Tensor:
        for stage in runtime.stages.values():
            for block in stage.model.layers.values():
                weight = next(block.input_layernorm.parameters())  # type: ignore[union-attr]
                block.copied = weight.detach().clone()
        return step(runtime, batches)

    compute = llama.Block._compute

    def reading(block: Any, residual: Residual, positions: Any) -> Residual:
        return compute(block, Residual(residual.sum() * block.copied), positions)

    with (
        patch.object(PipelineRuntime, "step", copying),
        patch.object(llama.Block, "_compute", reading),
    ):
        yield


@contextmanager
def _keeps_memory() -> Iterator[None]:
    """A backward pass keeps what it has computed."""
    kept = []
    backward = functional._Gated.backward

    def keeping(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        kept.append(backward(ctx, grad)[0])
        return kept[-1], None

    with patch.object(functional._Gated, "backward", staticmethod(keeping)):
        yield


@contextmanager
def _is_read_outside() -> Iterator[None]:
    """After the step something reads what a block has computed."""
    step = PipelineRuntime.step
    forward = llama.MLP.forward
    made: list[Tensor] = []

    def making(mlp: llama.MLP, x: Any) -> Tensor:
        made[:] = [forward(mlp, x)]
        return made[0]

    def reading(runtime: PipelineRuntime, batches: Any) -> Tensor:
        loss = step(runtime, batches)
        made[0].detach().square()
        return loss

    with patch.object(llama.MLP, "forward", making), patch.object(PipelineRuntime, "step", reading):
        yield


@contextmanager
def _shares_buffers() -> Iterator[None]:
    """All microbatches in flight have the same buffers."""
    taken = block_graphs._StageGraphs._taken

    def taking(stage: Any, x: Tensor, positions: Any) -> Any:
        buffers = taken(stage, x, positions)
        stage._free[:] = [buffers]
        return buffers

    with patch.object(block_graphs._StageGraphs, "_taken", taking):
        yield


@contextmanager
def _waits_inside() -> Iterator[None]:
    """A graph waits for the gathers of its weights."""

    def waiting(handle: Any) -> int:
        version: int = handle.engine.wait_unsharded()
        return version

    with patch.object(block_graphs._Handle, "wait_unsharded", waiting):
        yield


@contextmanager
def _does_not_join() -> Iterator[None]:
    """A message in another stream is not waited for."""
    start = collectives._start

    def starting(*arguments: Any, async_op: bool) -> collectives.Pending:
        pending = start(*arguments, async_op=async_op)
        if pending.operation == "reduce_scatter" and async_op:
            pending.work = None
        return pending

    with patch.object(collectives, "_start", starting):
        yield


@dataclass(frozen=True)
class GraphFault:
    """A fault, the layout that it is planted in, and what has to be reported."""

    layout: str
    plant: Callable[[], AbstractContextManager[None]]
    kind: str


FAULTS: Mapping[str, GraphFault] = MappingProxyType(
    {
        "a block reads a number": GraphFault("optim", _reads_a_number, SYNC),
        "a block takes a number of the host": GraphFault(
            "optim", _takes_a_number_of_the_host, HOST
        ),
        "a weight is copied in each step": GraphFault("optim", _copies_a_weight, OTHER),
        "a backward pass keeps memory": GraphFault("optim", _keeps_memory, ESCAPES),
        "memory of a block is read outside": GraphFault("optim", _is_read_outside, READ),
        "microbatches share buffers": GraphFault(
            "1f1b, pipeline rank 0, optim", _shares_buffers, IN_USE
        ),
        "a graph waits for gathers": GraphFault("optim_grads_params", _waits_inside, OUTSIDE),
        "a message is not joined": GraphFault("sp", _does_not_join, UNJOINED),
    }
)
"""By what is wrong."""


@dataclass(frozen=True)
class Found:
    """What a planted fault has shown."""

    fault: str
    expected: str
    reported: str
    """The report of that kind; "" without one."""


def plant_in_graphs(name: str) -> Found:
    """Plant a fault, and return its report."""
    fault = FAULTS[name]
    layout = graph_layouts()[fault.layout]
    with fault.plant():
        result: GraphResult = measured_graphs(fault.layout, layout)
    reports = [str(problem) for problem in result.problems if problem.kind == fault.kind]
    return Found(name, fault.kind, reports[0] if reports else "")
