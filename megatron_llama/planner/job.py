"""The work of one optimizer step, in integers: who computes and sends what. Nothing here knows how
fast anything is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatron_llama.config.schema import ModelConfig
from megatron_llama.planner.hardware import Gpu
from megatron_llama.plans.params import ParamSpec, Shapes

Sharding = Literal["none", "optimizer", "gradients", "parameters"]
"""What data-parallel ranks hold a share of, whoever's trainer it is."""
Attention = Literal["flash", "flash1", "triton", "fused", "plain"]
"""Flash attention, its first version, scores written to memory with one kernel for the softmax, the
same with several kernels."""


@dataclass(frozen=True)
class Matmul:
    """A product of [m, k] with [k, n]: one pass of one weight."""

    m: int
    n: int
    k: int

    @cached_property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k

    @cached_property
    def elements(self) -> int:
        """Read and written at least."""
        return self.m * self.n + self.n * self.k + self.m * self.k


@dataclass(frozen=True)
class Machine:
    """Devices and their wires."""

    gpu: Gpu
    gpus: int
    node: int
    """GPUs in a node."""
    domain: int
    """GPUs that NVLink joins."""
    nic: float
    """Bytes per second between nodes, per GPU and direction."""


@dataclass(frozen=True)
class TrainerTraits:
    """What a trainer does beside the layout: where two trainers with one layout differ."""

    family: str = "own"
    """Whose code, for what is left over: one factor on the time of kernels each."""
    attention: Attention = "flash"
    fused_norms: bool = True
    compiled: bool = False
    overlap_data: bool = True
    """Gradients travel under the backward pass, parameters under the forward pass."""
    reduces_every_microbatch: bool = False
    """Sharded gradients are reduced after every microbatch with pipeline stages too."""
    overlap_tensor: bool = False
    gradient_bytes: int = 4
    """Of an element of a gradient between data-parallel ranks."""
    gated: bool = True
    """The MLP has a gate."""
    biased: bool = False
    """Linear layers and norms have biases."""
    learned_positions: bool = False
    dropout: bool = False
    norm_bytes: float = 0.0
    """What norms keep of an element of the residual stream beside their inputs."""
    score_bytes: float = 5.0
    """What attention that writes its scores keeps of each."""
    logit_bytes: float = 6.0
    """What the loss holds of a logit at its peak."""
    whole_logits: bool = False
    """Every rank of tp holds the logits of the whole vocabulary."""
    kept_gradient_bytes: int = 4
    state_bytes: int = 12
    """Of the optimizer for a parameter: fp32 master and two moments."""
    packed: bool = False
    """Sequences are packed from short examples, which attend within themselves."""


@dataclass(frozen=True)
class Offload:
    """An optimizer on the host: what of it is there, and when it works."""

    share: float
    """Of the trained elements that the host updates."""
    down: int
    """Bytes of a gradient's element on its way to the host, every step."""
    up: int
    """Of a weight's on its way back, behind every update."""
    early: bool
    """Buckets are updated when their gradients arrive, not when the norm of all is known."""
    steps: int = 1
    """From one update to the next."""
    beside: bool = False
    """The update of some steps is computed beside the next ones."""


@dataclass(frozen=True)
class Trained:
    """What of a model is trained, where that is not all."""

    frozen: float = 0.0
    """Share of the products' FLOPs whose weights are frozen: they have no weight gradients."""
    head_frozen: bool = False
    share: float = 1.0
    """Of the elements of a rank."""
    additions: tuple[tuple[int, int], ...] = ()
    """Outputs and inputs of a block's low-rank additions."""


@dataclass(frozen=True)
class Job:
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
    dp: int = 1
    sequence_parallel: bool = False
    recomputed: float = 0.0
    """Share of the forward pass of blocks that backward computes again."""
    recomputed_memory: float = 0.0
    """Of what only moves memory in a block's forward pass, the share that backward computes again
    beside that."""
    last_stage_lacks: int = 0
    """Blocks that the last stage has less than the others."""
    ends_counted: bool = False
    """Embedding and head count as a block each when blocks are shared out to stages."""
    bubble: float = 1.0
    """Of the idle time of 1F1B, the share that is left: weight gradients fill the rest."""
    recomputes_scores: bool = False
    """Backward computes the attention scores again and nothing else."""
    sharding: Sharding = "optimizer"
    shards: int = 1
    """Ranks that share what is sharded."""
    precision: str = "bf16"
    itemsize: int = 2
    """Bytes of an activation or a weight while computing."""
    trained: Trained = Trained()
    offload: Offload | None = None

    @property
    def tokens(self) -> int:
        """Of one microbatch on one rank."""
        return self.micro_batch * self.seq // self.cp

    @property
    def stream(self) -> float:
        """Bytes of the residual stream of one microbatch, of all tp ranks together."""
        return float(self.itemsize * self.tokens * self.model.hidden_size)

    @property
    def layout(self) -> tuple[object, ...]:
        """What a user chooses, and nothing of the model or the machine."""
        return (
            self.tp,
            self.pp,
            self.vpp,
            self.cp,
            self.dp,
            self.micro_batch,
            self.recomputed,
            self.sequence_parallel,
            self.sharding,
        )

    @property
    def total_tokens(self) -> int:
        """Of a whole step."""
        return self.micro_batch * self.microbatches * self.dp * self.seq

    @cached_property
    def weights(self) -> tuple[ParamSpec, ...]:
        """The parameters of one block of a rank, as the trainer builds them."""
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
        """The forward product with the output head."""
        spec = Shapes(self.model, self.tp).embedding(tied=False, contributions=1).params[0]
        return Matmul(self.tokens, *spec.shape)

    @cached_property
    def block_numel(self) -> int:
        """Elements of the weights of one block on one rank."""
        return sum(self._rows(spec) * spec.width for spec in self.weights)

    @property
    def queries(self) -> int:
        """Width of all query heads of one rank."""
        return self.model.num_attention_heads * self.model.head_dim // self.tp

    @property
    def logits(self) -> int:
        """Logits of a microbatch that a rank holds."""
        return self.tokens * self.head.n * (self.tp if self.traits.whole_logits else 1)

    @property
    def ends(self) -> int:
        """Tables of the vocabulary: embedding and head, which may be one."""
        return 1 if self.model.tie_word_embeddings else 2

    @cached_property
    def rank_numel(self) -> int:
        """Elements of the weights of the fullest rank of a pipeline."""
        layers = -(-self.model.num_hidden_layers // self.pp)
        tables = self.ends if self.pp == 1 else 1
        return layers * self.block_numel + tables * self.head.n * self.head.k
