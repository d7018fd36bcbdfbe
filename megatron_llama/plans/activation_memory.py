"""Bytes that autograd keeps from the forward to the backward pass, as a formula: what the layers
save, no more and no less.

Derived as in "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al.,
2022, section 4), for LLaMA's block: no dropout, no attention scores (flash attention keeps one
log-sum-exp per query and head), grouped key/value heads, SwiGLU. A test compares every number with
the storages that autograd holds. Parameters are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.plans.params import kv_copies, padded_vocab_size

Granularity = Literal["none", "selective", "full"]
GRANULARITIES: tuple[Granularity, ...] = ("none", "selective", "full")
TABLE = 4
"""Bytes of an entry of the rotary table, always fp32."""
INDEX = 8 + 1
"""Bytes of a token's row in a vocabulary-parallel table: int64, and whether another rank has it."""
HEAD_CHUNK = 2**28
"""Scores of the vocabulary that a rank holds at once, where it need not hold all: 512 MiB in bf16.
Each chunk reads and writes the fp32 gradient of the whole head, so that smaller ones cost time."""
LOSS_CHUNK = 2**19
"""Of these, scores whose cross entropy a host computes at once: what its cache holds."""


@dataclass(frozen=True)
class Activations:
    """What one rank keeps of one microbatch."""

    model: ModelConfig
    """Resolved."""
    micro_batch_size: int
    seq_length: int
    narrow: int
    """Bytes of an activation."""
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    positions_per_sample: bool = False
    """Each sample has rotary positions of its own."""
    low_rank: int = 0
    """Width of the inner activations of a block's low-rank additions, all together. What is frozen
    beside them is counted as if it were trained: its inputs are those of the additions, where there
    are some."""
    head_chunk: int = HEAD_CHUNK

    @staticmethod
    def of(config: Config) -> Activations:
        """Of a resolved configuration."""
        training = config.training
        parallel = config.parallel
        return Activations(
            config.model,
            training.micro_batch_size,
            training.seq_length,
            compute_bytes(config),
            parallel.tensor_model_parallel_size,
            parallel.context_parallel_size,
            parallel.sequence_parallel,
            config.data.reset_position_ids,
            config.lora.lora_rank * len(config.lora.lora_target_modules),
        )

    @property
    def wide(self) -> int:
        """Bytes of what is computed at least in fp32."""
        return max(self.narrow, 4)

    @property
    def tokens(self) -> int:
        """Tokens whose attention and matrix products this rank computes."""
        return self.micro_batch_size * self.seq_length // self.cp

    @property
    def hidden(self) -> int:
        """The residual stream between two layers, or this rank's part of it."""
        return self._own_tokens * self.model.hidden_size * self.narrow

    @property
    def _own_tokens(self) -> int:
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def _query(self) -> int:
        return (
            self.tokens
            * self.model.num_attention_heads
            // self.tp
            * self.model.head_dim
            * self.narrow
        )

    @property
    def _key_value(self) -> int:
        heads = self.model.num_key_value_heads * kv_copies(self.model, self.tp) // self.tp
        return self.tokens * 2 * heads * self.model.head_dim * self.narrow

    @property
    def _inner(self) -> int:
        return self.tokens * self.model.intermediate_size // self.tp * self.narrow

    @property
    def _low(self) -> int:
        return self.tokens * self.low_rank * self.narrow

    @property
    def _norm(self) -> int:
        """Input and scale."""
        return self.hidden + self._own_tokens * self.wide

    @property
    def attention(self) -> int:
        """Queries, keys, values, output and log-sum-exp. With context parallelism keys and values
        once more, as they travel."""
        log_sum_exp = self.tokens * self.model.num_attention_heads // self.tp * self.wide
        return 2 * self._query + self._key_value * (2 if self.cp > 1 else 1) + log_sum_exp

    def block(self, granularity: Granularity) -> int:
        """One transformer block."""
        if granularity == "full":
            divides = (
                not self.sequence_parallel and self.tokens * self.model.hidden_size % self.tp == 0
            )
            return self.hidden // self.tp if divides else self.hidden
        lean = 2 * self._norm + self.attention + 2 * self._inner + self._low
        return lean if granularity == "selective" else lean + 2 * self.hidden + self._inner

    def deferred_block(self, granularity: Granularity) -> int:
        """One block between the halves of a split backward pass: inputs and output gradients of its
        four matrix products.

        Gradients of the residual stream are whole, also under sequence parallelism; with it off,
        neighbours share them."""
        streams = 2 * self.tokens * self.model.hidden_size * self.narrow
        gradients = self._query + self._key_value + 2 * self._inner + streams
        inputs = (
            2 * self._norm + 2 * self._inner
            if granularity == "selective"
            else 2 * self.hidden + self._inner
        )
        return inputs + self._query + gradients + 2 * self._low

    @property
    def embedding(self) -> int:
        """Which rows were looked up."""
        return self.tokens * (INDEX if self.tp > 1 else 8)

    @property
    def _columns(self) -> int:
        return padded_vocab_size(self.model, self.tp) // self.tp

    @property
    def many_scores(self) -> bool:
        """Whether the scores of all tokens are more than are made at once, where the schedule lets
        them be made in chunks."""
        return self.tokens * self._columns > self.head_chunk

    @property
    def logits(self) -> int:
        """This rank's columns of the scores of all tokens, in whose place their gradient is
        kept."""
        return self.tokens * self._columns * self.narrow

    def loss(self, *, in_chunks: bool) -> int:
        """What the loss needs beside what is kept: some scores as they are computed, if these are
        narrower, and in chunks those of one, and the input of the head where this rank keeps a part
        of it."""
        at_once = (
            max(1, self.head_chunk // self._columns) * self._columns
            if in_chunks
            else self.tokens * self._columns
        )
        computed = min(at_once, LOSS_CHUNK) * self.wide if self.narrow < self.wide else 0
        if not in_chunks:
            return computed
        whole = (
            self.tokens * self.model.hidden_size * self.narrow
            if self._own_tokens < self.tokens
            else 0
        )
        return computed + at_once * self.narrow + whole

    def gradients(self, recomputed: Granularity) -> int:
        """What the backward pass of a block needs beside what is kept: what it computes again, and
        the most of the gradients that there are at once, of the two inner activations and of their
        product."""
        return self.block("none") - self.block(recomputed) + 3 * self._inner

    def head(self, *, in_chunks: bool) -> int:
        """Final norm, head and loss. The gradient of the logits is the largest part, unless they
        are made in chunks."""
        return self._norm + self.hidden + (0 if in_chunks else self.logits)

    @property
    def rotary(self) -> int:
        """The rotary table, once for all blocks of a stage."""
        samples = self.micro_batch_size if self.positions_per_sample else 1
        return self.seq_length // self.cp * samples * self.model.head_dim * TABLE

    def stage(
        self,
        blocks: int,
        granularity: Granularity,
        recomputing: int,
        *,
        first: bool,
        last: bool,
        in_chunks: bool = False,
    ) -> int:
        """All of a pipeline stage, of whose ``blocks`` so many recompute. ``in_chunks``: the last
        one never holds all logits."""
        kept = recomputing * self.block(granularity) + (blocks - recomputing) * self.block("none")
        return kept + self.rotary + first * self.embedding + last * self.head(in_chunks=in_chunks)

    def deferred_stage(
        self, blocks: int, granularity: Granularity, recomputing: int, *, first: bool, last: bool
    ) -> int:
        """A stage between the halves of a split backward pass: also the gradients of the looked-up
        rows and of the logits."""
        kept = recomputing * self.deferred_block(granularity) + (
            blocks - recomputing
        ) * self.deferred_block("none")
        rows = self.tokens * (8 + self.model.hidden_size * self.narrow)
        return kept + first * rows + last * (self.hidden + self.logits)


def compute_bytes(config: Config) -> int:
    """Bytes of a parameter or activation while computing."""
    training = config.training
    return 8 if training.fp64 else 2 if training.bf16 or training.fp16 else 4
