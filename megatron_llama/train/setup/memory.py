"""Memory of every process of a run, computed from the plans that the run executes: the permanent
state, and the activations that come and go with the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_llama.config.schema import Config
from megatron_llama.config.world import dp_size
from megatron_llama.engine.options import EIGHT_BIT, FP32, SCHEDULE_FREE
from megatron_llama.engine.plan.limits import UPDATE_PIECE, chunk_problem
from megatron_llama.engine.plan.memory import (
    host_buffer_bytes,
    moment_names,
    planned_muon,
    squares_bytes,
    staging_bytes,
    state_bytes,
)
from megatron_llama.engine.plan.offload import OffloadPlan, offload_plan
from megatron_llama.model.plan.activation_memory import Activations
from megatron_llama.model.plan.chunks import HEAD_CHUNK, Granularity
from megatron_llama.model.plan.params import partition_of
from megatron_llama.pipeline.plan.run_engine import engine_options, rank_bucket_plan
from megatron_llama.pipeline.plan.traffic import StepTraffic, step_traffic
from megatron_llama.schedule import Action, Op, backward_comes_next, schedule_named

IN_BYTES = 6
"""Elements in fp32, or as many bytes, for each element of a piece during the quantization of a
moment to 8 bits."""
USABLE = 0.9
"""The share of a device's memory that ``auto`` fills. The rest is for the driver's context,
communicators and the gaps between allocations."""


def peak_of(
    actions: Iterable[Action],
    kept: Sequence[int],
    postponed: Sequence[int],
    message: int = 0,
    placement: Sequence[int] = (),
) -> int:
    """Return the most bytes that a rank holds while it walks ``actions``.

    A microbatch at stage s keeps ``kept[s]`` from its forward pass to its backward pass, and, if
    the backward pass is split, ``postponed[s]`` from there to its weight gradients. ``message`` is
    the size of a tensor that crosses stages; ``placement`` has the rank of each stage."""
    live = peak = 0
    transit = _Transit(message, placement)
    for action in actions:
        live += transit.step(action)
        if action.op is Op.FORWARD:
            live += kept[action.stage]
        elif action.op is Op.BACKWARD:
            live -= kept[action.stage]
        elif action.op is Op.BACKWARD_INPUT:
            live += postponed[action.stage] - kept[action.stage]
        elif action.op is Op.BACKWARD_WEIGHT:
            live -= postponed[action.stage]
        peak = max(peak, live)
    return peak


class _Transit:
    """Tensors between stages that no pass keeps: those received and not read yet, and gradients
    that are being sent. Forward messages are kept by the pass that made them."""

    def __init__(self, message: int, placement: Sequence[int]) -> None:
        self._message = message
        self._placement = placement
        self._received = set[tuple[bool, int, int]]()
        """(forward, stage, microbatch) of tensors that have arrived and are unread."""
        self._sent = set[int]()
        """Ranks that have been sent a gradient: a link keeps one until it takes the next."""
        self._made = set[tuple[int, int]]()
        """(stage, microbatch) whose input gradient was computed and not passed on."""

    def step(self, action: Action) -> int:
        """Return the change of the bytes in transit by ``action``."""
        op = action.op
        stage = action.stage
        microbatch = action.microbatch
        if op in (Op.RECV_FORWARD, Op.RECV_BACKWARD):
            self._received.add((op is Op.RECV_FORWARD, stage, microbatch))
            return self._message
        if op is Op.SEND_BACKWARD:
            to = self._placement[stage - 1] if self._placement else stage - 1
            before = to in self._sent
            self._sent.add(to)
            self._made.discard((stage, microbatch))
            return -self._message * before
        if op not in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT):
            return 0
        arrived = (op is Op.FORWARD, stage, microbatch)
        change = -self._message * (arrived in self._received)
        self._received.discard(arrived)
        if op is not Op.FORWARD:
            # This pass consumes the gradient of the next stage, if that is on this rank, and the
            # output that belongs to it, and makes a gradient for the stage before. If that stage is
            # on this rank, its output is held as long as the gradient: two messages.
            change -= 2 * self._message * ((stage + 1, microbatch) in self._made)
            self._made.discard((stage + 1, microbatch))
            if stage > 0:
                self._made.add((stage, microbatch))
                change += self._message * (2 if self._here(stage - 1, stage) else 1)
        return change

    def _here(self, stage: int, neighbour: int) -> bool:
        return bool(self._placement) and self._placement[stage] == self._placement[neighbour]


class MemoryPlan:
    """Memory of all ranks of a resolved configuration whose vocabulary is known. All numbers are
    bytes."""

    def __init__(self, config: Config, world_size: int, *, head_chunk: int = HEAD_CHUNK) -> None:
        """``head_chunk``: logits that the last stage holds at once."""
        parallel = config.parallel
        training = config.training
        self.config = config
        self.options = engine_options(config)
        self.partition = partition_of(config)
        self.shape = replace(Activations.from_config(config), head_chunk=head_chunk)
        dp = dp_size(config, world_size)
        ranks = parallel.pipeline_model_parallel_size
        self.schedule = schedule_named(
            parallel.pipeline_schedule,
            ranks=ranks,
            microbatches=training.global_batch_size // (training.micro_batch_size * dp),
            virtual=parallel.virtual_pipeline_model_parallel_size,
        )
        last = self.partition.stages - 1
        self.in_chunks = self.shape.exceeds_head_chunk and backward_comes_next(
            self.schedule.ranks[self.partition.placement[last]], last
        )
        """Whether the last stage never holds the logits of all tokens of a microbatch."""
        self._tp = parallel.tensor_model_parallel_size
        self._data = dp * parallel.context_parallel_size
        self.bucket_plans = [
            rank_bucket_plan(config, dp=self._data, rank=rank) for rank in range(ranks)
        ]
        self.largest_stage = max(len(layers) for layers in self.partition.layers)

    def recompute_layers(self) -> int:
        """Blocks of each stage that --recompute-num-layers asks for; ``auto`` counts as all."""
        wanted = self.config.parallel.recompute_num_layers
        return int(wanted) if wanted.isdecimal() else self.largest_stage

    def kept(self, stage: int, granularity: Granularity, recomputing: int) -> int:
        """Return the bytes that autograd keeps of one microbatch at one stage."""
        layers = self.partition.layers[stage]
        return self.shape.stage(
            layers, granularity, recomputing, **self._ends(stage), in_chunks=self.in_chunks
        )

    def kept_by_blocks(self, stage: int, granularity: Granularity, recomputing: int) -> int:
        """Return the bytes of ``kept`` that belong to the blocks."""
        layers = self.partition.layers[stage]
        return self.shape.stage(layers, granularity, recomputing, first=False, last=False)

    def microbatch(self, rank: int, granularity: Granularity, recomputing: int) -> int:
        """Return the bytes that autograd keeps of one microbatch in all stages of a pipeline
        rank."""
        return sum(
            self.kept(stage, granularity, recomputing) for stage in self.partition.stages_of(rank)
        )

    def in_flight(self, rank: int) -> float:
        """Return the most microbatches (no bytes) that a pipeline rank holds; one in a single chunk
        counts as a fraction."""
        ones = [1] * self.partition.stages
        return peak_of(self.schedule.ranks[rank], ones, ones) / self.schedule.virtual

    def activations(self, rank: int, granularity: Granularity, recomputing: int) -> int:
        """Return the peak of everything but the state: the bytes between two actions with the
        working memory of a pass, or the working memory of the update, if that is more."""
        muon = planned_muon(self.options, self.bucket_plans[rank], tp=self._tp)
        graphs = 0
        if self.config.training.cuda_graph_scope == "block":
            from megatron_llama.train.setup.graph_memory import graph_bytes

            graphs = graph_bytes(self, rank, granularity, recomputing)
        return graphs + max(
            self.between(rank, granularity, recomputing)
            + self._working(rank, granularity, recomputing),
            0 if muon is None else muon.working_bytes,
            self.update_bytes(rank),
        )

    def update_bytes(self, rank: int) -> int:
        """Return the extra bytes of an update by torch's operators, one piece at a time: moments in
        fp32 that are kept in fewer bits, and their results. Triton's kernels, on a GPU, need
        none."""
        names = moment_names(self.options)
        wide = sum(name != FP32 for name in names) + IN_BYTES * (EIGHT_BIT in names)
        if self.options.rule == SCHEDULE_FREE:
            wide = 1
        fp32 = self.options.master_itemsize
        bucket_plan = self.bucket_plans[rank]
        shards = (
            bucket_plan.shard_numel(bucket.index)
            for bucket in bucket_plan.buckets
            if bucket.kind.trainable
        )
        return wide * fp32 * min(UPDATE_PIECE, max(shards, default=0))

    def between(self, rank: int, granularity: Granularity, recomputing: int) -> int:
        """Return the most bytes between two actions beside the state: those that autograd and the
        runtime keep, and messages."""
        stages = range(self.partition.stages)
        kept = [
            self.kept(stage, granularity, recomputing)
            + self._boundary(stage, granularity, recomputing)
            for stage in stages
        ]
        postponed = [self._postponed(stage, granularity, recomputing) for stage in stages]
        return peak_of(
            self.schedule.ranks[rank], kept, postponed, self.shape.hidden, self.partition.placement
        )

    def state_by_component(self, rank: int) -> dict[str, int]:
        """Return the bytes that the engine and the layers of a rank hold on a device, by
        component."""
        components = state_bytes(self.options, self.bucket_plans[rank], tp=self._tp)
        if self.config.training.fp8 != "none":
            from megatron_llama.model.plan.fp8 import weight_code_bytes

            codes = weight_code_bytes(self.config, self.bucket_plans[rank])
            components["weight codes in FP8"] = codes
        return components

    def state(self, rank: int) -> int:
        """Return the bytes of parameters, gradients and optimizer of a rank on a device, and of the
        buffers of its messages."""
        return sum(self.state_by_component(rank).values()) + self.staging(rank)

    def staging(self, rank: int) -> int:
        """Return the bytes in which a rank on a device casts its gradients on their way."""
        return staging_bytes(self.options, self.bucket_plans[rank], dp=self._data)

    def offload(self, rank: int) -> OffloadPlan | None:
        """Return the plan of an optimizer in the host's memory; None if it stays on the device."""
        return offload_plan(self.options, self.bucket_plans[rank])

    def offloaded(self) -> int:
        """Return the most host memory that the offloaded optimizer of one process needs."""
        return max(
            plan.held if plan is not None else 0
            for plan in map(self.offload, range(len(self.bucket_plans)))
        )

    def host_buffers(self, rank: int) -> int:
        """Return the bytes of the receive buffers of a rank on a CPU."""
        return host_buffer_bytes(self.options, self.bucket_plans[rank], dp=self._data)

    def logits(self, rank: int) -> int:
        """Return the part of a rank's activations that is logits of all tokens of a microbatch; 0
        if they are computed in chunks."""
        return (
            self.shape.logits if self.partition.placement[-1] == rank and not self.in_chunks else 0
        )

    def chunk_problem(self) -> str | None:
        """Return the problem of --exchange-chunk-bytes if this run is on CPUs."""
        return chunk_problem(self.options, self.bucket_plans, dp=self._data)

    def traffic(self, rank: int) -> StepTraffic:
        """Return the traffic of a step of this pipeline rank to its data-parallel peers."""
        return step_traffic(self.config, self.schedule, dp=self._data, rank=rank)

    def needed(self, granularity: Granularity, recomputing: int) -> int:
        """Return state and activations of the process that needs most."""
        ranks = range(len(self.bucket_plans))
        return max(
            self.state(rank) + self.activations(rank, granularity, recomputing) for rank in ranks
        )

    def _ends(self, stage: int) -> dict[str, bool]:
        return {"first": stage == 0, "last": stage == self.partition.stages - 1}

    def _postponed(self, stage: int, granularity: Granularity, recomputing: int) -> int:
        layers = self.partition.layers[stage]
        return self.shape.postponed_stage(layers, granularity, recomputing, **self._ends(stage))

    def _boundary(self, stage: int, granularity: Granularity, recomputing: int) -> int:
        """Return the bytes of a stage's input and output that the runtime holds until its backward
        pass: the output, unless the next stage is on this rank and keeps it as its input; and a
        received input of which the first block keeps only 1/tp."""
        placement = self.partition.placement
        shape = self.shape
        sent = stage + 1 < self.partition.stages and placement[stage + 1] != placement[stage]
        divided = (
            stage > 0
            and granularity == "full"
            and recomputing > 0
            and shape.block("full") < shape.hidden
        )
        return (sent + divided) * shape.hidden

    def _working(self, rank: int, granularity: Granularity, recomputing: int) -> int:
        """Return the working memory of a pass when most is kept, and of the gradient's norm."""
        stages = self.partition.stages_of(rank)
        # Blocks that recompute are the first of a stage. If not all do, a block that keeps
        # everything has been freed before one is computed again, so recomputing does not add to the
        # peak.
        recomputes = any(0 < len(self.partition.layers[stage]) <= recomputing for stage in stages)
        recomputed = granularity if recomputes else "none"
        blocks = self.shape.gradients(recomputed)
        if self.config.training.fp8 != "none":
            from megatron_llama.model.plan.fp8 import gradients_in_fp8

            layers = [layer for stage in stages for layer in self.partition.layers[stage]]
            blocks = gradients_in_fp8(self.config, self.shape, recomputed, layers)
        last = self.partition.stages - 1 in stages
        return max(
            blocks, self.shape.loss(in_chunks=self.in_chunks) if last else 0
        ) + squares_bytes(self.options, self.bucket_plans[rank])
