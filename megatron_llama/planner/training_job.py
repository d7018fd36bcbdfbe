"""The work of one optimizer step in integers: the products and messages of each rank, without any
speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from megatron_llama.config.parse import flag
from megatron_llama.config.schema import Config, LoraConfig, ModelConfig
from megatron_llama.engine.offload_options import EXACT, NONE
from megatron_llama.engine.plan.buckets import strategy_named
from megatron_llama.engine.plan.head_exchange import exchanged_heads, sent_key_heads
from megatron_llama.engine.plan.specs import ParamSpec
from megatron_llama.engine.plan.zenflow import longest_window, sends_fp32
from megatron_llama.errors import ConfigError
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
    recomputed_memory: float = 0.0
    """Share of the memory-bound work of a block's forward pass that backward repeats in addition to
    ``recomputed``."""
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
        """The parameters of one block of a rank, as this trainer builds them."""
        return Shapes(self.model, self.tp, 0, self.sequence_parallel).block(0).params

    @cached_property
    def matmuls(self) -> tuple[Matmul, ...]:
        """Forward products with the weights of one block, for one microbatch."""
        return tuple(
            Matmul(self.tokens, self._rows(spec), spec.shape[1])
            for spec in self.weights
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
        """Elements of the weights of one block on one rank."""
        return sum(self._rows(spec) * spec.width for spec in self.weights)

    @property
    def matrix_numel(self) -> int:
        """Elements of all blocks and of the head, over all tp ranks."""
        blocks = self.block_numel * self.model.num_hidden_layers
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
        layers = -(-self.model.num_hidden_layers // self.pp)
        tables = self.ends if self.pp == 1 else 1
        return layers * self.block_numel + tables * self.table_rows * self.head.k


def job_of(config: Config, machine: Machine) -> TrainingJob:
    """Return the work of a step of this trainer with a resolved configuration. Raises ConfigError
    for a model with experts."""
    if config.model.num_experts:
        raise ConfigError(
            flag("num_experts"),
            got=config.model.num_experts,
            expected="0: no measured run has told the planner the times of experts",
            do="choose the layout by hand; pretrain --dry-run counts its memory and messages",
        )
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
        recomputed_memory=0.5 * recomputing * (parallel.recompute_granularity == "selective"),
        ends_counted=parallel.account_for_loss_in_pipeline_split,
        bubble=SCHEDULES[schedule].bubble,
        sharding=sharding,
        shards=shard_count(parallel, dp * cp),
        precision="bf16" if training.fp8 == "none" else training.fp8,
        narrow=len(narrow) / layers if narrow else 1.0,
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
            replace(model, rope_scaling=None), tp, config.optimizer.freeze, config.lora
        ),
        offload=_host_optimizer(config, itemsize),
        graphs=training.cuda_graph_scope == "block",
    )


@lru_cache(maxsize=64)
def _trained_share(
    model: ModelConfig, tp: int, freeze: tuple[str, ...], lora: LoraConfig
) -> TrainedShare:
    if not freeze and not lora.lora_rank:
        return TrainedShare()
    units = trained_units(
        stage_units(model, whole_model(model), 0, tp=tp), freeze=freeze, lora=lora, tp=tp
    )
    blocks = [unit for unit in units if unit.is_block]
    every = [spec for unit in units for spec in unit.params]
    matrices = [
        spec for unit in blocks for spec in unit.params if len(spec.shape) > 1 and not spec.adapter
    ]
    head = next((spec for spec in units[-1].params if len(spec.shape) > 1), None)
    additions = [spec.shape for spec in blocks[0].params if spec.adapter]
    return TrainedShare(
        frozen=_share_of(matrices, trainable=False),
        head_frozen=head is not None and not head.trainable,
        share=_share_of(every, trainable=True),
        additions=tuple((outputs, inputs) for outputs, inputs in additions),
    )


def _share_of(specs: Sequence[ParamSpec], *, trainable: bool) -> float:
    chosen = sum(spec.numel for spec in specs if spec.trainable is trainable)
    return chosen / max(1, sum(spec.numel for spec in specs))


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
