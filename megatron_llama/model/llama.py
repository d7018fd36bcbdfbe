"""LLaMA (Touvron et al., 2023; Dubey et al., 2024) as a pipeline stage; with one stage it is the
whole model.

Activations are [sequence, batch, hidden], inside a stage [sequence * batch, hidden]: the sequence
is the outermost dim, so that sequence-parallel shards are contiguous. Names are those of
HuggingFace's LlamaForCausalLM; qkv_proj and gate_up_proj are its projections stacked (see
params.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from megatron_llama.config.schema import Config, LoraConfig, ModelConfig, ParallelConfig
from megatron_llama.distributed.comm.function import has_gradient
from megatron_llama.distributed.device import is_host
from megatron_llama.distributed.mesh import Mesh
from megatron_llama.nn.attention import Documents, attends_by_document, causal_attention
from megatron_llama.nn.cache import KVCache
from megatron_llama.nn.compiled import chosen_ops
from megatron_llama.nn.context import Comm, causal_document_mask, context_attention, local_sequence
from megatron_llama.nn.embedding import VocabParallelEmbedding
from megatron_llama.nn.functional import (
    add_norm,
    added,
    final_norm,
    joined,
    recomputable_add_norm,
    recomputable_swiglu,
    rope_frequencies,
    rope_table,
    shaped,
    split_heads,
    swiglu,
)
from megatron_llama.nn.head import head_loss
from megatron_llama.nn.host.attention import rotated_attention
from megatron_llama.nn.kernels.choice import kernels_for
from megatron_llama.nn.linear import ColumnLinear, RowLinear, column_linear, empty_weight
from megatron_llama.nn.lora import ColumnAdapters, Part, RowAdapter
from megatron_llama.nn.marker import before_backward
from megatron_llama.nn.ops import PLAIN, Ops
from megatron_llama.nn.param_handle import ParamHandle, param_handle_of
from megatron_llama.nn.recompute import Recomputable, recomputed
from megatron_llama.nn.tape import differentiated, taped
from megatron_llama.plans.activation_memory import HEAD_CHUNK, Granularity
from megatron_llama.plans.params import (
    ParamSpec,
    Partition,
    adapter_names,
    kv_copies,
    padded_vocab_size,
    partition_of,
    projection_of,
    rank_units,
)


@dataclass(frozen=True)
class StageOptions:
    """How a stage computes, beside the shape of the model."""

    sequence_parallel: bool = False
    cp_comm_type: Comm = "all_gather"
    recompute: Granularity = "none"
    recompute_layers: int | None = None
    """So many blocks recompute, from the first of the stage; None: all."""
    ops: Ops = PLAIN
    """What computes between matrix products."""
    head_chunk: int = HEAD_CHUNK
    """Most scores of the vocabulary that there are at once, where no backward pass comes, or the
    schedule lets gradients be made in the forward pass."""

    @staticmethod
    def of(parallel: ParallelConfig) -> StageOptions:
        """From a resolved configuration, in which ``auto`` has been decided (memory.py)."""
        layers = (
            None if parallel.recompute_num_layers == "all" else int(parallel.recompute_num_layers)
        )
        return StageOptions(
            parallel.sequence_parallel,
            parallel.cp_comm_type,
            parallel.recompute_granularity,
            layers,
        )

    def recompute_of(self, position: int) -> Granularity:
        """What the block at this position of the stage recomputes."""
        return (
            self.recompute
            if self.recompute_layers is None or position < self.recompute_layers
            else "none"
        )


@dataclass(frozen=True)
class Continuation:
    """The tokens follow others, whose keys and values are kept. See KVCache for ``slots`` [s, b]
    and ``length``.

    ``last``, int64 [b]: of each sequence the place of the one token whose logits are wanted."""

    cache: KVCache
    slots: Tensor
    length: int
    last: Tensor


@dataclass(frozen=True)
class Positions:
    """What attention needs to know of a microbatch: cos and sin [s/cp, 1 or b, 1, head_dim / 2] of
    this rank's positions; with documents, these or a mask bool [b, 1, s, s] (without context
    parallelism), or document_ids int [s, b] of the whole sequence.

    With a continuation (one process), the mask is [b, 1, s, length], and None when nothing was read
    before."""

    cos: Tensor
    sin: Tensor
    mask: Tensor | Documents | None = None
    document_ids: Tensor | None = None
    continuation: Continuation | None = None


class RMSNorm(nn.Module):
    """The residual stream [..., h], and what a layer adds to it, to their sum and its norm;
    ``recompute``: for a linear layer that makes the norm again in backward; ``final``: the stream
    ends here."""

    def __init__(
        self, config: ModelConfig, ops: Ops, *, recompute: bool = False, final: bool = False
    ) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.ops = ops
        self.weight = empty_weight(config.hidden_size)
        self._function: Callable[..., tuple[Tensor, Tensor | Recomputable]]
        self._function = final_norm if final else recomputable_add_norm if recompute else add_norm

    def forward(
        self, x: Tensor, delta: Tensor | None = None
    ) -> tuple[Tensor, Tensor | Recomputable]:
        """See ``add_norm``."""
        return self._function(x, delta, self.weight, self.eps, self.ops)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; heads are split over tp, the sequence over cp.

    With more tp ranks than key/value heads several ranks hold one such head, in a weight of its own
    (``kv_proj``)."""

    def __init__(self, config: ModelConfig, mesh: Mesh, options: StageOptions) -> None:
        super().__init__()
        self.cp = mesh.cp
        self.comm = options.cp_comm_type
        self.ops = options.ops
        copies = kv_copies(config, mesh.tp.size)
        parallel = options.sequence_parallel
        self.heads = config.num_attention_heads // mesh.tp.size
        self.kv_heads = config.num_key_value_heads * copies // mesh.tp.size
        hidden = config.hidden_size
        query = config.num_attention_heads * config.head_dim
        key_value = 2 * config.num_key_value_heads * copies * config.head_dim
        if copies == 1:
            self.qkv_proj = ColumnLinear(
                hidden, query + key_value, tp=mesh.tp, sequence_parallel=parallel
            )
        else:
            self.q_proj = ColumnLinear(hidden, query, tp=mesh.tp, sequence_parallel=parallel)
            self.kv_proj = ColumnLinear(hidden, key_value, tp=mesh.tp, sequence_parallel=parallel)
        self.o_proj = RowLinear(query, hidden, tp=mesh.tp, sequence_parallel=parallel)

    def _project(self, x: Tensor | Recomputable) -> Tensor:
        if hasattr(self, "qkv_proj"):
            return cast(Tensor, self.qkv_proj(x))
        return joined(self.q_proj(x), self.kv_proj(x))

    def forward(self, x: Tensor | Recomputable, positions: Positions) -> Tensor:
        """Tokens in one dim or two, [s * b or s, b, h] or with s/tp, to the same; s is this rank's
        part of the sequence under context parallelism."""
        cos = positions.cos
        sin = positions.sin
        before = positions.continuation
        projected = self._project(x)
        if self.cp.size == 1 and before is None and positions.mask is None and is_host(cos.device):
            context = rotated_attention(
                projected, cos, sin, query=self.heads, key=self.kv_heads, ops=self.ops
            )
            return self._output(context, x)
        tokens = projected.shape[:-1]
        query, key, value = split_heads(
            projected, cos, sin, query=self.heads, key=self.kv_heads, ops=self.ops
        )
        if before is not None:
            key, value = before.cache.extend(self, key, value, before.slots, before.length)
        if self.cp.size == 1:
            context = differentiated(
                partial(causal_attention, mask=positions.mask), query, key, value
            )
        else:
            context = context_attention(
                query, key, value, cp=self.cp, comm=self.comm, document_ids=positions.document_ids
            )
        # Not where this is a copy: that would be kept beside the output.
        return self._output(
            shaped(context, *tokens, context.shape[-1]) if context.is_contiguous() else context, x
        )

    def _output(self, context: Tensor, x: Tensor | Recomputable) -> Tensor:
        """In the shape of the input."""
        like = x.value if isinstance(x, Recomputable) else x
        return shaped(self.o_proj(context), *like.shape)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)); the inner width is split over tp. ``recompute``: the product is
    made again in backward."""

    def __init__(
        self, config: ModelConfig, mesh: Mesh, options: StageOptions, *, recompute: bool = False
    ) -> None:
        super().__init__()
        self._swiglu = recomputable_swiglu if recompute else swiglu
        self.ops = options.ops
        hidden = config.hidden_size
        inner = config.intermediate_size
        parallel = options.sequence_parallel
        self.gate_up_proj = ColumnLinear(hidden, 2 * inner, tp=mesh.tp, sequence_parallel=parallel)
        self.down_proj = RowLinear(inner, hidden, tp=mesh.tp, sequence_parallel=parallel)

    def forward(self, x: Tensor | Recomputable) -> Tensor:
        """[s or s/tp, ..., h] -> the same."""
        return cast(Tensor, self.down_proj(self._swiglu(self.gate_up_proj(x), self.ops)))


class Block(nn.Module):
    """One pre-norm transformer block. What it keeps for backward, to the byte:
    ``activations.py``."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        options: StageOptions,
        *,
        recompute: Granularity = "none",
    ) -> None:
        super().__init__()
        selective = recompute == "selective"
        self.recompute_all = recompute == "full"
        # With sequence parallelism ranks hold different parts of the input; without it, all hold
        # all of it.
        self.shared_input = None if options.sequence_parallel else mesh.tp
        self.input_layernorm = RMSNorm(config, options.ops, recompute=selective)
        self.self_attn = Attention(config, mesh, options)
        self.post_attention_layernorm = RMSNorm(config, options.ops, recompute=selective)
        self.mlp = MLP(config, mesh, options, recompute=selective)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """[s * b or s, b, h], or with s/tp, to the same."""
        compute = partial(self._compute, positions=positions)
        if not self.recompute_all:
            return compute(x)
        return recomputed(
            partial(_taped, self, compute), x, weights=self.parameters(), shared=self.shared_input
        )

    def _compute(self, x: Tensor, positions: Positions) -> Tensor:
        x, normed = self.input_layernorm(x)
        x, normed = self.post_attention_layernorm(x, self.self_attn(normed, positions))
        return added(self.mlp(normed), x)


