"""The work of one optimizer step in integers: the products and messages of each rank, without any
speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal

from megatron_llama.config.schema import Config, LoraConfig, ModelConfig
from megatron_llama.engine.offload_options import EXACT, NONE
from megatron_llama.engine.plan.buckets import strategy_named
from megatron_llama.engine.plan.head_exchange import exchanged_heads, sent_key_heads
from megatron_llama.engine.plan.specs import ParamSpec
from megatron_llama.engine.plan.zenflow import longest_window, sends_fp32
from megatron_llama.model.plan.fp8 import (
    NO_SCALES,
    ScaleMessages,
    fp8_layers,
    gathers_codes,
    scale_messages,
)
from megatron_llama.model.plan.itemsize import compute_itemsize
from megatron_llama.model.plan.params import Shapes, stage_units, whole_model
from megatron_llama.model.plan.pieces import chosen_pieces
from megatron_llama.model.plan.run_params import trained_units
from megatron_llama.pipeline.plan.run_engine import parameter_slots, shard_count
from megatron_llama.planner.hardware import Gpu
from megatron_llama.schedule import SCHEDULES

if TYPE_CHECKING:  # of few models, and it imports this module
    from megatron_llama.planner.expert_work import ExpertWork

Sharding = Literal["none", "optimizer", "gradients", "parameters"]
"""State of which data-parallel ranks hold a share, in any trainer."""
Attention = Literal["flash", "flash1", "triton", "fused", "plain"]
"""Flash attention 2; flash attention 1; flash attention in Triton; scores written to memory with
one kernel for the softmax; scores written to memory with a kernel for each operation."""


@dataclass(frozen=True)
class Matmul:
    """A matrix product of [m, k] with [k, n]: one pass of one weight."""

    m: int
    n: int
    k: int

    @cached_property
    def flops(self) -> int:
        """Number of multiplications and additions."""
        return 2 * self.m * self.n * self.k

    @cached_property
    def elements(self) -> int:
        """Fewest elements that have to be read or written."""
        return self.m * self.n + self.n * self.k + self.m * self.k


@dataclass(frozen=True)
class Machine:
    """The GPUs of a run and the links between them."""

    gpu: Gpu
    gpus: int
    node: int
    """GPUs in a node."""
    domain: int
    """GPUs joined by NVLink."""
    nic: float
    """Bytes per second between nodes, per GPU and direction."""


@dataclass(frozen=True)
class TrainerTraits:
    """Differences between two trainers that run the same layout. The defaults are this trainer's.

    All plans use the defaults. But the coefficients were fitted to published runs of other
    trainers, and hold only in the formulas of that fit: each trait is one factor or term of such a
    formula (``kernels.py``, ``steps.py``, ``footprint.py``). The traits of other trainers are in
    ``tools/planner_eval/published.py``."""

    family: str = "torchtitan"
    """Family of the code. Each family has one factor on the time of its kernels. This trainer uses
    torch's kernels, so they are timed like torchtitan's."""
    attention: Attention = "flash"
    fused_norms: bool = True
    compiled: bool = False
    overlap_data: bool = True
    """Whether gradients travel during the backward pass, and parameters during the forward pass."""
    reduces_every_microbatch: bool = True
    """Whether sharded gradients are reduced after each microbatch, even with pipeline stages."""
    overlap_tensor: bool = False
    gradient_bytes: int = 4
    """Bytes of a gradient's element between data-parallel ranks."""
    wide_context_gradients: bool = True
    """Whether gradients of keys and values travel between cp ranks in at least fp32."""
    gated: bool = True
    """Whether the MLP has a gate."""
    biased: bool = False
    """Whether linear layers and norms have biases."""
    learned_positions: bool = False
    dropout: bool = False
    norm_bytes: float = 0.0
    """Bytes that norms keep for an element of the residual stream in addition to their inputs."""
    score_bytes: float = 5.0
    """Bytes that attention keeps for each score, if it writes scores."""
    logit_bytes: float = 6.0
    """Bytes that the loss holds for a logit at its peak."""
    whole_logits: bool = False
    """Whether every tp rank holds the logits of the whole vocabulary."""
    kept_gradient_bytes: int = 4
    state_bytes: int = 12
    """Bytes of the optimizer for a parameter: the fp32 master and two moments."""
    packed: bool = False
    """Whether sequences are packed from short examples, each with its own attention."""


