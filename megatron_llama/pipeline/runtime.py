"""The pipeline runtime, which only walks this rank's list of actions.

``schedule`` decides and proves the order of passes, sends and receives. A step is ``_run``: each
action is one call of one of the eight methods below it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_llama.config.schema import Config
from megatron_llama.engine.backward import backward
from megatron_llama.engine.comm import p2p
from megatron_llama.engine.comm.collectives import all_reduce
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.plan.weight_access import WeightAccess
from megatron_llama.engine.tensors import at_least_fp32
from megatron_llama.model.llama import Stage
from megatron_llama.model.nn.context import local_sequence
from megatron_llama.model.nn.documents import Documents
from megatron_llama.model.nn.embedding import uniform_noise
from megatron_llama.model.nn.loss import TokenWeights, cross_entropy
from megatron_llama.model.plan.params import partition_of
from megatron_llama.pipeline.microbatch import Microbatch
from megatron_llama.pipeline.objective import NextToken, Objective, StepLoss
from megatron_llama.pipeline.plan.stage_accesses import rank_weight_accesses
from megatron_llama.schedule import (
    Action,
    Op,
    Schedule,
    backward_comes_next,
    forward_only,
    schedule_named,
)

ReadLogits = Callable[[Stage, int, Microbatch, Tensor], None]
"""Reads the logits of a microbatch instead of computing its loss: the last stage, the number of the
microbatch, the microbatch on the device, and the logits."""


class Engine(Protocol):
    """The optimizer, which shards the weights, as the runtime needs it."""

    def access(self, unit: int, backward: bool) -> None:
        """Begin a pass of a unit, which is counted over all stages of this process."""

    def begin_step(self, microbatches: int, accesses: Sequence[WeightAccess]) -> Tensor:
        """Start a training step with these weight accesses. Returns the loss scale (0-dim)."""

    def begin_evaluation(self, accesses: Sequence[WeightAccess]) -> None:
        """Start an evaluation with these weight accesses."""

    def begin_preliminary(self, accesses: Sequence[WeightAccess]) -> None:
        """Start forward passes with the weights of the training step that follows."""

    def postpone_wgrads(self, key: Hashable | None) -> None:
        """Keep the weight gradients of the coming backward pass under ``key``; None: no longer."""

    def run_wgrads(self, key: Hashable) -> None:
        """Compute the weight gradients kept under ``key``."""


class Key(NamedTuple):
    """One microbatch at one stage."""

    stage: int
    microbatch: int

    @property
    def next_stage(self) -> Key:
        """The same microbatch one stage later."""
        return Key(self.stage + 1, self.microbatch)

    @property
    def previous_stage(self) -> Key:
        """The same microbatch one stage earlier."""
        return Key(self.stage - 1, self.microbatch)


@dataclass(frozen=True)
class _RankPlan:
    """The plan of this rank for one step or evaluation: its actions, and the weights that they
    read."""

    actions: tuple[Action, ...]
    accesses: tuple[WeightAccess, ...]
    last_forward: int
    """Index of this rank's last forward pass: after it the rank's part of the loss is complete."""
    backward_comes_next: bool
    """Whether each backward pass of the last stage comes right behind its forward pass, in one
    piece."""


@dataclass
class Step:
    """The tensors of one walk through a plan."""

    batches: Sequence[Microbatch]
    loss: StepLoss
    loss_scale: Tensor | None
    """0-dim, in the dtype of the losses. None: no backward."""
    sums: Tensor
    """Sums over the microbatches that the last stage has computed: [Objective.length] fp64."""
    backward_comes_next: bool
    read_logits: ReadLogits | None = None
    """Reads the logits of the last stage; None: it adds up the loss."""
    receives: dict[tuple[Op, Key], p2p.Transfer] = field(default_factory=dict)
    sends: dict[tuple[Op, int], p2p.Transfer] = field(default_factory=dict)
    inputs: dict[Key, Tensor] = field(default_factory=dict)
    outputs: dict[Key, Tensor] = field(default_factory=dict)
    """The results of each stage. For the last stage these are logits, or the input of the head. The
    loss overwrites them by their gradient, with which the backward pass begins."""
    local: dict[tuple[Op, Key], Tensor] = field(default_factory=dict)
    """Tensors for a neighbouring stage of this process, which are passed without a message."""

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
        objective: Objective | None = None,
    ) -> None:
        """``objective`` is minimized; None: the mean loss of the target tokens."""
        self.stages = stages
        self.engine = engine
        self.mesh = mesh
        self.dtype = dtype
        self.objective: Objective = NextToken() if objective is None else objective
        self.sums = torch.zeros(self.objective.length, dtype=torch.float64, device=mesh.device)
        """Sums of the last step or evaluation of this objective, from which its ``means`` makes
        numbers. The same on all ranks, and overwritten by the next one."""
        self._config = config
        self._parallel = config.parallel
        self._partition = partition_of(config)
        self._plans: dict[tuple[bool, int], _RankPlan] = {}
        first = 0
        for stage in stages.values():
            # The engine counts the units of all stages of this process.
            stage.on_weight_access = partial(_access, engine, first)
            first += stage.units
        self._handlers: dict[Op, Callable[[Step, Key], None]] = {
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
        """Run every microbatch forward and backward; the engine reduces the gradients on the way.

        Returns the loss of the global batch, a 0-dim fp64 tensor, on every rank. ``sums`` and
        ``numbers`` are then those of this step."""
        sums, _ = self._sums(batches, self.objective, training=True)
        self.sums.copy_(sums)
        return sums[0]

    def evaluate(
        self, batches: Sequence[Microbatch], objective: Objective | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the same loss without backward, and its divisor, for example the number of target
        tokens: 0-dim fp64 each. ``sums`` and ``numbers`` are then those of this evaluation, unless
        it has another ``objective``."""
        with torch.no_grad():
            sums, weight = self._sums(batches, objective or self.objective, training=False)
        if objective is None:
            self.sums.copy_(sums)
        return sums[0], weight

    @property
    def numbers(self) -> Mapping[str, Tensor]:
        """The objective's numbers of the last step or evaluation beside the loss, 0-dim fp64
        each."""
        return self.objective.means(self.sums)

    def _sums(
        self, batches: Sequence[Microbatch], objective: Objective, *, training: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the sums over the global batch, and the divisor of the mean loss."""
        known = None
        preliminary = objective.preliminary(batches)
        if preliminary is not None:
            others, their_objective = preliminary
            with torch.no_grad():
                known, _ = self._run(
                    others, their_objective, None, training=False, preliminary=training
                )
        return self._run(batches, objective, known, training=training)

    def forward(self, batches: Sequence[Microbatch], read_logits: ReadLogits) -> None:
        """Run the stages forward, and give the logits of every microbatch to ``read_logits``, on
        the ranks of the last stage. All ranks give the same number of microbatches."""
        with torch.no_grad():
            self._run(batches, NextToken(), None, training=False, read_logits=read_logits)

    def _run(
        self,
        batches: Sequence[Microbatch],
        objective: Objective,
        known: Tensor | None,
        *,
        training: bool,
        preliminary: bool = False,
        read_logits: ReadLogits | None = None,
    ) -> tuple[Tensor, Tensor]:
        sums = torch.zeros(objective.length, dtype=torch.float64, device=self.mesh.device)
        loss_scale = None
        plan = self._plan(training, len(batches))
        if training:
            loss_scale = self.engine.begin_step(len(batches), plan.accesses)
            loss_scale = loss_scale.to(at_least_fp32(self.dtype))
        elif preliminary:
            self.engine.begin_preliminary(plan.accesses)
        else:
            self.engine.begin_evaluation(plan.accesses)
        # Before the first pass: a collective in between would wait for ranks that run their passes.
        loss = objective.begin(batches, self.mesh, known)
        step = Step(batches, loss, loss_scale, sums, plan.backward_comes_next, read_logits)
        recorder = self.mesh.recorder
        recorder.evaluating = not training
        for index, action in enumerate(plan.actions):
            recorder.enter(action, part=(action.op, action.stage, training))
            recorder.event(str(action))
            note = recorder.begin("action", action)
            self._handlers[action.op](step, Key(action.stage, action.microbatch))
            if note is not None:
                note.end()
            if index == plan.last_forward:
                # Now rather than at the end, so that no rank waits for it. The last stage of every
                # data-parallel replica has its part, and each tp rank has it once.
                total = sums / self.mesh.tp.size
                summing = all_reduce(total, self.mesh.world)
        # A buffer that is being sent may not be freed, and a step leaves no message under way.
        for transfer in step.sends.values():
            transfer.wait()
        summing.wait()
        if not training:
            recorder.enter("what follows the passes")
        return total, loss.weight

    def _plan(self, training: bool, microbatches: int) -> _RankPlan:
        key = (training, microbatches)
        if key not in self._plans:
            actions = self._schedule(training, microbatches).ranks[self.mesh.pp.rank]
            last_forward = max(
                index for index, action in enumerate(actions) if action.op is Op.FORWARD
            )
            accesses = rank_weight_accesses(self._config, actions, rank=self.mesh.pp.rank)
            last = self._partition.stages - 1
            # Kept, because the prefetcher recognises a list of accesses by its identity.
            self._plans[key] = _RankPlan(
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

    def _receive_forward(self, step: Step, key: Key) -> None:
        source = self._partition.placement[key.stage - 1]
        link = self.mesh.link(source, self.mesh.pp.rank, backward=False)
        step.receives[Op.FORWARD, key] = p2p.receive(self._empty(step, key), link, source)

    def _receive_backward(self, step: Step, key: Key) -> None:
        source = self._partition.placement[key.stage + 1]
        link = self.mesh.link(source, self.mesh.pp.rank, backward=True)
        step.receives[Op.BACKWARD, key] = p2p.receive(self._empty(step, key), link, source)

    def _empty(self, step: Step, key: Key) -> Tensor:
        """Return an empty tensor of the shape that is sent between stages: [s/cp or s/cp/tp, b,
        h]."""
        length, batch = step.batches[key.microbatch].tokens.shape
        length //= self.mesh.cp.size
        if self._parallel.sequence_parallel:
            length //= self.mesh.tp.size
        hidden = self.stages[key.stage].config.hidden_size
        return torch.empty(length, batch, hidden, dtype=self.dtype, device=self.mesh.device)

    def _arrived(self, step: Step, op: Op, key: Key) -> Tensor:
        """Return the input of a pass once it has arrived: received, or from the neighbouring stage
        of this process."""
        if (op, key) in step.receives:
            return step.receives.pop((op, key)).wait()
        return step.local.pop((op, key))

    def _forward(self, step: Step, key: Key) -> None:
        stage = self.stages[key.stage]
        batch = step.batches[key.microbatch].to(self.mesh.device)
        noise = None
        if stage.is_first:
            inputs = local_sequence(batch.tokens, self.mesh.cp)
            if step.training:
                noise = self._noise(batch, stage)
        else:
            # A leaf of this stage's graph: the stage before it needs its .grad.
            inputs = self._arrived(step, Op.FORWARD, key).requires_grad_(step.training)
        documents = None
        if batch.document_starts is not None and batch.document_bounds is not None:
            documents = Documents(batch.document_starts, batch.document_bounds)
        positions = stage.positions(
            batch.tokens.shape[0],
            self.mesh.device,
            batch.position_ids,
            batch.document_ids,
            documents,
        )
        in_chunks = self._in_chunks(stage, batch, step)
        output = stage(inputs, positions, noise, head=not in_chunks)

        next_is_here = key.stage + 1 in self.stages
        if stage.is_last and step.read_logits is not None:
            step.read_logits(stage, key.microbatch, batch, output)
        elif stage.is_last:
            self._add_loss(output, batch, step, in_chunks=in_chunks)
        elif next_is_here:
            # Detached: every stage has its own graph, whether the next stage is here or not.
            step.local[Op.FORWARD, key.next_stage] = output.detach()
        if step.training and not stage.is_first:  # token ids have no gradient
            step.inputs[key] = inputs
        if step.training or not (stage.is_last or next_is_here):
            step.outputs[key] = output

    def _noise(self, batch: Microbatch, stage: Stage) -> Tensor | None:
        """Return this rank's part of the noise of a batch, in the shape of its embeddings."""
        if batch.noise_scale is None:
            return None
        hidden = stage.config.hidden_size
        whole = uniform_noise(batch.noise_scale, batch.noise_seeds, hidden, self.dtype)
        noise = local_sequence(whole, self.mesh.cp)
        if self._parallel.sequence_parallel:
            return noise.chunk(self.mesh.tp.size)[self.mesh.tp.rank]
        return noise

    def _in_chunks(self, stage: Stage, batch: Microbatch, step: Step) -> bool:
        """Whether the logits of a batch are too many to exist at once, and may be computed chunk by
        chunk, which leaves their gradient in place of the head's input until the backward pass."""
        if not stage.is_last or step.read_logits is not None or stage.config.num_labels:
            return False
        if step.training and not step.backward_comes_next:
            return False
        logits = batch.labels.numel() // self.mesh.cp.size * stage.head_weight.shape[0]
        return logits > stage.options.head_chunk

    def _add_loss(self, output: Tensor, batch: Microbatch, step: Step, *, in_chunks: bool) -> None:
        """Add this microbatch's share of the loss of the global batch.

        In training ``output``, logits or the input of the head or scores, is overwritten by the
        gradient of that share times the loss scale."""
        stage = self.stages[self._partition.stages - 1]
        labels = local_sequence(batch.labels, self.mesh.cp)
        share = step.loss.microbatch(batch)
        weights: Tensor | TokenWeights | None = None
        if step.loss_scale is not None:
            # The weight of a token in the loss, which is also the factor of its gradient.
            weights = share.weights(step.loss_scale)
        z_weight = self._config.training.z_loss_weight
        if stage.config.num_labels:
            # An objective reads a score as it reads a log-probability elsewhere.
            losses = output.detach().neg()
            if weights is not None:
                by_loss = weights if isinstance(weights, Tensor) else weights(losses)
                output.detach().copy_(by_loss.neg())
        elif in_chunks:
            losses = stage.loss_in_chunks(output, labels, weights=weights, z_weight=z_weight)
        else:
            losses = cross_entropy(
                output,
                labels,
                self.mesh.tp,
                stage.config.vocab_size,
                weights=weights,
                z_weight=z_weight,
                ops=stage.options.ops,
            )
        step.sums += share.sums(losses)

    def _send_forward(self, step: Step, key: Key) -> None:
        output = step.outputs[key] if step.training else step.outputs.pop(key)
        to = self._partition.placement[key.stage + 1]
        self._send(step, Op.SEND_FORWARD, output.detach(), to)

    def _backward(self, step: Step, key: Key) -> None:
        stage = self.stages[key.stage]
        output = step.outputs.pop(key)
        grad = output.detach() if stage.is_last else self._arrived(step, Op.BACKWARD, key)
        # The first stage may have nothing to train; the others have a gradient to pass on.
        if output.requires_grad:
            backward(output, grad)
        if not stage.is_first and key.stage - 1 in self.stages:
            # No message: the previous stage is in this process. If it is not, the action
            # SEND_BACKWARD takes the gradient from ``inputs``.
            step.local[Op.BACKWARD, key.previous_stage] = _gradient(step.inputs.pop(key))

    def _backward_input(self, step: Step, key: Key) -> None:
        # The stage before waits for the gradient of the input, and no stage for that of a weight.
        self.engine.postpone_wgrads(key)
        self._backward(step, key)
        self.engine.postpone_wgrads(None)

    def _backward_weight(self, step: Step, key: Key) -> None:
        self.engine.run_wgrads(key)

    def _send_backward(self, step: Step, key: Key) -> None:
        to = self._partition.placement[key.stage - 1]
        self._send(step, Op.SEND_BACKWARD, _gradient(step.inputs.pop(key)), to)

    def _send(self, step: Step, op: Op, tensor: Tensor, to: int) -> None:
        """Send a tensor, and keep it until the next one goes over the same link.

        Sending waits until the receiver has taken the previous tensor. ``schedule/proof.py`` proves
        that this always ends."""
        if (op, to) in step.sends:
            step.sends.pop((op, to)).wait()
        # Each direction has a communicator: a GPU's runs one message at a time, and the two would
        # wait for each other.
        link = self.mesh.link(self.mesh.pp.rank, to, backward=op is Op.SEND_BACKWARD)
        step.sends[op, to] = p2p.send(tensor, link, to)


def _access(engine: Engine, first: int, unit: int, backward: bool) -> None:
    engine.access(first + unit, backward)


def _gradient(inputs: Tensor) -> Tensor:
    assert inputs.grad is not None
    return inputs.grad
