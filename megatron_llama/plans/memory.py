"""Memory of every process of a run, computed from the plans that the run executes: the state that
stays, and the activations that come and go with the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_llama.config.schema import Config
from megatron_llama.config.world import dp_size
from megatron_llama.errors import describe
from megatron_llama.plans.activation_memory import HEAD_CHUNK, Activations, Granularity
from megatron_llama.plans.buckets import (
    ALIGN,
    MAX_PIECES,
    REDUCTIONS_IN_FLIGHT,
    STAGED_REDUCTIONS,
    BucketKind,
    BucketPlan,
    align_up,
    rank_bucket_plan,
    strategy_named,
)
from megatron_llama.plans.itemsize import (
    BF16,
    EIGHT_BIT,
    FP32,
    compute_itemsize,
    fp32_itemsize,
    reduce_itemsize,
)
from megatron_llama.plans.muon import MuonPlan, muon_plan
from megatron_llama.plans.offload import ZENFLOW, OffloadPlan, offload_plan
from megatron_llama.plans.params import MUON, SCHEDULE_FREE, partition_of
from megatron_llama.plans.schedule import Action, Op, backward_comes_next, schedule_named
from megatron_llama.plans.traffic import StepTraffic, step_traffic

SCALARS = 8 * 2 + 4 + 4 * 3
"""Bytes of the numbers that an engine has once: the squared norm of all gradients and how many
ranks ask to skip a step, both in fp64, a scale of 1, and the loss scale with its two counters."""
SCALARS_OF_A_BUCKET = 8
"""Bytes of a bucket's squared norm, in fp64."""
STEP_COUNT = 4
"""Bytes of the count of a bucket's updates, in fp32."""
SCALE = 4
"""Bytes of the scale of a block of a moment in 8 bits, in fp32."""
TABLES = 2 * (256 * 4 + 2**16) + ALIGN * 8
"""Bytes of what all moments in 8 bits share."""
WEIGHT_SUM = 8
"""Bytes of the sum of weights of schedule-free AdamW's average, in fp64."""
UPDATE_PIECE = 1 << 20
"""Elements that an update takes at a time where it needs memory besides, outside kernels. It cuts
no SIMD vector."""
IN_BYTES = 6
"""Elements in fp32, or as many bytes, that exist for each element of a piece while a moment is
quantized to 8 bits."""
USABLE = 0.9
"""The share of a device's memory that ``auto`` fills. The rest is for the driver's context,
communicators and the gaps between allocations."""


def state_bytes(
    config: Config, bucket_plan: BucketPlan, *, shard_rank: int = 0, find_unused: bool = False
) -> dict[str, int]:
    """Bytes that one process holds on the device throughout a run, by component, as the engine
    allocates them. What is offloaded to the host is not counted, and neither is what messages need
    besides (``staging_bytes``, ``host_buffer_bytes``). ``shard_rank``: see ``offload_plan``;
    ``find_unused``: whether ranks may leave out different parameters, so that whole gradients
    accumulate in their slots until the end of the step."""
    itemsize = compute_itemsize(config)
    fp32 = fp32_itemsize(config)
    trainable = [bucket.index for bucket in bucket_plan.buckets if bucket.kind.trainable]
    trained = sum(map(bucket_plan.shard_numel, trainable))
    offload = offload_plan(config, bucket_plan, shard_rank=shard_rank)
    offloaded = offload.buckets if offload is not None else ()
    updated = [bucket for bucket in trainable if bucket not in offloaded]
    # Of buckets that are updated on the host, ZenFlow counts the updates on the device too.
    counted = len(trainable)
    muon = _muon_plan(config, bucket_plan)
    averages = config.optimizer.optimizer == SCHEDULE_FREE
    is_zenflow = config.offload.optimizer_offload == ZENFLOW
    if not is_zenflow:
        counted -= len(offloaded)
    apart = sum(
        bucket_plan.shard_numel(bucket.index)
        for bucket in bucket_plan.buckets
        if not bucket_plan.has_own_slot(bucket.index)
    )
    slots = sum(bucket_plan.gradient_slot_numel().values())
    return {
        "parameters": sum(bucket_plan.parameter_slot_numel().values()) * itemsize,
        "parameter shards": apart * itemsize,
        "gradients": (slots + (trained if _has_gradient_shards(config, find_unused) else 0)) * fp32,
        # In fp32 the shard itself is the master copy, unless the model is trained with others.
        "master weights": sum(map(bucket_plan.shard_numel, updated)) * fp32
        if itemsize != fp32 or averages
        else 0,
        "moments": sum(
            bucket_plan.shard_numel(bucket)
            // ALIGN
            * _moment_bytes(config, bucket_plan.buckets[bucket].kind)
            for bucket in updated
        ),
        "scalars": SCALARS
        + SCALARS_OF_A_BUCKET * len(bucket_plan.buckets)
        + (STEP_COUNT + averages * WEIGHT_SUM) * counted,
        **(
            {"hot columns": offload.on_device, "column numbers": offload.column_numbers}
            if offload is not None and is_zenflow
            else {}
        ),
        **({"update buffers": muon.buffer_bytes} if muon is not None else {}),
        **({"update buffers": TABLES} if EIGHT_BIT in _moment_names(config) else {}),
    }