class Stage(nn.Module):
    """The embedding (first stage), some blocks, and the final norm with the head (last stage)."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        options: StageOptions,
        *,
        partition: Partition,
        index: int,
    ) -> None:
        super().__init__()
        self.config = config
        self.mesh = mesh
        self.options = options
        self.index = index
        self.is_first = index == 0
        self.is_last = index == partition.stages - 1
        self.on_weight_access: Callable[[int, bool], None] = lambda unit, backward: None
        """Called with the index of a unit of this stage and False right before its forward pass,
        and with True right before its backward pass: the engine brings its weights. The embedding's
        backward reads no weight and is not announced."""
        padded = padded_vocab_size(config, mesh.tp.size)
        hidden = config.hidden_size
        parallel = options.sequence_parallel
        self._shared: list[Stage] = []
        self._head_handle: ParamHandle | None = None
        """Of the head, where its gradient has been written and not announced."""
        self._head_alone = False
        """Whether no backward pass gets to the head: nothing is trained below."""
        self.model = nn.Module()
        if self.is_first:
            self.model.embed_tokens = VocabParallelEmbedding(
                padded, hidden, tp=mesh.tp, sequence_parallel=parallel
            )
        layers = enumerate(partition.layers[index])
        blocks = {
            str(layer): Block(config, mesh, options, recompute=options.recompute_of(position))
            for position, layer in layers
        }
        self.model.layers = nn.ModuleDict(blocks)
        if self.is_last:
            self.model.norm = RMSNorm(config, options.ops, final=True)
            if not (config.tie_word_embeddings and partition.ends_meet):
                self.lm_head = nn.Module()
                self.lm_head.weight = empty_weight(padded // mesh.tp.size, hidden)

    @property
    def units(self) -> int:
        """Number of units: embedding, blocks, head."""
        return len(cast(nn.ModuleDict, self.model.layers)) + self.is_first + self.is_last

    def share_embedding_of(self, first: Stage) -> None:
        """WeightAccess the embedding of another stage of this process as the head: tied weights
        when both ends are here."""
        self._shared = [first]

    def forward(
        self,
        inputs: Tensor,
        positions: Positions,
        noise: Tensor | None = None,
        *,
        head: bool = True,
    ) -> Tensor:
        """First stage: token ids [s, b] in, and what is added to their embeddings, if anything, [s
        or s/tp, b, h]; else activations [s or s/tp, b, h]. Last stage: logits [s, b, padded_vocab /
        tp] out ([1, b, ...] with a continuation), else activations. s is this rank's part of the
        sequence. ``head``: False for activations of the last stage too, of which ``loss_in_chunks``
        makes the loss."""
        return _taped(
            self, partial(self._compute, positions=positions, noise=noise, head=head), inputs
        )

    def _compute(self, x: Tensor, positions: Positions, noise: Tensor | None, head: bool) -> Tensor:
        unit = 0
        batch = x.shape[1]
        if self.is_first:
            self.on_weight_access(unit, False)
            x, unit = self.model.embed_tokens(x), unit + 1  # type: ignore[operator]
            x = x if noise is None else added(x, noise)
        # Tokens in one dim: operators ask again and again for what products want anyway.
        x = shaped(x, x.shape[0] * batch, x.shape[2])
        for block in cast(nn.ModuleDict, self.model.layers).values():
            self.on_weight_access(unit, False)
            x = self._marked(block(x, positions), unit)
            unit = unit + 1
        if self.is_last:
            self.on_weight_access(unit, False)
            if positions.continuation is not None:
                last = positions.continuation.last
                x = x.view(-1, batch, x.shape[1])[last, torch.arange(batch, device=x.device)]
            (_, x), parallel = self.model.norm(x), self.options.sequence_parallel  # type: ignore[operator]
            if head:
                x = self._marked(
                    column_linear(x, self.head_weight, self.mesh.tp, sequence_parallel=parallel),
                    unit,
                )
            else:
                self._head_alone = not has_gradient(x)
                x = before_backward(x, partial(self._head_backward, unit))
        return shaped(x, x.shape[0] // batch, batch, x.shape[1])

    def loss_in_chunks(
        self, normed: Tensor, labels: Tensor, *, weights: Tensor | None, z_weight: float
    ) -> Tensor:
        """See ``head_loss``; ``normed`` from ``forward`` without head, whose backward pass, if any,
        comes next."""
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
        )
        if self._head_alone and self._head_handle is not None:
            self._head_backward(self.units - 1)
        return losses

    def _head_backward(self, unit: int) -> None:
        """The backward pass begins: what ``loss_in_chunks`` has written is the head's contribution
        to it."""
        self.on_weight_access(unit, True)
        handle = self._head_handle
        self._head_handle = None
        if handle is not None:
            handle.done()

    def _marked(self, output: Tensor, unit: int) -> Tensor:
        """The output of a unit, which announces the unit's backward pass."""
        return before_backward(output, partial(self.on_weight_access, unit, True))

    @property
    def head_weight(self) -> Tensor:
        """The output head: a weight of its own, or the embedding of this process."""
        owner = (
            self.lm_head
            if hasattr(self, "lm_head")
            else (self._shared or [self])[0].model.embed_tokens
        )
        return cast(Tensor, cast(nn.Module, owner).weight)

    def positions(
        self,
        length: int,
        device: torch.device,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Positions:
        """Tables for a whole sequence of ``length`` positions from 0, or for given ids [s, b]; with
        context parallelism only of this rank's part. ``documents``: those of ``document_ids``,
        which replace the mask where there is a kernel for them."""
        c = self.config
        cp = self.mesh.cp
        ids = (
            torch.arange(length, device=device).unsqueeze(-1)
            if position_ids is None
            else position_ids
        )
        frequencies = rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling, device)
        cos, sin = rope_table(local_sequence(ids, cp), frequencies)
        if cp.size > 1 or document_ids is None:
            return Positions(cos, sin, document_ids=document_ids)
        if documents is not None and attends_by_document(
            device, next(self.parameters()).dtype, c.head_dim
        ):
            return Positions(cos, sin, mask=documents)
        return Positions(cos, sin, mask=causal_document_mask(document_ids))


