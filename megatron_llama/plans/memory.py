"""Memory of every process of a run, from the plans that the run uses: state, and activations over
the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_llama.config.schema import Config
from megatron_llama.config.world import dp_size
from megatron_llama.errors import describe
from megatron_llama.plans.activation_memory import (
    HEAD_CHUNK,
    Activations,
    Granularity,
    compute_bytes,
)
from megatron_llama.plans.buckets import (
    ALIGN,
    PIECES,
    REDUCTIONS_IN_FLIGHT,
    BucketPlan,
    align_up,
    rank_bucket_plan,
    strategy_named,
)
from megatron_llama.plans.offload import OffloadPlan, offload_plan
from megatron_llama.plans.params import partition_of
from megatron_llama.plans.schedule import Action, Op, backward_comes_next, schedule_named
from megatron_llama.plans.traffic import StepTraffic, step_traffic

USABLE = 0.9
"""Of the device's memory: the rest is for the driver's context, communicators and the gaps between
allocations."""


def state_bytes(config: Config, layout: BucketPlan) -> dict[str, int]:
    """Persistent bytes of one process, by component, as the engine allocates them on the device:
    without what is offloaded."""
    strategy = strategy_named(config.parallel.data_parallel_sharding_strategy)
    narrow = compute_bytes(config)
    wide = max(narrow, 4)
    trained = sum(
        layout.shard_numel(bucket.index) for bucket in layout.buckets if bucket.kind.trainable
    )
    offload = offload_plan(config, layout)
    updated = trained - (
        sum(map(layout.shard_numel, offload.buckets)) if offload is not None else 0
    )
    apart = sum(
        layout.shard_numel(bucket.index)
        for bucket in layout.buckets
        if not layout.stays_unsharded(bucket.index)
    )
    slots = sum(layout.gradient_slot_numel().values())
    return {
        "parameters": sum(layout.parameter_slot_numel().values()) * narrow,
        "parameter shards": apart * narrow,
        "gradients": slots * wide + (trained * wide if strategy.reduce_every_microbatch else 0),
        "master weights": updated * wide if narrow != wide else 0,
        "moments": 2 * updated * wide,
        **({"hot columns": offload.on_device} if offload is not None and offload.on_device else {}),
    }


def host_buffer_bytes(config: Config, layout: BucketPlan, *, dp: int) -> int:
    """What gradients need on their way where the backend is gloo, beside ``state_bytes``: receive
    buffers, and casts to a narrower wire. A GPU's backend has its own. ``dp``: data-parallel ranks,
    context-parallel ones included."""
    wide = max(compute_bytes(config), 4)
    wire = 2 if config.parallel.grad_reduce_in_bf16 else wide
    trained = [bucket.numel for bucket in layout.buckets if bucket.kind.trainable]
    narrow = wire < wide
    size = layout.shards
    replicas = dp // layout.shards
    total = 0
    if size > 1:
        largest = max(trained, default=0)
        part = -(-largest // size)
        each = (size - 1) * part * wire + narrow * (largest * wire + part * wide)
        total += min(REDUCTIONS_IN_FLIGHT, len(layout.gradient_slot_numel())) * each
    if replicas > 1:
        for numel in trained:
            part = align_up(-(-numel // size // replicas), ALIGN)
            total += (replicas - 1) * part * wire + narrow * (
                numel // size * wire + 2 * part * wide
            )
    return total


def squares_bytes(config: Config, layout: BucketPlan) -> int:
    """The largest tensor that the engine allocates for the gradient's norm: of one shard a number
    for every ALIGN elements."""
    shards = (
        layout.shard_numel(bucket.index) for bucket in layout.buckets if bucket.kind.trainable
    )
    return max(shards, default=0) // ALIGN * max(compute_bytes(config), 4)


def least_chunk_bytes(config: Config, layout: BucketPlan, *, dp: int) -> int:
    """The smallest ``--exchange-chunk-bytes`` that cuts no message of a layout into more than
    PIECES."""
    narrow = compute_bytes(config)
    wire = 2 if config.parallel.grad_reduce_in_bf16 else max(narrow, 4)
    replicas = dp // layout.shards
    messages = [(0, 1)]
    for bucket in layout.buckets:
        shard = layout.shard_numel(bucket.index)
        if layout.shards > 1:
            messages += [(shard, narrow), (shard * bucket.kind.trainable, wire)]
        if replicas > 1 and bucket.kind.trainable:
            messages.append((min(shard, align_up(-(-shard // replicas), ALIGN)), wire))
    pieces = [(-(-numel // PIECES), itemsize) for numel, itemsize in messages]
    return max(
        elements * itemsize if elements > 1 else 1 for elements, itemsize in pieces
    )  # a piece has one element at least


def chunk_problem(config: Config, layouts: Iterable[BucketPlan], *, dp: int) -> str | None:
    """What is wrong with ``--exchange-chunk-bytes`` for the layouts of all pipeline ranks, where
    the backend is gloo."""
    given = config.parallel.exchange_chunk_bytes
    least = max(least_chunk_bytes(config, layout, dp=dp) for layout in layouts)
    if given >= least:
        return None
    expected = f"at least {least}, which cuts the largest message into {PIECES} pieces"
    return describe(
        "--exchange-chunk-bytes", got=given, expected=expected, do="give more or leave it out"
    )


def peak_of(
    actions: Iterable[Action],
    kept: Sequence[int],
    deferred: Sequence[int],
    message: int = 0,
    placement: Sequence[int] = (),
) -> int:
    """Most bytes that a rank holds: a microbatch at stage s keeps ``kept[s]`` from its forward pass
    to its backward pass, and ``deferred[s]`` from there to its weight gradients if the pass is
    split. ``message``: of what crosses stages, on its way to the ranks in ``placement``."""
    live = peak = 0
    transit = _Transit(message, placement)
    for action in actions:
        live += transit.step(action)
        if action.op is Op.FORWARD:
            live += kept[action.stage]
        elif action.op is Op.BACKWARD:
            live -= kept[action.stage]
        elif action.op is Op.BACKWARD_INPUT:
            live += deferred[action.stage] - kept[action.stage]
        elif action.op is Op.BACKWARD_WEIGHT:
            live -= deferred[action.stage]
        peak = max(peak, live)
    return peak


class _Transit:
    """What lies between stages and is nobody's activation: received and not read yet, or a gradient
    until its link has taken the next. What is sent forward is kept by the pass that made it."""

    def __init__(self, message: int, placement: Sequence[int]) -> None:
        self._message = message
        self._placement = placement
        self._received = set[tuple[bool, int, int]]()
        self._sent = set[int]()
        self._made = set[tuple[int, int]]()

    def step(self, action: Action) -> int:
        """By how many bytes an action changes it."""
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
            # From the next stage of this rank, or for the one before, which has its output until
            # then if it is here too.
            change -= 2 * self._message * ((stage + 1, microbatch) in self._made)
            self._made.discard((stage + 1, microbatch))
            if stage > 0:
                self._made.add((stage, microbatch))
                change += self._message * (2 if self._here(stage - 1, stage) else 1)
        return change

    def _here(self, stage: int, other: int) -> bool:
        return bool(self._placement) and self._placement[stage] == self._placement[other]


class MemoryPlan:
    """Memory of the ranks of a resolved configuration with a known vocabulary."""

    def __init__(self, config: Config, world_size: int, *, head_chunk: int = HEAD_CHUNK) -> None:
        """``head_chunk``: see there."""
        parallel = config.parallel
        training = config.training
        self.config = config
        self.partition = partition_of(config)
        self.shape = replace(Activations.of(config), head_chunk=head_chunk)
        dp = dp_size(config, world_size)
        ranks = parallel.pipeline_model_parallel_size
        self.schedule = schedule_named(
            parallel.pipeline_schedule,
            ranks=ranks,
            microbatches=training.global_batch_size // (training.micro_batch_size * dp),
            virtual=parallel.virtual_pipeline_model_parallel_size,
        )
        last = self.partition.stages - 1
        self.in_chunks = self.shape.many_scores and backward_comes_next(
            self.schedule.ranks[self.partition.placement[last]], last
        )
        """Whether the last stage never holds the scores of all tokens of a microbatch."""
        self._data = dp * parallel.context_parallel_size
        self.layouts = [rank_bucket_plan(config, dp=self._data, rank=rank) for rank in range(ranks)]
        self.largest_stage = max(len(layers) for layers in self.partition.layers)

    def chosen(self) -> int:
        """Blocks of each stage that recompute by the configuration (``auto`` counts as all)."""
        wanted = self.config.parallel.recompute_num_layers
        return int(wanted) if wanted.isdecimal() else self.largest_stage

    def kept(self, stage: int, granularity: Granularity, recomputing: int) -> int:
        """Bytes that autograd keeps of one microbatch at one stage."""
        blocks = len(self.partition.layers[stage])
        return self.shape.stage(
            blocks,
            granularity,
            min(recomputing, blocks),
            **self._ends(stage),
            in_chunks=self.in_chunks,
        )

    def microbatch(self, rank: int, granularity: Granularity, recomputing: int) -> int:
        """Bytes of one microbatch in all stages of a pipeline rank."""
        return sum(
            self.kept(stage, granularity, recomputing) for stage in self.partition.stages_of(rank)
        )

    def in_flight(self, rank: int) -> float:
        """Most microbatches a pipeline rank holds; one chunk of several is a fraction of one."""
        ones = [1] * self.partition.stages
        return peak_of(self.schedule.ranks[rank], ones, ones) / self.schedule.virtual

    def activations(self, rank: int, granularity: Granularity, recomputing: int) -> int:
        """Peak of what is neither state nor saved by nobody: ``between``, and the working memory of
        a pass."""
        return self.between(rank, granularity, recomputing) + self._working(
            rank, granularity, recomputing
        )

    def between(self, rank: int, granularity: Granularity, recomputing: int) -> int:
        """Most bytes beside the state that are there between two actions: kept by autograd and by
        the runtime, and messages."""
        stages = range(self.partition.stages)
        kept = [
            self.kept(stage, granularity, recomputing)
            + self._boundary(stage, granularity, recomputing)
            for stage in stages
        ]
        deferred = [self._deferred(stage, granularity, recomputing) for stage in stages]
        return peak_of(
            self.schedule.ranks[rank], kept, deferred, self.shape.hidden, self.partition.placement
        )

    def state(self, rank: int) -> int:
        """Parameters, gradients, optimizer."""
        return sum(state_bytes(self.config, self.layouts[rank]).values())

    def offload(self, rank: int) -> OffloadPlan | None:
        """What the optimizer takes of the host's memory, and moves; None where it stays on the
        device."""
        return offload_plan(self.config, self.layouts[rank])

    def offloaded(self) -> int:
        """Bytes of host memory of the process that needs most."""
        return max(
            plan.held if plan is not None else 0
            for plan in map(self.offload, range(len(self.layouts)))
        )

    def host_buffers(self, rank: int) -> int:
        """Bytes of receive buffers on a CPU."""
        return host_buffer_bytes(self.config, self.layouts[rank], dp=self._data)

    def logits(self, rank: int) -> int:
        """Of its activations those bytes that are scores of all tokens of a microbatch: none where
        they are made in chunks."""
        return (
            self.shape.logits if self.partition.placement[-1] == rank and not self.in_chunks else 0
        )

    def chunk_problem(self) -> str | None:
        """See the function, for the whole run on CPUs."""
        return chunk_problem(self.config, self.layouts, dp=self._data)

    def traffic(self, rank: int) -> StepTraffic:
        """What a step of this pipeline rank sends to its data-parallel peers."""
        return step_traffic(self.config, self.schedule, dp=self._data, rank=rank)

    def needed(self, granularity: Granularity, recomputing: int) -> int:
        """Bytes of the process that needs most."""
        ranks = range(len(self.layouts))
        return max(
            self.state(rank) + self.activations(rank, granularity, recomputing) for rank in ranks
        )

    def _ends(self, stage: int) -> dict[str, bool]:
        return {"first": stage == 0, "last": stage == self.partition.stages - 1}

    def _deferred(self, stage: int, granularity: Granularity, recomputing: int) -> int:
        blocks = len(self.partition.layers[stage])
        return self.shape.deferred_stage(
            blocks, granularity, min(recomputing, blocks), **self._ends(stage)
        )

    def _boundary(self, stage: int, granularity: Granularity, recomputing: int) -> int:
        """What the runtime holds of a stage's ends until its backward pass: the output, unless it
        is the input of the next stage here; and a received input of which the first block keeps
        only this rank's part."""
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
        """Of a pass, at the moment at which most is kept, or of the gradient's norm, of which a
        shard's parts are there at once.

        Blocks that recompute are the first of a stage: if not all do, another one has been
        forgotten before one is computed again."""
        stages = self.partition.stages_of(rank)
        again = any(0 < len(self.partition.layers[stage]) <= recomputing for stage in stages)
        blocks = self.shape.gradients(granularity if again else "none")
        last = self.partition.stages - 1 in stages
        return max(
            blocks, self.shape.loss(in_chunks=self.in_chunks) if last else 0
        ) + squares_bytes(self.config, self.layouts[rank])


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