def _moment_bytes(config: Config, kind: BucketKind) -> int:
    """Bytes that the optimizer keeps of ALIGN elements of a bucket beside their masters."""
    if kind.muon:
        return ALIGN * fp32_itemsize(config)
    if config.optimizer.optimizer == SCHEDULE_FREE:
        return 2 * ALIGN * fp32_itemsize(config)
    return sum(_kept_bytes(config, name, kind) for name in _moment_names(config))


def keeps_fp32(kind: BucketKind) -> bool:
    """Whether moments that are in 8 bits elsewhere are in fp32 in a bucket: norms and biases are
    small together, and have no rows to cut into blocks."""
    return kind.resident


def _moment_names(config: Config) -> tuple[str, str]:
    return config.optimizer.exp_avg_dtype, config.optimizer.exp_avg_sq_dtype


def _kept_bytes(config: Config, name: str, kind: BucketKind) -> int:
    """Bytes of ALIGN elements of a moment."""
    if name == BF16:
        return 2 * ALIGN
    if name == EIGHT_BIT and not keeps_fp32(kind):
        return ALIGN + SCALE
    return fp32_itemsize(config) * ALIGN


def _muon_plan(config: Config, bucket_plan: BucketPlan) -> MuonPlan | None:
    """Returns whose matrices Muon orthogonalises; None where there is no Muon."""
    if config.optimizer.optimizer != MUON:
        return None
    return muon_plan(bucket_plan, tp=config.parallel.tensor_model_parallel_size)


def _has_gradient_shards(config: Config, find_unused: bool) -> bool:
    """Whether reduced gradients have memory of their own, in which microbatches accumulate; else
    they are a part of the slot."""
    strategy = strategy_named(config.parallel.data_parallel_sharding_strategy)
    return strategy.reduce_every_microbatch and not find_unused


