"""Runs this rank's list of actions. Everything that decides what happens when is in the schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megatron_llama.comm import p2p
from megatron_llama.comm.collectives import all_reduce
from megatron_llama.mesh import Axis, Mesh
from megatron_llama.model.llama import Stage
from megatron_llama.nn.loss import vocab_parallel_cross_entropy
from megatron_llama.schedule import Action, Op, Schedule, forward_only, schedule_named


class Microbatch(Protocol):
    """One microbatch, sequence first."""

    @property
    def tokens(self) -> Tensor:
        """[s, b] int64."""

    @property
    def labels(self) -> Tensor:
        """[s, b] int64."""

    @property
    def loss_mask(self) -> Tensor | None:
        """[s, b] float32 weights of the positions in the loss; None: all 1."""

    @property
    def position_ids(self) -> Tensor | None:
        """[s, b] int64; None: 0 to s - 1."""

    @property
    def document_mask(self) -> Tensor | None:
        """bool [b, 1, s, s], True where a position may attend; None: causal."""

    def to(self, device: torch.device) -> Microbatch:
        """The same microbatch on another device."""


class Engine(Protocol):
    """What the runtime needs of the optimizer."""

    def use(self, unit: int) -> None:
        """A unit is about to run forward."""

    def begin_backward(self, *, first: bool, last: bool) -> None:
        """A backward pass starts."""

    def end_backward(self) -> None:
        """It has ended."""


class FixedWeights:
    """The engine of a model that is only evaluated: its weights are always there."""

    def use(self, unit: int) -> None:
        """See Engine."""

    def begin_backward(self, *, first: bool, last: bool) -> None:
        """See Engine."""
        raise RuntimeError("a model without an optimizer has no backward pass")

    def end_backward(self) -> None:
        """See Engine."""


@dataclass
class _Flight:
    """What one run of a schedule holds."""

    batches: Sequence[Microbatch]
    tokens: Tensor
    """Target tokens of the global batch: the divisor of the loss."""
    training: bool
    loss: Tensor
    receives: dict[tuple[Op, int], p2p.Transfer] = field(default_factory=dict)
    sends: dict[Op, p2p.Transfer] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    backwards: int = 0


class PipelineRuntime:
    """Forward and backward of one global batch on this rank's stage."""

    def __init__(self, stage: Stage, engine: Engine, mesh: Mesh, *, schedule: str, dtype: torch.dtype) -> None:
        self.stage, self.engine, self.mesh, self.schedule_name, self.dtype = stage, engine, mesh, schedule, dtype
        self._schedules: dict[tuple[str, int], Schedule] = {}
        stage.on_use = engine.use
        self._handlers: dict[Op, Callable[[_Flight, int], None]] = {
            Op.RECV_FORWARD: self._receive_forward,
            Op.FORWARD: self._forward,
            Op.SEND_FORWARD: self._send_forward,
            Op.RECV_BACKWARD: self._receive_backward,
            Op.BACKWARD: self._backward,
            Op.SEND_BACKWARD: self._send_backward,
        }

    def step(self, batches: Sequence[Microbatch]) -> Tensor:
        """Forward and backward of every microbatch; the engine reduces the gradients on the way.

        Returns the loss, a 0-dim fp64 tensor: the mean over all target tokens of the global batch, on every rank."""
        return self._run(self.schedule_name, batches, training=True)[0]

    def evaluate(self, batches: Sequence[Microbatch]) -> tuple[Tensor, Tensor]:
        """The same loss without backward, and the number of target tokens it is the mean of (0-dim fp64)."""
        with torch.no_grad():
            return self._run("forward_only", batches, training=False)

    def _run(self, name: str, batches: Sequence[Microbatch], *, training: bool) -> tuple[Tensor, Tensor]:
        loss = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        flight = _Flight(batches, self._target_tokens(batches), training, loss)
        for action in self._actions(name, len(batches)):
            self._handlers[action.op](flight, action.microbatch)
        for transfer in flight.sends.values():
            transfer.wait()
        # The last stage of every data-parallel replica holds its part, once per tp rank.
        total = loss / self.mesh.tp.size
        all_reduce(total, self.mesh.world).wait()
        return total, flight.tokens

    def _actions(self, name: str, microbatches: int) -> tuple[Action, ...]:
        key, stages = (name, microbatches), self.mesh.pp.size
        if key not in self._schedules:
            build = forward_only(stages, microbatches) if name == "forward_only" else schedule_named(name, stages, microbatches)
            self._schedules[key] = build
        return self._schedules[key].ranks[self.mesh.pp.rank]

    def _target_tokens(self, batches: Sequence[Microbatch]) -> Tensor:
        """Target tokens of the global batch. Counted before the first backward, since it divides every loss."""
        counts = [torch.tensor(float(b.labels.numel())) if b.loss_mask is None else b.loss_mask.sum() for b in batches]
        count = torch.stack(counts).sum().to(self.mesh.device, torch.float64)
        if any(b.loss_mask is not None for b in batches):
            all_reduce(count, self.mesh.dp).wait()
            return count.clamp_(min=1.0)
        return count * self.mesh.dp.size

    def _receive_forward(self, flight: _Flight, microbatch: int) -> None:
        source = self.mesh.pp.rank - 1
        flight.receives[Op.FORWARD, microbatch] = p2p.receive(self._activation(flight, microbatch), self.mesh.pp, source)

    def _receive_backward(self, flight: _Flight, microbatch: int) -> None:
        source = self.mesh.pp.rank + 1
        flight.receives[Op.BACKWARD, microbatch] = p2p.receive(self._activation(flight, microbatch), self.mesh.pp_backward, source)

    def _activation(self, flight: _Flight, microbatch: int) -> Tensor:
        """An empty tensor of the shape that crosses stages: [s or s/tp, b, h]."""
        length, batch = flight.batches[microbatch].tokens.shape
        if self.stage.sequence_parallel:
            length //= self.mesh.tp.size
        return torch.empty(length, batch, self.stage.config.hidden_size, dtype=self.dtype, device=self.mesh.device)

    def _forward(self, flight: _Flight, microbatch: int) -> None:
        batch = flight.batches[microbatch].to(self.mesh.device)
        if self.mesh.is_first_stage:
            inputs = batch.tokens
        else:
            inputs = flight.receives.pop((Op.FORWARD, microbatch)).wait().requires_grad_(flight.training)
        positions = self.stage.positions(batch.tokens.shape[0], self.mesh.device, batch.position_ids, batch.document_mask)
        output = self.stage(inputs, positions)
        if self.mesh.is_last_stage:
            output = self._loss(output, batch, flight)
        if flight.training:
            flight.inputs[microbatch] = inputs
        if flight.training or not self.mesh.is_last_stage:
            flight.outputs[microbatch] = output

    def _loss(self, logits: Tensor, batch: Microbatch, flight: _Flight) -> Tensor:
        """This microbatch's share of the mean over all target tokens of the global batch."""
        losses = vocab_parallel_cross_entropy(logits, batch.labels, self.mesh.tp, self.stage.config.vocab_size)
        if batch.loss_mask is not None:
            losses = losses * batch.loss_mask
        loss = losses.sum(dtype=torch.float64) / flight.tokens
        flight.loss += loss.detach()
        return loss

    def _send_forward(self, flight: _Flight, microbatch: int) -> None:
        output = flight.outputs[microbatch] if flight.training else flight.outputs.pop(microbatch)
        self._send(flight, Op.SEND_FORWARD, output.detach(), self.mesh.pp, self.mesh.pp.rank + 1)

    def _backward(self, flight: _Flight, microbatch: int) -> None:
        output, grad = flight.outputs.pop(microbatch), None
        if not self.mesh.is_last_stage:
            grad = flight.receives.pop((Op.BACKWARD, microbatch)).wait()
        self.engine.begin_backward(first=flight.backwards == 0, last=flight.backwards == len(flight.batches) - 1)
        torch.autograd.backward(output, grad)
        self.engine.end_backward()
        flight.backwards += 1
        if self.mesh.is_first_stage:
            del flight.inputs[microbatch]

    def _send_backward(self, flight: _Flight, microbatch: int) -> None:
        grad = flight.inputs.pop(microbatch).grad
        assert grad is not None
        self._send(flight, Op.SEND_BACKWARD, grad, self.mesh.pp_backward, self.mesh.pp.rank - 1)

    def _send(self, flight: _Flight, op: Op, tensor: Tensor, axis: Axis, to: int) -> None:
        """One sent tensor is kept per link: the previous one must have been taken (validate() proves that it will be)."""
        if op in flight.sends:
            flight.sends.pop(op).wait()
        flight.sends[op] = p2p.send(tensor, axis, to)
