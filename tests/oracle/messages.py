"""Every message of a step, in integers: what a rank issues over each axis, as its recorder counts
it.

Tensor parallelism as in Shoeybi et al., 2019 (figure 4), sequence parallelism as in Korthikanti et
al., 2022 (section 4.2.2); what travels over the data-parallel axes is ``traffic.py``'s. For models
of which everything is trained.
"""

from __future__ import annotations

from collections import Counter
from math import ceil

from megatron_llama.config.schema import Config
from megatron_llama.engine.plan.buckets import BucketKind
from megatron_llama.model.plan.experts import is_sparse
from megatron_llama.model.plan.params import kv_copies, padded_vocab_size
from megatron_llama.pipeline.plan.traffic import StepTraffic
from megatron_llama.train.setup.memory import MemoryPlan

FP64 = 8
Messages = dict[tuple[str, str], tuple[int, int]]
"""(calls, bytes) by (axis, operation). Bytes are those of the full (gathered) tensor."""


def step_messages(config: Config, world_size: int, rank: int) -> Messages:
    """Of a pipeline rank in one step of many equal ones. ``config`` is resolved, with every
    ``auto`` decided."""
    found = _Step(config, MemoryPlan(config, world_size), rank, world_size)
    found.count()
    return found.messages


class _Step:
    """The count of one rank."""

    def __init__(self, config: Config, plan: MemoryPlan, rank: int, world_size: int) -> None:
        self.config = config
        self.plan = plan
        self.rank = rank
        self.world_size = world_size
        self.parallel = config.parallel
        self.shape = plan.shape
        self.partition = plan.partition
        self.stages = self.partition.stages_of(rank)
        self.blocks = sum(len(self.partition.layers[stage]) for stage in self.stages)
        self.first = 0 in self.stages
        self.last = self.partition.stages - 1 in self.stages
        self.copies = kv_copies(config.model, self.shape.tp)
        self.hidden = self.shape.tokens * config.model.hidden_size * self.shape.itemsize
        """Bytes of the residual stream of all tokens that tp ranks share."""
        self.again = 0
        """Blocks that are computed once more in backward."""
        layers = [self.partition.layers[stage] for stage in self.stages]
        if self.parallel.recompute_granularity == "full":
            self.again = sum(len(own[: plan.recompute_layers()]) for own in layers)
        sparse = [[is_sparse(config.model, layer) for layer in own] for own in layers]
        self.sparse = sum(map(sum, sparse))
        """Blocks with experts, and (``sparse_again``) those of them that are computed once more."""
        self.sparse_again = sum(sum(own[: plan.recompute_layers()]) for own in sparse) if self.again else 0
        self.calls = Counter[tuple[str, str]]()
        self.bytes = Counter[tuple[str, str]]()

    @property
    def messages(self) -> Messages:
        """What was counted."""
        return {kind: (calls, self.bytes[kind]) for kind, calls in self.calls.items() if calls}

    def add(self, axis: str, operation: str, size: int, calls: int = 1) -> None:
        """``calls`` messages of ``size`` bytes each."""
        self.calls[axis, operation] += calls
        self.bytes[axis, operation] += calls * size

    def count(self) -> None:
        """Everything in one step."""
        for _ in range(self.plan.schedule.microbatches):
            if self.shape.tp > 1:
                (self.sequence_parallel if self.parallel.sequence_parallel else self.tensor_parallel)()
                self.cross_entropy()
            if self.shape.cp > 1:
                self.context_parallel()
            if self.parallel.expert_model_parallel_size > 1:
                self.dispatch()
            if self.config.training.moe_router_load_balancing_type == "seq_aux_loss":
                self.count_tokens()
            self.pipeline()
        self.data_parallel()
        self.norm()

    def tensor_parallel(self) -> None:
        """Two sums a block forward, two backward, also where keys and values have a weight of their
        own; the embedding's forward, the head's backward. A block that is computed again also
        gathers its input, of which each rank kept a part."""
        calls = 4 * self.blocks + 2 * self.again + self.first + self.last
        self.add("tp", "all_reduce", self.hidden, calls)
        self.cut("all_reduce", 2 * (self.blocks + self.again), rows=self.rows)
        if self.shape.tokens * self.config.model.hidden_size % self.shape.tp == 0:
            self.add("tp", "all_gather", self.hidden, self.again)

    def sequence_parallel(self) -> None:
        """Forward a gather before and a scatter after each half block; backward their conjugates,
        and the input gathered again for the weight gradient. The input of a head in chunks is there
        anyway."""
        head = 1 if self.plan.in_chunks else 2
        # Experts are the half of a block without messages over tp.
        halves, again = 2 * self.blocks - self.sparse, 2 * self.again - self.sparse_again
        self.add("tp", "all_gather", self.hidden, 3 * halves + again + self.first + head * self.last)
        self.add("tp", "reduce_scatter", self.hidden, 2 * halves + again + self.first + self.last)
        # Forward both are in pieces, and backward the gradient of a row-parallel layer's outputs.
        self.cut("all_gather", 4 * self.blocks + 2 * self.again, rows=self.rows // self.shape.tp)
        self.cut("reduce_scatter", 2 * (self.blocks + self.again), rows=self.rows // self.shape.tp)

    @property
    def rows(self) -> int:
        """Rows of the residual stream of a microbatch, each of all its samples."""
        return self.config.training.seq_length // self.shape.cp

    def cut(self, operation: str, messages: int, *, rows: int) -> None:
        """So many messages are sent in pieces of some rows each: as many bytes."""
        pieces = self.parallel.tp_comm_overlap
        if pieces != "0":
            self.calls["tp", operation] += messages * (min(int(pieces), rows) - 1)

    def cross_entropy(self) -> None:
        """Of every token the maximum, then the sum and the target's score; chunk by chunk, where
        the head is."""
        if not self.last:
            return
        rows = self.shape.tokens
        columns = padded_vocab_size(self.config.model, self.shape.tp) // self.shape.tp
        fit = max(1, self.shape.head_chunk // columns)
        chunks = ceil(rows / (fit - fit % 256 if fit >= 256 else fit)) if self.plan.in_chunks else 1
        self.calls["tp", "all_reduce"] += 2 * chunks
        self.bytes["tp", "all_reduce"] += 3 * rows * self.shape.fp32_itemsize

    def context_parallel(self) -> None:
        """Keys and values travel forward and again backward, then their gradients, in fp32: in one
        message each, or around the ring. Where heads are exchanged for the sequence: queries, keys
        and values in one message and outputs in another, and backward the gradients of both; then
        there is a ring of those ranks that have the same heads."""
        model = self.config.model
        cp = self.shape.cp
        axis = "cp"
        keys = model.num_key_value_heads * self.copies // self.shape.tp
        elements = 2 * self.shape.tokens * keys * model.head_dim
        if self.parallel.cp_comm_type.startswith("a2a"):
            exchanging = (*self.parallel.hierarchical_context_parallel_sizes, cp)[0]
            queries = model.num_attention_heads // self.shape.tp
            each = queries // exchanging
            needed = [len({query * keys // queries for query in range(rank * each, (rank + 1) * each)}) for rank in range(exchanging)]
            name = "cp_heads" if exchanging < cp else "cp"
            token = self.shape.tokens * model.head_dim * self.shape.itemsize
            for heads in (queries + 2 * sum(needed), queries):
                self.add(name, "all_to_all", token * heads, 2 * self.blocks + self.again)
            if exchanging == cp:
                return
            axis, cp = "cp_keys", cp // exchanging
            elements = 2 * self.shape.tokens * exchanging * needed[0] * model.head_dim
        values = elements * self.shape.itemsize
        gradients = elements * self.shape.fp32_itemsize
        passes = 2 * self.blocks + self.again
        if self.parallel.cp_comm_type == "all_gather":
            self.add("cp", "all_gather", cp * values, passes)
            self.add("cp", "reduce_scatter", cp * gradients, self.blocks)
            return
        for operation in ("send", "receive"):
            self.add(axis, operation, values, passes * (cp - 1))
            self.add(axis, operation, gradients, self.blocks * (cp - 1))

    def dispatch(self) -> None:
        """Of the tokens of all ranks that divide the experts: forward they are gathered, and their experts with weights in one message, and
        outputs are summed; backward the conjugates of these, and the tokens gathered again. Experts travel as wide as weights."""
        model = self.config.model
        tokens = self.parallel.expert_model_parallel_size * self.shape.tokens
        tokens //= self.shape.tp if self.parallel.sequence_parallel else 1
        stream = tokens * model.hidden_size * self.shape.itemsize
        weights = tokens * model.num_experts_per_tok * self.shape.fp32_itemsize
        forward, backward = self.sparse + self.sparse_again, self.sparse
        if self.parallel.moe_token_dispatcher_type == "alltoall":
            self.exchange(tokens // self.parallel.expert_model_parallel_size, forward, backward)
            return
        self.add("ep", "all_gather", stream, forward + 2 * backward)
        self.add("ep", "all_gather", 2 * weights, forward)
        self.add("ep", "reduce_scatter", stream, forward + backward)
        self.add("ep", "reduce_scatter", weights, backward)

    def exchange(self, tokens: int, forward: int, backward: int) -> None:
        """Of those ``tokens`` of a rank for which a rank has experts, if each has its experts by chance and all alike: forward counts, experts
        with weights, tokens, outputs; backward the conjugates of the last three, and the tokens again where a block's inner activations
        are."""
        model, ep = self.config.model, self.parallel.expert_model_parallel_size
        missed = 1.0
        for taken in range(model.num_experts_per_tok):
            missed *= 1 - model.num_experts / ep / (model.num_experts - taken)
        rows = ep * round(tokens * (1 - missed))
        stream, weights = rows * model.hidden_size * self.shape.itemsize, rows * model.num_experts_per_tok * self.shape.fp32_itemsize
        selective = self.parallel.recompute_granularity == "selective"
        again = sum(sum(is_sparse(self.config.model, layer) for layer in self.partition.layers[stage][: self.plan.recompute_layers()]) for stage in self.stages)
        self.add("ep", "all_to_all", 16 * ep, forward)
        self.add("ep", "all_to_all", 2 * weights, forward)
        self.add("ep", "all_to_all", stream, 2 * forward + 2 * backward + again * selective)
        self.add("ep", "all_to_all", weights, backward)

    def count_tokens(self) -> None:
        """The tokens of each expert in each sequence, as int32, wherever a router chooses: over tp and over cp, which split sequences."""
        size = self.config.training.micro_batch_size * self.config.model.num_experts * 4
        for axis, ranks in (("tp", self.shape.tp), ("cp", self.shape.cp)):
            self.add(axis, "all_reduce", size, (self.sparse + self.sparse_again) * (ranks > 1))

    def pipeline(self) -> None:
        """One activation and one gradient over every boundary between stages of different ranks;
        apart from the others where virtual stages lead from a later rank to an earlier one."""
        placement = self.partition.placement
        size = self.shape.hidden
        for stage in self.stages:
            if stage + 1 < self.partition.stages and placement[stage + 1] != self.rank:
                suffix = "" if placement[stage + 1] > self.rank else "_return"
                self.add(f"pp{suffix}", "send", size)
                self.add(f"pp_backward{suffix}", "receive", size)
            if stage > 0 and placement[stage - 1] != self.rank:
                suffix = "" if placement[stage - 1] < self.rank else "_return"
                self.add(f"pp{suffix}", "receive", size)
                self.add(f"pp_backward{suffix}", "send", size)

    def data_parallel(self) -> None:
        """Reductions and gathers of buckets; sums of shards over replicas."""
        traffic = self.plan.traffic(self.rank)
        layout = self.plan.bucket_plans[self.rank]
        if traffic.experts is not None:
            self._data_parallel("expert_dp", traffic.experts, sum(bucket.kind.trainable and bucket.kind.ep > 1 for bucket in layout.buckets))
        self._data_parallel("dp", traffic, sum(bucket.kind.trainable and bucket.kind.ep == 1 for bucket in layout.buckets))

    def _data_parallel(self, name: str, traffic: StepTraffic, trained: int) -> None:
        if traffic.shards > 1:
            axis = name if traffic.replicas == 1 else f"{name}_shard"
            self.calls[axis, "reduce_scatter"] += traffic.reductions
            self.bytes[axis, "reduce_scatter"] += traffic.reduction_bytes
            self.calls[f"{name}_gather", "all_gather"] += traffic.gathers
            self.bytes[f"{name}_gather", "all_gather"] += traffic.gather_bytes
        if traffic.replicas > 1:
            axis = name if traffic.shards == 1 else f"{name}_replica"
            self.calls[axis, "all_reduce"] += trained
            self.bytes[axis, "all_reduce"] += traffic.replica_bytes

    def norm(self) -> None:
        """Loss, and of each block with experts two losses and the tokens of each expert; norm with
        vetoes; both over everyone. Reduced shards of copies that saw a part; the count of tokens
        that are not masked."""
        if self.world_size > 1:
            model = self.config.model
            routers = sum(is_sparse(model, layer) for layer in range(model.num_hidden_layers))
            self.add("world", "all_reduce", FP64 * (1 + routers * (2 + model.num_experts)))
            self.add("world", "all_reduce", 2 * FP64)
        layout = self.plan.bucket_plans[self.rank]
        for bucket in layout.buckets:
            shard = layout.shard_numel(bucket.index) * self.shape.fp32_itemsize
            if bucket.kind.partial_grad:
                self.add(self._copies_axis(bucket.kind), "all_reduce", shard)
            if bucket.kind.tied:
                self.add("embedding", "all_reduce", shard)
        traffic = self.plan.traffic(self.rank)
        if self.config.data.eod_mask_loss and traffic.shards * traffic.replicas > 1:
            self.add("dp", "all_reduce", FP64)

    def _copies_axis(self, kind: BucketKind) -> str:
        return "tp" if kind.copies == self.shape.tp else "kv"
