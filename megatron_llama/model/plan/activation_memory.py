"""Bytes that autograd keeps from the forward to the backward pass, as a formula over the sizes of
the model and the layout.

Derived as in "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al.,
2022, section 4), for the blocks of ``model/llama.py``: no dropout, no attention scores (flash
attention keeps one log-sum-exp per query and head), grouped key/value heads, a gated activation,
and norms where the family has them. Biases keep nothing. A test compares every number with the
storages that autograd holds. Parameters are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.model.plan.chunks import HEAD_CHUNK, LOSS_CHUNK, Granularity, head_rows
from megatron_llama.model.plan.itemsize import compute_itemsize
from megatron_llama.model.plan.params import kv_copies, padded_vocab_size
from megatron_llama.model.plan.pieces import chosen_pieces

ROTARY_BYTES = 4
"""An entry of the rotary table, always fp32."""
INDEX_BYTES = 8 + 1
"""Bytes that a vocabulary-parallel embedding keeps of a token: its row as int64, and whether
another rank has it."""


@dataclass(frozen=True)
class Activations:
    """The activations that one rank keeps of one microbatch, in bytes unless a name says tokens."""

    model: ModelConfig
    """With every derived field filled in."""
    micro_batch_size: int
    seq_length: int
    itemsize: int
    """Bytes of one number of an activation."""
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    positions_per_sample: bool = False
    """Whether each sample has rotary positions of its own (--reset-position-ids)."""
    low_rank: int = 0
    """Width of the inner activations of a block's low-rank additions, all together. The frozen
    weights next to them are counted as if they were trained: their inputs are the additions' inputs
    and have to be kept for these."""
    head_chunk: int = HEAD_CHUNK
    head_ranks: int = 0
    """Context-parallel ranks that exchange the sequence for heads."""
    pieces: int = 1
    """Of a message over tp. From 2 on the gradient of an MLP's output is kept, whole, until the
    attention's backward pass (``model/nn/pieces.py``)."""

    @staticmethod
    def from_config(config: Config) -> Activations:
        """Return the activations of a resolved configuration."""
        training = config.training
        parallel = config.parallel
        kind: Callable[..., Activations] = Activations
        if config.model.num_experts:
            from megatron_llama.model.plan.expert_memory import expert_activations  # of few models

            kind = expert_activations(config)
        return kind(
            config.model,
            training.micro_batch_size,
            training.seq_length,
            compute_itemsize(config),
            parallel.tensor_model_parallel_size,
            parallel.context_parallel_size,
            parallel.sequence_parallel,
            config.data.reset_position_ids,
            config.lora.lora_rank * len(config.lora.lora_target_modules),
            head_ranks=parallel.head_ranks,
            pieces=chosen_pieces(config),
        )

    @property
    def fp32_itemsize(self) -> int:
        """Bytes of a number that is computed in fp32 even when activations are bf16."""
        return max(self.itemsize, 4)

    @property
    def tokens(self) -> int:
        """Tokens whose attention and matrix products this rank computes its share of."""
        return self.micro_batch_size * self.seq_length // self.cp

    @property
    def hidden(self) -> int:
        """The residual stream between two layers: with sequence parallelism this rank's 1/tp."""
        return self._residual_tokens * self.model.hidden_size * self.itemsize

    @property
    def _residual_tokens(self) -> int:
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def _query(self) -> int:
        return (
            self.tokens
            * self.model.num_attention_heads
            // self.tp
            * self.model.head_dim
            * self.itemsize
        )

    @property
    def _key_value(self) -> int:
        heads = self.model.num_key_value_heads * kv_copies(self.model, self.tp) // self.tp
        return self.tokens * 2 * heads * self.model.head_dim * self.itemsize

    @property
    def _inner(self) -> int:
        return self.tokens * self.model.intermediate_size // self.tp * self.itemsize

    @property
    def _low(self) -> int:
        return self.tokens * self.low_rank * self.itemsize

    @property
    def _norm(self) -> int:
        """Bytes of an RMSNorm: its input and one scale for each token."""
        return self.hidden + self._residual_tokens * self.fp32_itemsize

    @property
    def _norms(self) -> int:
        """All norms of a block without those of heads: two before its layers, two behind, or
        both."""
        return (4 if self.model.norm_position == "both" else 2) * self._norm

    @property
    def _norms_before(self) -> bool:
        return self.model.norm_position != "after"

    @property
    def _qk_norm(self) -> int:
        """Queries and keys as they were before their norms, and the scales: one for each head, or
        one for all queries and one for all keys of a token."""
        if self.model.qk_norm == "none":
            return 0
        heads = self.model.num_attention_heads // self.tp
        heads += self.model.num_key_value_heads * kv_copies(self.model, self.tp) // self.tp
        scales = 2 if self.model.qk_norm == "projection" else heads
        return self._query + self._key_value // 2 + self.tokens * scales * self.fp32_itemsize

    @property
    def attention(self) -> int:
        """Queries, keys, values, output and log-sum-exp; where keys and values travel, these once
        more, as they were received; and what the norms of queries and keys keep. An exchange of the
        sequence for heads copies heads that several ranks need, and leaves two outputs: that of
        attention and that of the exchange."""
        queries = self.model.num_attention_heads // self.tp
        log_sum_exp = self.tokens * queries * self.fp32_itemsize
        key_value = self._key_value
        outputs = 1
        if self.head_ranks:
            from megatron_llama.engine.plan.head_exchange import sent_key_heads  # of few runs

            keys = self.model.num_key_value_heads * kv_copies(self.model, self.tp) // self.tp
            sent = len(sent_key_heads(queries, keys, self.head_ranks))
            key_value = key_value // keys * sent
            outputs = 2
        received = 2 if self.cp > max(1, self.head_ranks) else 1
        return (1 + outputs) * self._query + key_value * received + log_sum_exp + self._qk_norm

    def block(self, granularity: Granularity) -> int:
        """Return the bytes of one transformer block."""
        if granularity == "full":
            # Only the block's input is kept. Without sequence parallelism all tp ranks have the
            # same input, and each keeps 1/tp of it if it divides.
            divides = (
                not self.sequence_parallel and self.tokens * self.model.hidden_size % self.tp == 0
            )
            return self.hidden // self.tp if divides else self.hidden
        selective = self._norms + self.attention + 2 * self._inner + self._low
        if not self._norms_before:
            # The residual stream itself is the input of attention and MLP.
            selective += 2 * self.hidden
        if granularity == "selective":
            return selective
        # The output of the gated activation, and those of the norms before attention and MLP.
        outputs = 2 * self.hidden if self._norms_before else 0
        return selective + outputs + self._inner

    def blocks(self, layers: range, granularity: Granularity) -> int:
        """Return the bytes of the blocks of some layers."""
        return len(layers) * self.block(granularity)

    def postponed_blocks(self, layers: range, granularity: Granularity) -> int:
        """Return the same between BACKWARD_INPUT and BACKWARD_WEIGHT."""
        return len(layers) * self.postponed_block(granularity)

    def postponed_block(self, granularity: Granularity) -> int:
        """Return one block between BACKWARD_INPUT and BACKWARD_WEIGHT: the inputs and the output
        gradients of its four matrix products."""
        # Gradients of the residual stream are those of all tokens, also under sequence parallelism.
        streams = 2 * self.tokens * self.model.hidden_size * self.itemsize
        gradients = self._query + self._key_value + 2 * self._inner + streams
        selective = granularity == "selective"
        inputs = 2 * (self._norm if selective and self._norms_before else self.hidden)
        inputs += 2 * self._inner if selective else self._inner
        return inputs + self._query + gradients + 2 * self._low

    @property
    def embedding(self) -> int:
        """The rows that were looked up."""
        return self.tokens * (INDEX_BYTES if self.tp > 1 else 8)

    @property
    def _columns(self) -> int:
        if self.model.num_labels:
            return 0
        return padded_vocab_size(self.model, self.tp) // self.tp

    @property
    def exceeds_head_chunk(self) -> bool:
        """Whether the logits of all tokens are so many that they are computed in chunks, if the
        schedule allows it."""
        return self.tokens * self._columns > self.head_chunk

    @property
    def logits(self) -> int:
        """This rank's columns of the logits of all tokens. Their gradient takes their place."""
        return self.tokens * self._columns * self.itemsize

    def loss(self, *, in_chunks: bool) -> int:
        """Return the bytes for the loss besides what is kept: some logits in fp32, if they are not;
        in chunks also the logits of one chunk, and the input of the head where this rank keeps only
        a part of it; and logits once more if they are capped. A reward model needs its scores, and
        the input of the head in fp32."""
        if self.model.num_labels:
            return self._residual_tokens * self.model.hidden_size * self.fp32_itemsize
        at_once = (
            head_rows(self.head_chunk, self._columns) * self._columns
            if in_chunks
            else self.tokens * self._columns
        )
        computed = (
            min(at_once, LOSS_CHUNK) * self.fp32_itemsize
            if self.itemsize < self.fp32_itemsize
            else 0
        )
        capped = at_once * self.itemsize if self.model.final_logit_softcapping else 0
        if not in_chunks:
            # The gradient through the cap is another tensor, made after the loss.
            return max(computed, capped)
        whole = (
            self.tokens * self.model.hidden_size * self.itemsize
            if self._residual_tokens < self.tokens
            else 0
        )
        return computed + at_once * self.itemsize + capped + whole

    def gradients(self, recomputed: Granularity) -> int:
        """Return the bytes for the backward pass of a block besides what is kept: what it computes
        again, and the largest gradients that exist at once, those of the MLP's two inner
        activations and of their product."""
        is_kept = self.pieces > 1 and self.sequence_parallel
        kept = self.tokens * self.model.hidden_size * self.itemsize if is_kept else 0
        return self.block("none") - self.block(recomputed) + 3 * self._inner + kept

    def head(self, *, in_chunks: bool) -> int:
        """Return the bytes of final norm, head and loss. The gradient of the logits is the largest
        part, unless they are computed in chunks; where logits are capped, the hyperbolic tangent is
        as large. A reward model has a score for each token instead."""
        if self.model.num_labels:
            return self._norm + self.hidden + self.tokens * self.fp32_itemsize
        tensors = 2 if self.model.final_logit_softcapping else 1
        return self._norm + self.hidden + (0 if in_chunks else tensors * self.logits)

    @property
    def rotary(self) -> int:
        """The rotary table, which all blocks of a stage share, and that of sliding layers if they
        have another base. A stage without blocks makes none."""
        samples = self.micro_batch_size if self.positions_per_sample else 1
        width = int(self.model.head_dim * self.model.partial_rotary_factor)
        tables = 2 if self.model.rope_local_base_freq else 1
        return tables * self.seq_length // self.cp * samples * width * ROTARY_BYTES

    def stage(
        self,
        layers: range,
        granularity: Granularity,
        recomputing: int,
        *,
        first: bool,
        last: bool,
        in_chunks: bool = False,
    ) -> int:
        """Return the bytes of a pipeline stage of these layers, of which the first ``recomputing``
        recompute. ``in_chunks``: the last stage never holds the logits of all tokens."""
        kept = self.blocks(layers[:recomputing], granularity)
        kept += self.blocks(layers[recomputing:], "none") + self.rotary * (len(layers) > 0)
        return kept + first * self.embedding + last * self.head(in_chunks=in_chunks)

    def postponed_stage(
        self, layers: range, granularity: Granularity, recomputing: int, *, first: bool, last: bool
    ) -> int:
        """Return the bytes of a stage between BACKWARD_INPUT and BACKWARD_WEIGHT: its blocks, and
        the gradients of the looked-up rows and of the logits."""
        kept = self.postponed_blocks(layers[:recomputing], granularity)
        kept += self.postponed_blocks(layers[recomputing:], "none")
        rows = self.tokens * (8 + self.model.hidden_size * self.itemsize)
        return kept + first * rows + last * (self.hidden + self.logits)
