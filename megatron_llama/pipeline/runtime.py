"""Runs this rank's list of actions. Everything that decides what happens when is in the
schedule."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama.config.schema import Config
from megatron_llama.distributed.comm import p2p
from megatron_llama.distributed.comm.collectives import all_reduce
from megatron_llama.distributed.mesh import Mesh
from megatron_llama.model.llama import Stage
from megatron_llama.nn.attention import Documents
from megatron_llama.nn.backward import backward
from megatron_llama.nn.context import local_sequence
from megatron_llama.nn.embedding import uniform_noise
from megatron_llama.nn.loss import argmax, cross_entropy
from megatron_llama.nn.ops import at_least_fp32
from megatron_llama.plans.params import partition_of
from megatron_llama.plans.schedule import (
    Action,
    Op,
    Schedule,
    backward_comes_next,
    forward_only,
    schedule_named,
)
from megatron_llama.plans.weight_access import WeightAccess, rank_weight_accesses


class Microbatch(Protocol):
    """One microbatch, sequence first, the same on all ranks that share a sequence (cp) or a model
    (tp, pp)."""

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
    def document_ids(self) -> Tensor | None:
        """[s, b] int, number of the document within the sample; None: attention crosses
        documents."""

    @property
    def document_starts(self) -> Tensor | None:
        """``Documents.starts`` of the document ids; None: nobody has counted."""

    @property
    def longest_document(self) -> int:
        """``Documents.longest``, where they are counted."""

    @property
    def noise_scale(self) -> Tensor | None:
        """[s, b] float32, largest noise that training adds to each embedding; None: no noise."""

    @property
    def noise_seeds(self) -> tuple[int, ...]:
        """One for each sample, where there is noise."""

    def to(self, device: torch.device) -> Microbatch:
        """The same microbatch on another device."""


class Engine(Protocol):
    """What the runtime needs of the optimizer."""

    def access(self, unit: int, backward: bool) -> None:
        """A unit (counted over all stages of this process) is about to run forward or backward."""

    def begin_step(self, microbatches: int, accesses: Sequence[WeightAccess]) -> Tensor:
        """A training step with these uses starts; returns the factor for the loss (0-dim)."""

    def begin_evaluation(self, accesses: Sequence[WeightAccess]) -> None:
        """An evaluation with these uses starts."""

    def postpone_wgrad(self, key: Hashable | None) -> None:
        """Keep the weight gradients of the coming backward pass under ``key``; None: no longer."""

    def run_wgrads(self, key: Hashable) -> None:
        """Compute the weight gradients kept under ``key``."""


class FixedWeights:
    """The engine of a model that is only evaluated: its weights are always there."""

    def access(self, unit: int, backward: bool) -> None:
        """See Engine."""

    def begin_evaluation(self, accesses: Sequence[WeightAccess]) -> None:
        """See Engine."""

    def begin_step(self, microbatches: int, accesses: Sequence[WeightAccess]) -> Tensor:
        """See Engine."""
        raise RuntimeError("a model without an optimizer has no training step")

    def postpone_wgrad(self, key: Hashable | None) -> None:
        """See Engine."""

    def run_wgrads(self, key: Hashable) -> None:
        """See Engine."""


Key = tuple[int, int]
"""(stage, microbatch)."""


@dataclass(frozen=True)
class _Plan:
    """What this rank does in one run: its actions, and the weights that they read."""

    actions: tuple[Action, ...]
    accesses: tuple[WeightAccess, ...]
    last_forward: int
    """Index of the action behind which this rank's part of the loss is complete."""
    at_once: bool
    """Whether each backward pass of the last stage comes next after its forward pass, in one
    piece."""


@dataclass
class _Flight:
    """What one run of a schedule holds."""

    batches: Sequence[Microbatch]
    tokens: Tensor
    """Target tokens of the global batch: the divisor of the loss."""
    loss_scale: Tensor | None
    """None: no backward."""
    loss: Tensor
    at_once: bool
    """See _Plan."""
    predicted: Tensor | None = None
    """[s, b], where the last stage writes the likeliest tokens; None: nobody asks."""
    receives: dict[tuple[Op, Key], p2p.Transfer] = field(default_factory=dict)
    sends: dict[tuple[Op, int], p2p.Transfer] = field(default_factory=dict)
    inputs: dict[Key, Tensor] = field(default_factory=dict)
    outputs: dict[Key, Tensor] = field(default_factory=dict)
    """Of the last stage the logits, or what the head reads; in that memory its gradient is by
    then."""
    handed: dict[tuple[Op, Key], Tensor] = field(default_factory=dict)
    """Tensors for a neighbouring stage of this process."""

    @property
    def training(self) -> bool:
        """Whether there is a backward pass."""
        return self.loss_scale is not None


