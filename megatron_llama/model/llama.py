"""LLaMA (Touvron et al., 2023; Dubey et al., 2024) as a pipeline stage; with one stage it is the
whole model.

Activations are [sequence, batch, hidden]: with the sequence outermost, the part of a
sequence-parallel rank is contiguous. In shapes, s is this rank's part of the sequence under context
parallelism, and s/tp its part under sequence parallelism too. Names are those of HuggingFace's
LlamaForCausalLM; qkv_proj and gate_up_proj are its projections stacked (``model/plan/params.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from megatron_llama.config.schema import Config, ModelConfig, ParallelConfig
from megatron_llama.engine.backward import pre_backward_hook
from megatron_llama.engine.comm.device import is_host
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.engine.param_handle import ParamHandle, use_param_handles
from megatron_llama.model.nn.attention import PLAIN_SCORES, AttentionBackend, ScoreRule
from megatron_llama.model.nn.compiled import chosen_ops
from megatron_llama.model.nn.context import Comm, context_attention
from megatron_llama.model.nn.documents import Documents, SplitDocuments, document_attention
from megatron_llama.model.nn.embedding import VocabParallelEmbedding
from megatron_llama.model.nn.functional import (
    Residual,
    add_norm,
    gated,
    recomputable_add_norm,
    recomputable_gated,
    rms_norm,
    split_heads,
)
from megatron_llama.model.nn.head import head_loss, soft_capped
from megatron_llama.model.nn.host.attention import rotated_attention
from megatron_llama.model.nn.kernels.choice import kernels_for
from megatron_llama.model.nn.linear import (
    ColumnLinear,
    LinearOptions,
    RowLinear,
    column_linear,
    empty_weight,
    stacked_outputs,
)
from megatron_llama.model.nn.loss import TokenWeights
from megatron_llama.model.nn.ops import PLAIN, Ops
from megatron_llama.model.nn.overlap import LayerProducts, TensorOverlap, tensor_overlap
from megatron_llama.model.nn.qk_norm import NormWeight, norm_of_heads, norm_of_projections
from megatron_llama.model.nn.recompute import Recomputable, recomputed
from megatron_llama.model.nn.score import Score
from megatron_llama.model.nn.sliding import sliding_attention
from megatron_llama.model.plan.chunks import HEAD_CHUNK, Granularity
from megatron_llama.model.plan.params import (
    Partition,
    has_tied_head,
    kv_copies,
    padded_vocab_size,
    padding_idx,
    partition_of,
)
from megatron_llama.model.plan.run_params import rank_units
from megatron_llama.model.positions import Positions, Rotaries
from megatron_llama.model.windows import window_of


@dataclass(frozen=True)
class StageOptions:
    """How a stage computes, whatever the shape of the model."""

    sequence_parallel: bool = False
    tp_overlap: TensorOverlap | None = None
    """Hides the messages of tensor-parallel layers; None: they are waited for."""
    cp_comm_type: Comm = "all_gather"
    recompute: Granularity = "none"
    recompute_layers: int | None = None
    """Number of blocks that recompute, from the first of the stage; None: all."""
    ops: Ops = PLAIN
    """Functions that compute between matrix products."""
    attention_backend: AttentionBackend = "auto"
    scores: ScoreRule = PLAIN_SCORES
    """Attention scores of one block: a stage gives each of its blocks the rule of its layer."""
    products_of: Callable[[int], LayerProducts] = lambda layer: LayerProducts()
    """Products with the weights of a layer."""
    products: LayerProducts = field(default_factory=LayerProducts)
    """Those of one block, as its scores."""
    head_chunk: int = HEAD_CHUNK
    """The most logits that exist at once, if no backward pass comes or the schedule allows their
    gradients in the forward pass."""
    padding_idx: int | None = None
    """See VocabParallelEmbedding."""

    @staticmethod
    def of(parallel: ParallelConfig) -> StageOptions:
        """Read the options from a resolved configuration, in which ``auto`` has been decided."""
        layers = parallel.recompute_num_layers
        return StageOptions(
            parallel.sequence_parallel,
            cp_comm_type="all_gather" if parallel.cp_comm_type == "all_gather" else "ring",
            recompute=parallel.recompute_granularity,
            recompute_layers=None if layers == "all" else int(layers),
        )

    def linear(self, tp: Axis, *, bias: bool) -> LinearOptions:
        """Return how a linear layer is spread over tp."""
        spread = LinearOptions(tp=tp, sequence_parallel=self.sequence_parallel, bias=bias)
        return {**spread, "overlap": self.tp_overlap, **self.products}

    def for_layer(self, layer: int, scores: ScoreRule) -> StageOptions:
        """Return the options of the block of a layer."""
        return replace(self, scores=scores, products=self.products_of(layer))

    def recompute_of(self, position: int) -> Granularity:
        """Return the granularity at which the block at this position of the stage recomputes."""
        recomputes = self.recompute_layers is None or position < self.recompute_layers
        return self.recompute if recomputes else "none"


class AddRMSNorm(nn.Module):
    """The residual addition and the norm behind it, in one pass.

    With ``recompute``, the norm is ``Recomputable``: the next layer makes it again in backward."""

    def __init__(self, config: ModelConfig, ops: Ops, *, recompute: bool = False) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.one_plus = config.apply_layernorm_1p
        self.ops = ops
        self.recompute = recompute
        self.weight = empty_weight(config.hidden_size)

    def forward(
        self, x: Tensor, delta: Tensor | None = None
    ) -> tuple[Tensor, Tensor | Recomputable]:
        """Return x + delta, [s or s/tp, b, h] each, and its norm."""
        norm = recomputable_add_norm if self.recompute else add_norm
        return norm(x, delta, self.weight, self.eps, self.ops, one_plus=self.one_plus)


class Add(nn.Module):
    """The residual addition in front of a layer that has no norm before it."""

    def forward(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return x + delta, [s or s/tp, b, h] each, in the place of the norm too."""
        total = Residual(x, delta).sum()
        return total, total