@dataclass(frozen=True)
class HostOptimizer:
    """The part of the optimizer that is in the host's memory."""

    share: float
    """Share of the trained elements that the host updates."""
    down: int
    """Bytes of a gradient's element that is copied to the host, in every step."""
    up: int
    """Bytes of a weight's element that is copied back, after every update."""
    during_backward: bool
    """Whether a bucket is updated when its gradients arrive, before the norm of all is known."""
    interval: int = 1
    """Steps from one update to the next."""
    overlapped: bool = False
    """Whether the update is computed while the next steps run."""


@dataclass(frozen=True)
class TrainedShare:
    """The part of a model that is trained."""

    frozen: float = 0.0
    """Share of the products' FLOPs with frozen weights, which have no weight gradients."""
    head_frozen: bool = False
    share: float = 1.0
    """Share of a rank's elements that are trained."""
    additions: tuple[tuple[int, int], ...] = ()
    """(outputs, inputs) of each low-rank addition of a block."""


@dataclass(frozen=True)
class TrainingJob:
    """One step of one run."""

    model: ModelConfig
    machine: Machine
    traits: TrainerTraits
    seq: int
    micro_batch: int
    microbatches: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    head_ranks: int = 0
    """Context-parallel ranks that exchange the sequence for heads."""
    dp: int = 1
    sequence_parallel: bool = False
    tensor_pieces: int = 1
    """Pieces of a message over tp that are hidden under products, as this trainer does it."""
    recomputed: float = 0.0
    """Share of the blocks' forward pass that backward recomputes."""
    selective: float = 0.0
    """Share of the blocks whose backward pass repeats a part of the forward pass in addition to
    ``recomputed`` (``Kernels.selective``)."""
    last_stage_lacks: int = 0
    """Number of blocks that the last stage has fewer than the others."""
    ends_counted: bool = False
    """Whether embedding and head count as one block each when stages divide the blocks."""
    bubble: float = 1.0
    """Share of the idle time of 1F1B that remains. Weight gradients fill the rest."""
    recomputes_scores: bool = False
    """Whether backward recomputes the attention scores and nothing else."""
    sharding: Sharding = "optimizer"
    shards: int = 1
    """Ranks that divide the sharded state."""
    precision: str = "bf16"
    narrow: float = 1.0
    """Share of the blocks whose products are in ``precision``; the others are in 16 bits."""
    narrow_experts: float = 1.0
    """The same of the blocks with experts."""
    narrow_ends: float = 1.0
    """The same of the blocks of the first and of the last pipeline rank."""
    tensor_scales: ScaleMessages = NO_SCALES
    """Messages over tp about the scales of a block in ``precision``."""
    context_scales: ScaleMessages = NO_SCALES
    """The same over cp."""
    gathers_codes: bool = False
    """Whether such a block gathers its inputs over tp in 8 bits."""
    codes_again: bool = False
    """Whether weights are converted in each pass of a microbatch, since blocks take turns in the
    memory for them, and not once for each update."""
    itemsize: int = 2
    """Bytes of an activation's or weight's element in computation."""
    trained: TrainedShare = TrainedShare()
    offload: HostOptimizer | None = None
    graphs: bool = False
    """Whether the passes of blocks run as graphs."""
    sparse: float = 0.0
    """Share of the blocks that have experts in the place of an MLP."""
    experts: ExpertWork | None = None
    """The work of such a block."""

    @property
    def ep(self) -> int:
        """Data-parallel ranks that divide experts among them."""
        return 1 if self.experts is None else self.experts.ranks

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one rank."""
        return self.micro_batch * self.seq // self.cp

    @property
    def stream(self) -> float:
        """Bytes of the residual stream of one microbatch, over all tp ranks."""
        return float(self.itemsize * self.tokens * self.model.hidden_size)

    @property
    def stage_message(self) -> float:
        """Bytes that a rank sends to the next stage for one microbatch."""
        return self.stream / (self.tp if self.sequence_parallel else 1)

    @property
    def total_tokens(self) -> int:
        """Tokens of a whole step."""
        return self.micro_batch * self.microbatches * self.dp * self.seq

    @cached_property
    def weights(self) -> tuple[ParamSpec, ...]:
        """The parameters of one block without experts of a rank, as this trainer builds them."""
        model = replace(self.model, num_experts=0) if self.model.num_experts else self.model
        return Shapes(model, self.tp, 0, self.sequence_parallel).block(0).params

    @cached_property
    def matmuls(self) -> tuple[Matmul, ...]:
        """Forward products with the weights of one block without experts, for one microbatch."""
        return self._products(self.weights)

    @cached_property
    def mlp(self) -> tuple[Matmul, ...]:
        """Those of ``matmuls`` that a block with experts does not have."""
        return self._products(self._mlp_weights)

    @cached_property
    def attention(self) -> tuple[Matmul, ...]:
        """Those of ``matmuls`` that it has."""
        return self._products([spec for spec in self.weights if ".mlp." not in spec.name])

    @property
    def narrow_sparse(self) -> float:
        """Share of all blocks that have experts and whose products are in ``precision``."""
        return self.sparse * self.narrow_experts

    @property
    def narrow_dense(self) -> float:
        """Share of the blocks without experts whose products are in ``precision``."""
        dense = 1.0 - self.sparse
        return min(1.0, max(0.0, self.narrow - self.narrow_sparse) / dense) if dense else 0.0

    @property
    def code_elements(self) -> float:
        """Elements of the matrices of a block that are in ``precision``, as the mean of such blocks
        with and without experts."""
        dense = sum(product.n * product.k for product in self.matmuls)
        if self.experts is None or not self.narrow:
            return dense
        mlp = sum(product.n * product.k for product in self.mlp)
        shared = sum(product.n * product.k for product in self.experts.shared)
        share = self.narrow_sparse / self.narrow
        return dense + share * (self.experts.numel + shared - mlp)

    @property
    def _mlp_weights(self) -> list[ParamSpec]:
        return [spec for spec in self.weights if ".mlp." in spec.name]

    def _products(self, weights: Sequence[ParamSpec]) -> tuple[Matmul, ...]:
        return tuple(
            Matmul(self.tokens, self._rows(spec), spec.shape[1])
            for spec in weights
            if len(spec.shape) > 1
        )

    @cached_property
    def additions(self) -> tuple[Matmul, ...]:
        """Forward products with the low-rank additions of one block."""
        return tuple(
            Matmul(self.tokens, outputs, inputs) for outputs, inputs in self.trained.additions
        )

    def _rows(self, spec: ParamSpec) -> int:
        ungated = not self.traits.gated and "gate_up" in spec.name
        return spec.shape[0] // 2 if ungated else spec.shape[0]

    @cached_property
    def head(self) -> Matmul:
        """Forward product with the output head, or with the score head of a reward model."""
        if self.model.num_labels:
            return Matmul(self.tokens, self.model.num_labels, self.model.hidden_size)
        return Matmul(self.tokens, self.table_rows, self.model.hidden_size)

    @cached_property
    def table_rows(self) -> int:
        """Vocabulary rows of a rank, padding included."""
        spec = Shapes(self.model, self.tp).embedding(tied=False, contributions=1).params[0]
        return spec.shape[0]

    @cached_property
    def block_numel(self) -> int:
        """Elements of the weights of one block on one rank, as the mean of blocks with and without
        experts."""
        dense = sum(self._rows(spec) * spec.width for spec in self.weights)
        if self.experts is None:
            return dense
        mlp = sum(self._rows(spec) * spec.width for spec in self._mlp_weights)
        own = self.experts.numel + self.experts.others_numel
        return round(dense + self.sparse * (own - mlp))

    def expert_numel(self, layers: float) -> float:
        """Return the elements of a rank's experts in so many blocks."""
        return 0.0 if self.experts is None else layers * self.sparse * self.experts.numel

    @property
    def expert_shards(self) -> int:
        """Ranks that divide the sharded state of experts."""
        return max(1, self.shards // self.ep)

    def sharded_numel(self, numel: float, experts: float) -> float:
        """Return the elements of a shard of ``numel``, of which ``experts`` are those of
        experts."""
        if self.sharding == "none":
            return numel
        return (numel - experts) / self.shards + experts / self.expert_shards

    @property
    def matrix_numel(self) -> int:
        """Elements of all blocks and of the head that a token meets, over all tp ranks."""
        blocks = self.block_numel * self.model.num_hidden_layers
        if self.experts is not None:
            from megatron_llama.model.plan.experts import elements_in_place_of_mlps

            dense = replace(self, sparse=0.0, experts=None).block_numel
            blocks = dense * self.model.num_hidden_layers
            blocks += elements_in_place_of_mlps(self.model) // self.tp
        return (blocks + self.head.n * self.head.k) * self.tp

    @property
    def queries(self) -> int:
        """Width of all query heads of one rank."""
        return self.model.num_attention_heads * self.model.head_dim // self.tp

    @property
    def _heads(self) -> tuple[int, int]:
        """Query heads of a rank, and its key/value heads."""
        queries, keys = self.model.num_attention_heads, self.model.num_key_value_heads
        return queries // self.tp, keys // min(self.tp, keys)

    @property
    def key_heads(self) -> int:
        """Key/value heads of one rank that travel between cp ranks: after an exchange of the
        sequence for heads, those of its queries."""
        keys = self._heads[1]
        ranks = self.head_ranks
        return len(sent_key_heads(*self._heads, ranks)) // ranks if ranks else keys

    @property
    def exchanged(self) -> tuple[int, int]:
        """Bytes of a rank's exchanges of sequence for heads in one block, before attention and
        behind it, its own parts included."""
        if not self.head_ranks:
            return 0, 0
        width = self.itemsize * self.tokens * self.model.head_dim
        return exchanged_heads(*self._heads, self.head_ranks) * width, self._heads[0] * width

    @property
    def logits(self) -> int:
        """Number of logits of a microbatch that a rank holds."""
        return self.tokens * self.head.n * (self.tp if self.traits.whole_logits else 1)

    @property
    def ends(self) -> int:
        """Number of vocabulary tables: embedding and head, which may be tied."""
        return 1 if self.model.tie_word_embeddings or self.model.num_labels else 2

    @cached_property
    def rank_numel(self) -> int:
        """Weight elements of the rank that has most."""
        tables = self.ends if self.pp == 1 else 1
        return self._most_layers * self.block_numel + tables * self.table_rows * self.head.k

    @property
    def rank_expert_numel(self) -> float:
        """Those of them that are experts'."""
        return self.expert_numel(self._most_layers)

    @property
    def _most_layers(self) -> int:
        return -(-self.model.num_hidden_layers // self.pp)


def job_of(config: Config, machine: Machine) -> TrainingJob:
    """Return the work of a step of this trainer with a resolved configuration."""
    parallel = config.parallel
    training = config.training
    model = config.model
    schedule = parallel.pipeline_schedule
    tp = parallel.tensor_model_parallel_size
    pp = parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    vpp = parallel.virtual_pipeline_model_parallel_size
    dp = machine.gpus // (tp * pp * cp)
    strategy = strategy_named(parallel.data_parallel_sharding_strategy)
    slots = parameter_slots(parallel)
    sharding: Sharding = "none"
    if strategy.sharded and strategy.by_unit:
        sharding = "parameters"
    elif strategy.sharded:
        sharding = "gradients" if strategy.reduce_every_microbatch else "optimizer"
    itemsize = compute_itemsize(config)
    layers = model.num_hidden_layers
    narrow = fp8_layers(config)
    folded = pp == 1 or SCHEDULES[schedule].folded
    # A rank that has both ends, or one of the two.
    at_end = (1 + folded) * training.fp8_bf16_layers * pp / layers
    scales = scale_messages(config)
    recomputing = 1.0
    if parallel.recompute_num_layers.isdecimal():
        blocks = int(parallel.recompute_num_layers) * pp * vpp
        recomputing = min(1.0, blocks / model.num_hidden_layers)
    sparse, experts = 0.0, None
    narrow_experts = 1.0
    if model.num_experts:
        from megatron_llama.planner.expert_work import expert_work, sparse_shares

        sparse, narrow_experts = sparse_shares(config, range(layers))
        experts = expert_work(config, on_host=machine.gpu.is_host) if sparse else None
    return TrainingJob(
        model=model,
        machine=machine,
        traits=TrainerTraits(
            gradient_bytes=2 if parallel.grad_reduce_in_bf16 else max(4, itemsize)
        ),
        seq=training.seq_length,
        micro_batch=training.micro_batch_size,
        microbatches=training.global_batch_size // (training.micro_batch_size * dp),
        tp=tp,
        pp=pp,
        vpp=SCHEDULES[schedule].chunks(vpp),
        cp=cp,
        head_ranks=parallel.head_ranks,
        dp=dp,
        sequence_parallel=parallel.sequence_parallel,
        tensor_pieces=chosen_pieces(config),
        recomputed=recomputing if parallel.recompute_granularity == "full" else 0.0,
        selective=recomputing if parallel.recompute_granularity == "selective" else 0.0,
        ends_counted=parallel.account_for_loss_in_pipeline_split,
        bubble=SCHEDULES[schedule].bubble,
        sharding=sharding,
        shards=shard_count(parallel, dp * cp),
        precision="bf16" if training.fp8 == "none" else training.fp8,
        narrow=len(narrow) / layers if narrow else 1.0,
        narrow_experts=narrow_experts,
        narrow_ends=max(0.0, 1.0 - at_end) if narrow else 1.0,
        tensor_scales=scales.get("tp", NO_SCALES),
        context_scales=scales.get("cp", NO_SCALES),
        gathers_codes=bool(narrow) and gathers_codes(config),
        codes_again=bool(narrow)
        and sharding == "parameters"
        and slots is not None
        and slots < layers / pp,
        itemsize=itemsize,
        # Without the mapping ``rope_scaling`` a model is hashable, as ``lru_cache`` requires.
        trained=_trained_share(
            *(replace(model, rope_scaling=None), tp, parallel.expert_model_parallel_size),
            *(config.optimizer.freeze, config.lora),
        ),
        offload=_host_optimizer(config, itemsize),
        graphs=training.cuda_graph_scope == "block",
        sparse=sparse,
        experts=experts,
    )


@lru_cache(maxsize=64)
def _trained_share(
    model: ModelConfig, tp: int, ep: int, freeze: tuple[str, ...], lora: LoraConfig
) -> TrainedShare:
    if not freeze and not lora.lora_rank:
        return TrainedShare()
    units = trained_units(
        stage_units(model, whole_model(model), 0, tp=tp), freeze=freeze, lora=lora, tp=tp
    )
    if ep > 1:
        from megatron_llama.model.plan.experts import with_own_experts  # of few models

        units = tuple(with_own_experts(unit, ep, 0) for unit in units)
    blocks = [unit for unit in units if unit.is_block]
    every = [spec for unit in units for spec in unit.params]
    matrices = [
        spec for unit in blocks for spec in unit.params if len(spec.shape) > 1 and not spec.adapter
    ]
    products = [(spec.trainable, _used_numel(spec, model, tp)) for spec in matrices]
    head = next((spec for spec in units[-1].params if len(spec.shape) > 1), None)
    additions = [spec.shape for spec in blocks[0].params if spec.adapter]
    return TrainedShare(
        frozen=_share_of(products, trainable=False),
        head_frozen=head is not None and not head.trainable,
        share=_share_of([(spec.trainable, spec.numel) for spec in every], trainable=True),
        additions=tuple((outputs, inputs) for outputs, inputs in additions),
    )


def _used_numel(spec: ParamSpec, model: ModelConfig, tp: int) -> float:
    """Return the elements of a block's weight that a token meets on a rank, on average."""
    if not model.num_experts:
        return spec.numel
    from megatron_llama.planner.expert_work import used_numel  # of few models

    return used_numel(spec, model, tp)


def _share_of(sizes: Sequence[tuple[bool, float]], *, trainable: bool) -> float:
    """Return the share of the elements that is trained, or is not, of pairs of (whether elements
    are trained, how many)."""
    chosen = sum(numel for is_trained, numel in sizes if is_trained is trainable)
    return chosen / max(1, sum(numel for _, numel in sizes))


def _host_optimizer(config: Config, itemsize: int) -> HostOptimizer | None:
    options = config.offload
    zenflow = config.zenflow
    wide = max(4, itemsize)
    if options.optimizer_offload == NONE:
        return None
    if options.optimizer_offload == EXACT:
        speculative = options.offload_speculative and not config.training.fp16
        return HostOptimizer(
            share=options.optimizer_offload_fraction,
            down=wide,
            up=itemsize,
            during_backward=config.optimizer.clip_grad == 0 or speculative,
        )
    return HostOptimizer(
        share=options.optimizer_offload_fraction * (1 - zenflow.zenflow_topk_ratio),
        down=wide if sends_fp32(zenflow) else itemsize,
        up=itemsize,
        during_backward=False,
        interval=longest_window(zenflow),
        overlapped=zenflow.zenflow_overlap_step,
    )