class PipelineRuntime:
    """Forward and backward of one global batch on this process's stages."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        engine: Engine,
        mesh: Mesh,
        config: Config,
        *,
        dtype: torch.dtype,
    ) -> None:
        self.stages = stages
        self.engine = engine
        self.mesh = mesh
        self.dtype = dtype
        self._config = config
        self._parallel = config.parallel
        self._partition = partition_of(config)
        self._plans: dict[tuple[bool, int], _Plan] = {}
        first = 0
        for stage in stages.values():
            stage.on_weight_access = partial(_access, engine, first)
            first += stage.units
        self._handlers: dict[Op, Callable[[_Flight, Key], None]] = {
            Op.RECV_FORWARD: self._receive_forward,
            Op.FORWARD: self._forward,
            Op.SEND_FORWARD: self._send_forward,
            Op.RECV_BACKWARD: self._receive_backward,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.SEND_BACKWARD: self._send_backward,
        }

    def step(self, batches: Sequence[Microbatch]) -> Tensor:
        """Forward and backward of every microbatch; the engine reduces the gradients on the way.

        Returns the loss, a 0-dim fp64 tensor: the mean over all target tokens of the global batch,
        on every rank."""
        return self._run(batches, training=True)[0]

    def evaluate(self, batches: Sequence[Microbatch]) -> tuple[Tensor, Tensor]:
        """The same loss without backward, and the number of target tokens it is the mean of (0-dim
        fp64)."""
        with torch.no_grad():
            return self._run(batches, training=False)

    def predict(self, batch: Microbatch) -> Tensor:
        """The likeliest token behind each of a batch's, int64 [s, b], on every rank. All ranks give
        the same batch; labels do not count."""
        found = torch.full(batch.tokens.shape, -1, device=self.mesh.device)
        with torch.no_grad():
            self._run([batch], training=False, predicted=found)
        # Those who do not know say -1: ranks of other stages, and of other parts of the sequence.
        all_reduce(found, self.mesh.world, dist.ReduceOp.MAX).wait()
        return found

    def _run(
        self, batches: Sequence[Microbatch], *, training: bool, predicted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        loss = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        loss_scale = None
        plan = self._plan(training, len(batches))
        if training:
            loss_scale = self.engine.begin_step(len(batches), plan.accesses)
        else:
            self.engine.begin_evaluation(plan.accesses)
        flight = _Flight(
            batches, self._target_tokens(batches), loss_scale, loss, plan.at_once, predicted
        )
        recorder = self.mesh.recorder
        recorder.evaluating = not training
        for index, action in enumerate(plan.actions):
            recorder.doing = action
            recorder.event(str(action))
            note = recorder.begin("action", action)
            self._handlers[action.op](flight, (action.stage, action.microbatch))
            if note is not None:
                note.end()
            if index == plan.last_forward:
                # The last stage of every data-parallel replica holds its part, once per tp rank.
                total = loss / self.mesh.tp.size
                summed = all_reduce(total, self.mesh.world)
        for transfer in flight.sends.values():
            transfer.wait()
        summed.wait()
        return total, flight.tokens

    def _plan(self, training: bool, microbatches: int) -> _Plan:
        key = (training, microbatches)
        if key not in self._plans:
            actions = self._schedule(training, microbatches).ranks[self.mesh.pp.rank]
            last_forward = max(
                index for index, action in enumerate(actions) if action.op is Op.FORWARD
            )
            accesses = rank_weight_accesses(self._config, actions, rank=self.mesh.pp.rank)
            last = self._partition.stages - 1
            self._plans[key] = _Plan(
                actions, accesses, last_forward, training and backward_comes_next(actions, last)
            )
        return self._plans[key]

    def _schedule(self, training: bool, microbatches: int) -> Schedule:
        if not training:
            return forward_only(self._partition.placement, microbatches)
        name = self._parallel.pipeline_schedule
        virtual = self._parallel.virtual_pipeline_model_parallel_size
        return schedule_named(
            name, ranks=self.mesh.pp.size, microbatches=microbatches, virtual=virtual
        )

    def _target_tokens(self, batches: Sequence[Microbatch]) -> Tensor:
        """Target tokens of the global batch. Counted before the first backward, since it divides
        every loss."""
        masks = [b.loss_mask for b in batches if b.loss_mask is not None]
        whole = sum(b.labels.numel() for b in batches if b.loss_mask is None)
        # A number of the host's is filled in, not copied: a device's stream would be waited for.
        count = torch.full((), float(whole), dtype=torch.float64, device=self.mesh.device)
        for mask in masks:
            count += mask.sum().to(self.mesh.device, non_blocking=True)
        # Ranks that share a sequence count all of it, and are summed over too.
        count /= self.mesh.cp.size
        if masks:
            all_reduce(count, self.mesh.dp).wait()
            return count.clamp_(min=1.0)
        return count * self.mesh.dp.size

    def _receive_forward(self, flight: _Flight, key: Key) -> None:
        source = self._partition.placement[key[0] - 1]
        link = self.mesh.link(source, self.mesh.pp.rank, backward=False)
        flight.receives[Op.FORWARD, key] = p2p.receive(self._activation(flight, key), link, source)

    def _receive_backward(self, flight: _Flight, key: Key) -> None:
        source = self._partition.placement[key[0] + 1]
        link = self.mesh.link(source, self.mesh.pp.rank, backward=True)
        flight.receives[Op.BACKWARD, key] = p2p.receive(self._activation(flight, key), link, source)

    def _activation(self, flight: _Flight, key: Key) -> Tensor:
        """An empty tensor of the shape that crosses stages: [s/cp or s/cp/tp, b, h]."""
        length, batch = flight.batches[key[1]].tokens.shape
        length //= self.mesh.cp.size * (
            self.mesh.tp.size if self._parallel.sequence_parallel else 1
        )
        return torch.empty(
            length,
            batch,
            self.stages[key[0]].config.hidden_size,
            dtype=self.dtype,
            device=self.mesh.device,
        )

    def _arrived(self, flight: _Flight, op: Op, key: Key) -> Tensor:
        """What a pass works on: received, or handed over by the neighbouring stage of this
        process."""
        return (
            flight.receives.pop((op, key)).wait()
            if (op, key) in flight.receives
            else flight.handed.pop((op, key))
        )

    def _forward(self, flight: _Flight, key: Key) -> None:
        stage = self.stages[key[0]]
        batch = flight.batches[key[1]].to(self.mesh.device)
        if stage.is_first:
            inputs = local_sequence(batch.tokens, self.mesh.cp)
        else:
            inputs = self._arrived(flight, Op.FORWARD, key).requires_grad_(flight.training)
        starts = batch.document_starts
        longest = batch.longest_document
        documents = None if starts is None else Documents(starts, longest)
        positions = stage.positions(
            batch.tokens.shape[0],
            self.mesh.device,
            batch.position_ids,
            batch.document_ids,
            documents,
        )
        noise = self._noise(batch, stage) if flight.training and stage.is_first else None
        in_chunks = self._in_chunks(stage, batch, flight)
        output = stage(inputs, positions, noise, head=not in_chunks)
        if stage.is_last and flight.predicted is not None:
            here = local_sequence(
                torch.arange(len(batch.tokens), device=self.mesh.device), self.mesh.cp
            )
            flight.predicted[here] = argmax(output, self.mesh.tp, stage.config.vocab_size)
        elif stage.is_last:
            self._add_loss(output, batch, flight, in_chunks=in_chunks)
        elif self._is_here(key[0] + 1):
            flight.handed[Op.FORWARD, (key[0] + 1, key[1])] = output.detach()
        if flight.training:
            flight.inputs[key] = inputs
        if flight.training or not (stage.is_last or self._is_here(key[0] + 1)):
            flight.outputs[key] = output

    def _noise(self, batch: Microbatch, stage: Stage) -> Tensor | None:
        """This rank's part of the noise of a batch, in the shape of its embeddings."""
        if batch.noise_scale is None:
            return None
        noise = local_sequence(
            uniform_noise(
                batch.noise_scale, batch.noise_seeds, stage.config.hidden_size, self.dtype
            ),
            self.mesh.cp,
        )
        return (
            noise.chunk(self.mesh.tp.size)[self.mesh.tp.rank]
            if self._parallel.sequence_parallel
            else noise
        )

    def _is_here(self, stage: int) -> bool:
        return stage in self.stages

    def _in_chunks(self, stage: Stage, batch: Microbatch, flight: _Flight) -> bool:
        """Whether the scores of a batch are too many to be there at once, and may be made one chunk
        after the other."""
        if (
            not stage.is_last
            or flight.predicted is not None
            or (flight.training and not flight.at_once)
        ):
            return False
        return (
            batch.labels.numel() // self.mesh.cp.size * stage.head_weight.shape[0]
            > stage.options.head_chunk
        )

    def _add_loss(
        self, output: Tensor, batch: Microbatch, flight: _Flight, *, in_chunks: bool
    ) -> None:
        """Add this microbatch's share of the mean over all target tokens of the global batch. In
        training the logits, or what the head reads, become the gradient of that share times the
        loss scale."""
        cp = self.mesh.cp
        stage = self.stages[self._partition.stages - 1]
        labels = local_sequence(batch.labels, cp)
        weights = None
        mask = None if batch.loss_mask is None else local_sequence(batch.loss_mask, cp)
        if flight.loss_scale is not None:
            each = (flight.loss_scale / flight.tokens).to(at_least_fp32(self.dtype))
            weights = each.expand(labels.shape) if mask is None else mask.to(each.dtype) * each
        z_weight = self._config.training.z_loss_weight
        ops = stage.options.ops
        if in_chunks:
            losses = stage.loss_in_chunks(output, labels, weights=weights, z_weight=z_weight)
        else:
            losses = cross_entropy(
                output,
                labels,
                self.mesh.tp,
                stage.config.vocab_size,
                weights=weights,
                z_weight=z_weight,
                ops=ops,
            )
        flight.loss += (losses if mask is None else losses * mask).sum(
            dtype=torch.float64
        ) / flight.tokens

    def _send_forward(self, flight: _Flight, key: Key) -> None:
        output = flight.outputs[key] if flight.training else flight.outputs.pop(key)
        self._send(flight, Op.SEND_FORWARD, output.detach(), self._partition.placement[key[0] + 1])

    def _backward(self, flight: _Flight, key: Key) -> None:
        stage = self.stages[key[0]]
        output = flight.outputs.pop(key)
        grad = output.detach() if stage.is_last else self._arrived(flight, Op.BACKWARD, key)
        # The first stage may have nothing to train; the others pass a gradient on.
        if output.requires_grad:
            backward(output, grad)
        if stage.is_first:
            del flight.inputs[key]
        elif self._is_here(key[0] - 1):
            flight.handed[Op.BACKWARD, (key[0] - 1, key[1])] = _gradient(flight.inputs.pop(key))

    def _backward_input(self, flight: _Flight, key: Key) -> None:
        self.engine.postpone_wgrad(key)
        self._backward(flight, key)
        self.engine.postpone_wgrad(None)

    def _backward_weight(self, flight: _Flight, key: Key) -> None:
        self.engine.run_wgrads(key)

    def _send_backward(self, flight: _Flight, key: Key) -> None:
        grad = _gradient(flight.inputs.pop(key))
        self._send(flight, Op.SEND_BACKWARD, grad, self._partition.placement[key[0] - 1])

    def _send(self, flight: _Flight, op: Op, tensor: Tensor, to: int) -> None:
        """One sent tensor is kept per link: the previous one must have been taken (validate()
        proves that it will be)."""
        if (op, to) in flight.sends:
            flight.sends.pop((op, to)).wait()
        link = self.mesh.link(self.mesh.pp.rank, to, backward=op is Op.SEND_BACKWARD)
        flight.sends[op, to] = p2p.send(tensor, link, to)


def _access(engine: Engine, first: int, unit: int, backward: bool) -> None:
    engine.access(first + unit, backward)


def _gradient(inputs: Tensor) -> Tensor:
    assert inputs.grad is not None
    return inputs.grad