def _taped(module: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function(x)``, which computes with a module's weights. Those without a home are autograd's,
    and of those who wait for it to deliver gradients; the others, and what is between them, need a
    tape only."""
    if param_handle_of(next(module.parameters())) is None:
        return function(x)
    return taped(function, x, weights=module.parameters())


def build_stages(config: Config, mesh: Mesh) -> dict[int, Stage]:
    """This process's pipeline stages by index, on the meta device: the engine gives them weights.
    Collective with --compile."""
    t = config.training
    hidden = config.model.hidden_size
    kernels = (
        None
        if t.compile
        else kernels_for(mesh.device, torch.float64 if t.fp64 else torch.float32, hidden)
    )
    ops = kernels or chosen_ops(mesh, compiled=t.compile)
    partition = partition_of(config)
    options = replace(StageOptions.of(config.parallel), ops=ops)
    indices = partition.stages_of(mesh.pp.rank)
    stages = {i: Stage(config.model, mesh, options, partition=partition, index=i) for i in indices}
    if partition.ends_meet and partition.stages > 1 and mesh.pp.rank == partition.placement[0]:
        stages[partition.stages - 1].share_embedding_of(stages[0])
    if config.lora.lora_rank:
        for stage, units in zip(
            stages.values(),
            rank_units(config, rank=mesh.pp.rank, tp_rank=mesh.tp.rank),
            strict=True,
        ):
            _adapt(stage, [spec for unit in units for spec in unit.params], config.lora)
    return stages


def _adapt(stage: Stage, specs: Sequence[ParamSpec], lora: LoraConfig) -> None:
    """Give the linear layers of a stage their low-rank additions."""
    adapted = {part.name for spec in specs if spec.adapter for part in spec.slices}
    for spec in specs:
        parts = [
            Part(projection_of(part.name), part.rows, adapter_names(part.name)[0] in adapted)
            for part in spec.slices
        ]
        if not any(part.adapted for part in parts):
            continue
        layer = stage.get_submodule(spec.name.removesuffix(".weight"))
        rank = lora.lora_rank
        scaling = lora.lora_alpha / lora.lora_rank
        if isinstance(layer, ColumnLinear):
            layer.adapters = ColumnAdapters(
                spec.shape[1],
                parts,
                rank=rank,
                scaling=scaling,
                tp=layer.tp,
                sequence_parallel=layer.sequence_parallel,
            )
        else:
            assert isinstance(layer, RowLinear)
            layer.adapters = RowAdapter(
                spec.shape[1], parts, rank=rank, scaling=scaling, tp=layer.tp
            )