class RMSNorm(nn.Module):
    """The norm behind a layer, of its addition to the residual stream."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.one_plus = config.apply_layernorm_1p
        self.ops = ops
        self.weight = empty_weight(config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[s or s/tp, b, h] -> [s or s/tp, b, h]."""
        return rms_norm(x, self.weight, self.eps, self.ops, one_plus=self.one_plus)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; heads are split over tp, the sequence over
    cp."""

    def __init__(self, config: ModelConfig, mesh: Mesh, options: StageOptions) -> None:
        super().__init__()
        self.cp = mesh.cp_keys or mesh.cp
        self.cp_heads = mesh.cp_heads
        self.cp_comm_type = options.cp_comm_type
        self.backend = options.attention_backend
        self.scores = options.scores
        self.ops = options.ops
        # With more tp ranks than key/value heads, several ranks hold a copy of one such head.
        copies = kv_copies(config, mesh.tp.size)
        self.head_dim = config.head_dim
        self.heads = config.num_attention_heads // mesh.tp.size
        self.kv_heads = config.num_key_value_heads * copies // mesh.tp.size
        hidden = config.hidden_size
        query = config.num_attention_heads * config.head_dim
        key_value = 2 * config.num_key_value_heads * copies * config.head_dim
        bias = config.attention_bias or config.add_qkv_bias
        column = partial(ColumnLinear, **options.linear(mesh.tp, bias=bias))
        self.is_fused = copies == 1
        if self.is_fused:
            self.qkv_proj = column(hidden, query + key_value)
        else:
            # Two weights: gradients of the copies are summed, those of the queries are not.
            self.q_proj = column(hidden, query)
            self.kv_proj = column(hidden, key_value)
        spread = options.linear(mesh.tp, bias=config.attention_bias)
        self.o_proj = RowLinear(query, hidden, **spread)
        self.tp = mesh.tp
        self.eps = config.rms_norm_eps
        self.one_plus = config.apply_layernorm_1p
        self.qk_norm = config.qk_norm
        if config.qk_norm == "head":
            self.q_norm = NormWeight(config.head_dim)
            self.k_norm = NormWeight(config.head_dim)
        elif config.qk_norm == "projection":
            self.q_norm = NormWeight(self.heads * config.head_dim)
            self.k_norm = NormWeight(self.kv_heads * config.head_dim)

    def forward(self, x: Tensor | Recomputable, positions: Positions) -> Tensor:
        """[s or s/tp, b, h] -> [s or s/tp, b, h]."""
        return cast(Tensor, self.o_proj(self.attend(self.project(x), positions)))

    def project(self, x: Tensor | Recomputable) -> Tensor:
        """[s or s/tp, b, h] -> queries, keys and values [s, b, (heads + 2 kv_heads) * head_dim].

        The result must have no other reader: ``attend`` rotates it in place."""
        if self.is_fused:
            qkv = cast(Tensor, self.qkv_proj(x))
        else:
            qkv = stacked_outputs(x, (self.q_proj, self.kv_proj))
        if self.qk_norm == "none":
            return qkv
        weights = (self.q_norm.weight, self.k_norm.weight)
        if self.qk_norm == "projection":
            return norm_of_projections(
                qkv, *weights, eps=self.eps, one_plus=self.one_plus, tp=self.tp
            )
        return norm_of_heads(
            qkv,
            *weights,
            query=self.heads,
            key=self.kv_heads,
            eps=self.eps,
            one_plus=self.one_plus,
            ops=self.ops,
        )

    def attend(self, qkv: Tensor, positions: Positions) -> Tensor:
        """[s, b, (heads + 2 kv_heads) * head_dim] -> [s, b, heads * head_dim]."""
        rule = self.scores
        cos = positions.cos
        sin = positions.sin
        if rule.window and positions.sliding_cos is not None and positions.sliding_sin is not None:
            cos = positions.sliding_cos
            sin = positions.sliding_sin
        before = positions.continuation
        sizes = {"query": self.heads, "key": self.kv_heads}
        is_whole = self.cp.size == 1 and self.cp_heads is None and before is None
        if is_host(qkv.device) and is_whole and positions.documents is None:
            return rotated_attention(qkv, cos, sin, **sizes, ops=self.ops, rule=rule)
        query, key, value = split_heads(qkv, cos, sin, **sizes, ops=self.ops)
        if before is not None:
            return before.attend(
                self, query, key, value, positions.mask, rule=rule, backend=self.backend
            )
        if self.cp_heads is None:
            return self._attend_to(query, key, value, positions)
        from megatron_llama.engine.comm import head_exchange  # which few runs need

        heads = head_exchange.sequence_for_heads(query, key, value, self.cp_heads)
        out = self._attend_to(*heads, positions)
        return head_exchange.heads_for_sequence(out, self.cp_heads)

    def _attend_to(self, query: Tensor, key: Tensor, value: Tensor, positions: Positions) -> Tensor:
        rule = self.scores
        documents = positions.documents
        if isinstance(documents, Documents):
            return document_attention(query, key, value, documents, rule, self.backend)
        if self.cp.size > 1:
            return context_attention(
                query,
                key,
                value,
                cp=self.cp,
                comm=self.cp_comm_type,
                documents=documents,
                backend=self.backend,
                rule=rule,
            )
        return sliding_attention(query, key, value, rule=rule, backend=self.backend)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), where act is silu or gelu; the inner width is split over tp.

    With ``recompute``, the input of the down projection is made again in backward."""

    def __init__(
        self, config: ModelConfig, mesh: Mesh, options: StageOptions, *, recompute: bool = False
    ) -> None:
        super().__init__()
        self.gate = options.ops.gate(config.hidden_act)
        self.recompute = recompute
        hidden = config.hidden_size
        inner = config.intermediate_size
        spread = options.linear(mesh.tp, bias=config.mlp_bias)
        self.gate_up_proj = ColumnLinear(hidden, 2 * inner, **spread)
        self.down_proj = RowLinear(inner, hidden, **spread)

    def forward(self, x: Tensor | Recomputable) -> Tensor:
        """[s or s/tp, b, h] -> [s or s/tp, b, h]."""
        activation = recomputable_gated if self.recompute else gated
        return cast(Tensor, self.down_proj(activation(self.gate_up_proj(x), self.gate)))