def staging_bytes(
    config: Config, bucket_plan: BucketPlan, *, dp: int, find_unused: bool = False
) -> int:
    """Bytes of the buffers in which a device casts gradients to the dtype in which they travel,
    where that is not their own; they come on top of ``state_bytes``. ``dp``: data-parallel ranks,
    context-parallel ones included; ``find_unused``: see there."""
    wire = reduce_itemsize(config)
    trained = [bucket.numel for bucket in bucket_plan.buckets if bucket.kind.trainable]
    if wire == fp32_itemsize(config) or not trained:
        return 0
    shards = bucket_plan.shards
    replicas = dp // shards
    buffers = min(STAGED_REDUCTIONS, len(bucket_plan.gradient_slot_numel()))
    largest = max(trained)
    if shards == 1 and not _has_gradient_shards(config, find_unused):
        return buffers * largest * wire if replicas > 1 else 0
    scattered = buffers * largest * wire if shards > 1 else 0
    return scattered + (largest // shards * wire if replicas > 1 else 0)


def host_buffer_bytes(config: Config, bucket_plan: BucketPlan, *, dp: int) -> int:
    """Bytes of the buffers in which gloo receives gradients, and of casts to the dtype in which
    they are sent; they come on top of ``state_bytes``, on a host, where there is nothing else that
    is staged. A GPU's backend has buffers of its own.
    ``dp``: data-parallel ranks, context-parallel ones included."""
    fp32 = fp32_itemsize(config)
    wire = reduce_itemsize(config)
    cast = wire < fp32
    trained = [bucket.numel for bucket in bucket_plan.buckets if bucket.kind.trainable]
    shards = bucket_plan.shards
    replicas = dp // shards
    total = 0
    if shards > 1:
        largest = max(trained, default=0)
        part = -(-largest // shards)
        each = (shards - 1) * part * wire + cast * (largest * wire + part * fp32)
        total += min(REDUCTIONS_IN_FLIGHT, len(bucket_plan.gradient_slot_numel())) * each
    if replicas > 1:
        for numel in trained:
            part = align_up(-(-numel // shards // replicas), ALIGN)
            total += (replicas - 1) * part * wire + cast * (
                numel // shards * wire + 2 * part * fp32
            )
    return total


def squares_bytes(config: Config, bucket_plan: BucketPlan) -> int:
    """Bytes of the largest tensor that the engine allocates for the gradient's norm: one number for
    every ALIGN elements of a shard."""
    shards = (
        bucket_plan.shard_numel(bucket.index)
        for bucket in bucket_plan.buckets
        if bucket.kind.trainable
    )
    return max(shards, default=0) // ALIGN * fp32_itemsize(config)


def least_chunk_bytes(config: Config, bucket_plan: BucketPlan, *, dp: int) -> int:
    """The smallest ``--exchange-chunk-bytes`` with which no message is cut into more than
    MAX_PIECES."""
    itemsize = compute_itemsize(config)
    wire = reduce_itemsize(config)
    replicas = dp // bucket_plan.shards
    messages = [(0, 1)]
    for bucket in bucket_plan.buckets:
        shard = bucket_plan.shard_numel(bucket.index)
        if bucket_plan.shards > 1:
            messages += [(shard, itemsize), (shard * bucket.kind.trainable, wire)]
        if replicas > 1 and bucket.kind.trainable:
            messages.append((min(shard, align_up(-(-shard // replicas), ALIGN)), wire))
    pieces = [(-(-numel // MAX_PIECES), size) for numel, size in messages]
    # A piece has one element at least, so no limit is too small for messages of MAX_PIECES
    # elements.
    return max(elements * size if elements > 1 else 1 for elements, size in pieces)


def chunk_problem(config: Config, bucket_plans: Iterable[BucketPlan], *, dp: int) -> str | None:
    """What is wrong with ``--exchange-chunk-bytes`` where the backend is gloo; None if nothing is.
    ``bucket_plans``: those of all pipeline ranks."""
    given = config.parallel.exchange_chunk_bytes
    least = max(least_chunk_bytes(config, bucket_plan, dp=dp) for bucket_plan in bucket_plans)
    if given >= least:
        return None
    expected = f"at least {least}, which cuts the largest message into {MAX_PIECES} pieces"
    return describe(
        "--exchange-chunk-bytes", got=given, expected=expected, do="give more or leave it out"
    )


def peak_of(
    actions: Iterable[Action],
    kept: Sequence[int],
    postponed: Sequence[int],
    message: int = 0,
    placement: Sequence[int] = (),
) -> int:
    """Most bytes that a rank holds while it walks ``actions``.

    A microbatch at stage s keeps ``kept[s]`` from its forward pass to its backward pass, and, if
    the backward pass is split, ``postponed[s]`` from there to its weight gradients. ``message`` is
    the size of a tensor that crosses stages; ``placement`` says which stages are on one rank."""
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
    that are being sent. What is sent forward is kept by the pass that made it."""

    def __init__(self, message: int, placement: Sequence[int]) -> None:
        self._message = message
        self._placement = placement
        self._received = set[tuple[bool, int, int]]()
        """(forward, stage, microbatch) of what has arrived and was not read."""
        self._sent = set[int]()
        """Ranks that have been sent a gradient: a link keeps one until it takes the next."""
        self._made = set[tuple[int, int]]()
        """(stage, microbatch) whose input gradient was computed and not handed on."""

    def step(self, action: Action) -> int:
        """Return by how many bytes ``action`` changes what is in transit."""
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
            # This pass consumes the gradient of the next stage if that one is on this rank,
            # together with the output that the gradient belongs to, and makes one for the stage
            # before. If that stage is on this rank, its output is held as long as the gradient: two
            # messages.
            change -= 2 * self._message * ((stage + 1, microbatch) in self._made)
            self._made.discard((stage + 1, microbatch))
            if stage > 0:
                self._made.add((stage, microbatch))
                change += self._message * (2 if self._here(stage - 1, stage) else 1)
        return change

    def _here(self, stage: int, other: int) -> bool:
        return bool(self._placement) and self._placement[stage] == self._placement[other]


class MemoryPlan:
    """Memory of all ranks of a resolved configuration whose vocabulary is known. All numbers are
    bytes."""

    def __init__(self, config: Config, world_size: int, *, head_chunk: int = HEAD_CHUNK) -> None:
        """``head_chunk``: logits that the last stage holds at once."""
        parallel = config.parallel
        training = config.training
        self.config = config
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
        """What autograd keeps of one microbatch at one stage."""
        blocks = len(self.partition.layers[stage])
        return self.shape.stage(
            blocks,
            granularity,
            min(recomputing, blocks),
            **self._ends(stage),
            in_chunks=self.in_chunks,
        )

    def microbatch(self, rank: int, granularity: Granularity, recomputing: int) -> int:
        """What autograd keeps of one microbatch in all stages of a pipeline rank."""
        return sum(
            self.kept(stage, granularity, recomputing) for stage in self.partition.stages_of(rank)
        )

    def in_flight(self, rank: int) -> float:
        """The most microbatches (no bytes) that a pipeline rank holds; a chunk of it counts as a
        fraction."""
        ones = [1] * self.partition.stages
        return peak_of(self.schedule.ranks[rank], ones, ones) / self.schedule.virtual

    def activations(self, rank: int, granularity: Granularity, recomputing: int) -> int:
        """The peak of everything that is not state: what lies between two actions, and the working
        memory of a pass; or the working memory of the update, if that is more."""
        muon = _muon_plan(self.config, self.bucket_plans[rank])
        return max(
            self.between(rank, granularity, recomputing)
            + self._working(rank, granularity, recomputing),
            0 if muon is None else muon.working_bytes,
            self.update_bytes(rank),
        )

    def update_bytes(self, rank: int) -> int:
        """What an update by torch's operators needs besides, for a piece at a time: moments in fp32
        that are kept in fewer bits, and what becomes of them. Triton's kernels, on a GPU, need none
        of it."""
        names = _moment_names(self.config)
        wide = sum(name != FP32 for name in names) + IN_BYTES * (EIGHT_BIT in names)
        if self.config.optimizer.optimizer == SCHEDULE_FREE:
            wide = 1
        fp32 = fp32_itemsize(self.config)
        bucket_plan = self.bucket_plans[rank]
        shards = (
            bucket_plan.shard_numel(bucket.index)
            for bucket in bucket_plan.buckets
            if bucket.kind.trainable
        )
        return wide * fp32 * min(UPDATE_PIECE, max(shards, default=0))

    def between(self, rank: int, granularity: Granularity, recomputing: int) -> int:
        """The most that exists between two actions besides the state: what autograd and the runtime
        keep, and messages."""
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

    def state(self, rank: int) -> int:
        """Parameters, gradients and optimizer of a rank on a device, and what its messages need
        besides."""
        state = state_bytes(self.config, self.bucket_plans[rank])
        return sum(state.values()) + self.staging(rank)

    def staging(self, rank: int) -> int:
        """What a rank on a device casts its gradients in on their way."""
        return staging_bytes(self.config, self.bucket_plans[rank], dp=self._data)

    def offload(self, rank: int) -> OffloadPlan | None:
        """The plan of an optimizer in the host's memory; None where it stays on the device."""
        return offload_plan(self.config, self.bucket_plans[rank])

    def offloaded(self) -> int:
        """Host memory that the offloaded optimizer of one process needs at most."""
        return max(
            plan.held if plan is not None else 0
            for plan in map(self.offload, range(len(self.bucket_plans)))
        )

    def host_buffers(self, rank: int) -> int:
        """Receive buffers of a rank on a CPU."""
        return host_buffer_bytes(self.config, self.bucket_plans[rank], dp=self._data)

    def logits(self, rank: int) -> int:
        """The part of a rank's activations that is logits of all tokens of a microbatch: nothing
        where they are computed in chunks."""
        return (
            self.shape.logits if self.partition.placement[-1] == rank and not self.in_chunks else 0
        )

    def chunk_problem(self) -> str | None:
        """What is wrong with --exchange-chunk-bytes if this run is on CPUs."""
        return chunk_problem(self.config, self.bucket_plans, dp=self._data)

    def traffic(self, rank: int) -> StepTraffic:
        """What a step of this pipeline rank sends to its data-parallel peers."""
        return step_traffic(self.config, self.schedule, dp=self._data, rank=rank)

    def needed(self, granularity: Granularity, recomputing: int) -> int:
        """State and activations of the process that needs most."""
        ranks = range(len(self.bucket_plans))
        return max(
            self.state(rank) + self.activations(rank, granularity, recomputing) for rank in ranks
        )

    def _ends(self, stage: int) -> dict[str, bool]:
        return {"first": stage == 0, "last": stage == self.partition.stages - 1}

    def _postponed(self, stage: int, granularity: Granularity, recomputing: int) -> int:
        blocks = len(self.partition.layers[stage])
        return self.shape.postponed_stage(
            blocks, granularity, min(recomputing, blocks), **self._ends(stage)
        )

    def _boundary(self, stage: int, granularity: Granularity, recomputing: int) -> int:
        """What the runtime holds of a stage's input and output until its backward pass: the output,
        unless the next stage is on this rank and keeps it as its input; and a received input of
        which the first block keeps only 1/tp."""
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
        """The working memory of a pass at the moment at which most is kept, and of the gradient's
        norm."""
        stages = self.partition.stages_of(rank)
        # Blocks that recompute are the first of a stage. If not all do, a block that keeps
        # everything has been freed before one is computed again, so recomputing does not add to the
        # peak.
        recomputes = any(0 < len(self.partition.layers[stage]) <= recomputing for stage in stages)
        blocks = self.shape.gradients(granularity if recomputes else "none")
        last = self.partition.stages - 1 in stages
        return max(
            blocks, self.shape.loss(in_chunks=self.in_chunks) if last else 0
        ) + squares_bytes(self.config, self.bucket_plans[rank])


def sized(size: int) -> str:
    """Bytes for people, in the unit that fits."""
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    if size >= 2**20:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / 2**10:.1f} KiB" if size >= 2**10 else f"{size} B"