class Block(nn.Module):
    """One transformer block, with norms before attention and MLP, behind them, or both.
    ``model/plan/activation_memory.py`` counts, to the byte, what it keeps for backward."""

    attention_class: type[Attention] = Attention
    mlp_class: type[MLP] = MLP
    """The class that a changed block replaces (docs/change-the-model.md)."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        options: StageOptions,
        *,
        granularity: Granularity = "none",
    ) -> None:
        super().__init__()
        selective = granularity == "selective"
        self.recompute_all = granularity == "full"
        # Without sequence parallelism all tp ranks have the same input, and divide the kept copy;
        # with it each rank has only a part.
        self.shared_input = None if options.sequence_parallel else mesh.tp
        before: Callable[[], nn.Module] = Add
        behind: Callable[[], nn.Module] = nn.Identity
        if config.norm_position != "after":
            before = partial(AddRMSNorm, config, options.ops, recompute=selective)
        if config.norm_position != "before":
            behind = partial(RMSNorm, config, options.ops)
        self.input_layernorm, self.post_attention_layernorm = before(), before()
        self.post_self_attn_layernorm, self.post_mlp_layernorm = behind(), behind()
        self.self_attn = self.attention_class(config, mesh, options)
        self.mlp = self.mlp_class(config, mesh, options, recompute=selective)

    def forward(self, residual: Residual, positions: Positions) -> Residual:
        """[s or s/tp, b, h] -> [s or s/tp, b, h]."""
        if not self.recompute_all:
            return self._compute(residual, positions)
        # One tensor is kept for backward: the complete stream.
        stream = recomputed(
            lambda stream: self._compute(Residual(stream), positions).sum(),
            residual.sum(),
            weights=self.parameters(),
            shared=self.shared_input,
        )
        return Residual(stream)

    def _compute(self, residual: Residual, positions: Positions) -> Residual:
        # A norm also adds the output of the layer before it, and returns both.
        x, normed = self.input_layernorm(*residual)
        delta = self.post_self_attn_layernorm(self.self_attn(normed, positions))
        x, normed = self.post_attention_layernorm(x, delta)
        return Residual(x, self.post_mlp_layernorm(self.mlp(normed)))


class _Decoder(nn.Module):
    """The module that HuggingFace calls ``model``: a stage has all of it or a part."""

    embed_tokens: VocabParallelEmbedding
    layers: nn.ModuleDict
    norm: AddRMSNorm


_WAITING = (ColumnLinear, RowLinear, AddRMSNorm, RMSNorm, NormWeight, VocabParallelEmbedding, Score)
"""The layers that wait for their weights themselves."""


class Stage(nn.Module):
    """The embedding (first stage), some blocks, and the final norm with the head, or with the score
    of a reward model (last stage).

    Parameters are on the meta device until the engine, or ``load_stages``, gives them values."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        options: StageOptions,
        *,
        partition: Partition,
        index: int,
        block: type[Block] = Block,
    ) -> None:
        super().__init__()
        self.config = config
        self.mesh = mesh
        self.options = options
        self.index = index
        self.is_first = index == 0
        self.is_last = index == partition.stages - 1
        self.scores = {layer: score_rule(config, layer) for layer in partition.layers[index]}
        """The rule by which each layer of this stage makes attention scores."""
        self.rotaries = Rotaries(config, mesh.cp)
        self.on_weight_access: Callable[[int, bool], None] = lambda unit, backward: None
        """Called with the index of a unit of this stage and False right before its forward pass,
        and with True right before its backward pass: the engine gathers its weights. The
        embedding's backward reads no weight and is not announced."""
        self._embedding_stage: list[Stage] = []
        """The stage of this process whose embedding is the head, in a list, so that it is no
        submodule; empty: this one."""
        self._head_handle: ParamHandle | None = None
        """The handle of the head's weight, kept from ``loss_in_chunks``, which writes the gradient,
        until the backward pass to which that gradient belongs."""
        self._head_input_is_frozen = False
        """Whether the head's input has no gradient, because nothing below is trained: then no
        backward pass calls the hook of the head."""

        padded = padded_vocab_size(config, mesh.tp.size)
        self.model = _Decoder()
        layers, waiting = partition.layers[index], [*_WAITING]
        blocks = [block] * len(layers)
        if config.num_experts:
            from megatron_llama.model.nn.moe import block as moe  # which few models have

            blocks = moe.blocks_of(config, layers, block)
            waiting += moe.WAITING
        # A module of plain torch then needs no device argument.
        with torch.device("meta"):
            if self.is_first:
                self.model.embed_tokens = VocabParallelEmbedding(
                    padded,
                    config.hidden_size,
                    tp=mesh.tp,
                    sequence_parallel=options.sequence_parallel,
                    multiplier=config.embedding_multiplier,
                    padding_idx=options.padding_idx,
                )
            self.model.layers = nn.ModuleDict(
                {
                    str(layer): blocks[position](
                        config,
                        mesh,
                        options.for_layer(layer, self.scores[layer]),
                        granularity=options.recompute_of(position),
                    )
                    for position, layer in enumerate(layers)
                }
            )
            if self.is_last:
                self.model.norm = AddRMSNorm(config, options.ops)
                if config.num_labels:
                    self.score = Score(
                        config.hidden_size, tp=mesh.tp, sequence_parallel=options.sequence_parallel
                    )
                elif not (has_tied_head(config) and partition.first_and_last_share_rank):
                    self.lm_head = nn.Module()
                    self.lm_head.weight = empty_weight(padded // mesh.tp.size, config.hidden_size)
        for module in self.modules():
            # The layers of nn/ wait themselves, later than a hook would: with sequence parallelism
            # a weight's gather may still run while the input is gathered.
            if not isinstance(module, tuple(waiting)):
                use_param_handles(module)

    @property
    def units(self) -> int:
        """Number of units: embedding, blocks, head."""
        return len(self.model.layers) + self.is_first + self.is_last

    def share_embedding_of(self, first: Stage) -> None:
        """Use the embedding of another stage of this process as the head: tied weights, when both
        ends are here."""
        self._embedding_stage = [first]

    def forward(
        self, x: Tensor, positions: Positions, noise: Tensor | None = None, *, head: bool = True
    ) -> Tensor:
        """Run the stage: token ids [s, b] (first stage) or activations [s or s/tp, b, h] in, logits
        [s, b, padded_vocab / tp] (last stage) or activations out. The last stage of a reward model
        returns scores [s, b], at least fp32, the same on every tp rank.

        ``noise``, as the activations, is added to the embeddings. With a continuation the logits
        are [1, b, padded_vocab]. Without ``head`` the last stage returns the head's input, of which
        ``loss_in_chunks`` makes the loss."""
        unit = 0
        residual = Residual(x)
        if self.is_first:
            self.on_weight_access(unit, False)
            residual = Residual(self.model.embed_tokens(x), noise)
            unit += 1
        for block in self.model.layers.values():
            self.on_weight_access(unit, False)
            residual = block(residual, positions)
            # The gradient of the output is complete before any weight of the block is read again.
            pre_backward_hook(residual.newest, partial(self.on_weight_access, unit, True))
            unit += 1
        if not self.is_last:
            return residual.sum()

        self.on_weight_access(unit, False)
        if positions.continuation is not None:
            residual = Residual(positions.continuation.last_of(residual.sum()))
        _, normed = self.model.norm(*residual)
        if self.config.num_labels:
            scores = cast(Tensor, self.score(normed))
            pre_backward_hook(scores, partial(self.on_weight_access, unit, True))
            return scores
        if not head:
            self._head_input_is_frozen = not normed.requires_grad
            pre_backward_hook(normed, partial(self._head_backward, unit))
            return cast(Tensor, normed)
        logits = column_linear(
            normed, self.head_weight, self.mesh.tp, sequence_parallel=self.options.sequence_parallel
        )
        if self.config.final_logit_softcapping:
            logits = soft_capped(logits, self.config.final_logit_softcapping)
        pre_backward_hook(logits, partial(self.on_weight_access, unit, True))
        return logits

    def loss_in_chunks(
        self,
        normed: Tensor,
        labels: Tensor,
        *,
        weights: Tensor | TokenWeights | None,
        z_weight: float,
    ) -> Tensor:
        """Return the losses of ``head_loss`` for the result of ``forward`` without head, whose
        backward pass, if any, has to come next."""
        losses, self._head_handle = head_loss(
            normed,
            self.head_weight,
            labels,
            self.mesh.tp,
            self.config.vocab_size,
            weights=weights,
            sequence_parallel=self.options.sequence_parallel,
            z_weight=z_weight,
            ops=self.options.ops,
            chunk=self.options.head_chunk,
            cap=self.config.final_logit_softcapping,
        )
        if self._head_input_is_frozen and self._head_handle is not None:
            self._head_backward(self.units - 1)
        return losses

    def _head_backward(self, unit: int) -> None:
        """Announce the head's backward pass, and the completion of its weight gradient, which
        ``loss_in_chunks`` has written."""
        self.on_weight_access(unit, True)
        handle = self._head_handle
        self._head_handle = None
        if handle is not None:
            handle.grad_written()

    @property
    def head_weight(self) -> Tensor:
        """The output head: a weight of its own, or the embedding of this process. A reward model
        has none."""
        if hasattr(self, "lm_head"):
            return cast(Tensor, self.lm_head.weight)
        owner = self._embedding_stage[0] if self._embedding_stage else self
        return owner.model.embed_tokens.weight

    def positions(
        self,
        length: int,
        device: torch.device,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        documents: Documents | None = None,
        lengths: Tensor | None = None,
    ) -> Positions:
        """Make the positions of a microbatch (``Rotaries.positions``)."""
        positions = self.rotaries.positions(length, device, position_ids, lengths)
        if document_ids is None:
            return positions
        counted = documents or Documents.of(document_ids)
        cp = self.mesh.cp_keys or self.mesh.cp
        split = counted if cp.size == 1 else SplitDocuments.of(counted, length, cp)
        return replace(positions, documents=split)


def score_rule(model: ModelConfig, layer: int) -> ScoreRule:
    """Return the rule by which a layer makes attention scores."""
    scalar = model.query_pre_attn_scalar
    return ScoreRule(
        scale=float(scalar**-0.5) if scalar else None,
        window=window_of(model, layer),
        softcap=model.attn_logit_softcapping,
    )


def build_stages(config: Config, mesh: Mesh, block: type[Block] = Block) -> dict[int, Stage]:
    """Build this process's pipeline stages, by index, without values. Collective with --compile."""
    training = config.training
    if training.attention_backend == "fa3" and not is_host(mesh.device):
        from megatron_llama.engine.comm.flash3 import require_flash3  # which few runs need

        require_flash3()
    # Only fp64 is excluded; kernels take fp32, bf16 and fp16 alike.
    dtype = torch.float64 if training.fp64 else torch.float32
    sizes = (mesh.device, dtype, config.model.hidden_size)
    kernels = None if training.compile else kernels_for(*sizes)
    options = replace(
        StageOptions.of(config.parallel),
        ops=kernels or chosen_ops(mesh, compiled=training.compile),
        tp_overlap=tensor_overlap(config, mesh),
        attention_backend=training.attention_backend,
        padding_idx=padding_idx(config),
    )
    if training.fp8 != "none":
        from megatron_llama.model.nn.fp8.layers import products_by_layer  # which few runs need

        options = replace(options, products_of=products_by_layer(config, mesh))
    partition = partition_of(config)
    stages = {
        index: Stage(config.model, mesh, options, partition=partition, index=index, block=block)
        for index in partition.stages_of(mesh.pp.rank)
    }
    last = partition.stages - 1
    if partition.first_and_last_share_rank and last in stages and last > 0:
        # One tensor, whose two gradients meet in one slot: no message ties the ends together.
        stages[last].share_embedding_of(stages[0])
    if config.lora.lora_rank:
        from megatron_llama.model.nn.lora import add_adapters  # which few runs need

        units_of_stages = rank_units(config, rank=mesh.pp.rank, tp_rank=mesh.tp.rank)
        for stage, units in zip(stages.values(), units_of_stages, strict=True):
            add_adapters(stage, [spec for unit in units for spec in unit.params], config.lora)
    return stages
