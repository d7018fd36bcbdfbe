"""LLaMA 4's attention: layers that rotate and see the chunk that they are in, and layers without
positions, which see all.

A chunk is computed as a packed document (``documents.py``): nothing beyond it is computed, and
context-parallel ranks merge the parts of a chunk as those of a document. Chunks are counted from
the start of a sequence, or of a packed document whose positions begin with 0 again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from megatron_llama.config.parse import flag
from megatron_llama.config.schema import ModelConfig
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.errors import ConfigError
from megatron_llama.model.continuation import Continuation
from megatron_llama.model.llama import Attention, StageOptions
from megatron_llama.model.nn.documents import Documents, SplitDocuments
from megatron_llama.model.nn.functional import heads_of
from megatron_llama.model.nn.interleaved import interleaved
from megatron_llama.model.nn.ops import Ops
from megatron_llama.model.nn.recompute import Recomputable
from megatron_llama.model.plan.documents import chunk_bounds
from megatron_llama.model.positions import Positions
from megatron_llama.model.windows import chunk_of

if TYPE_CHECKING:
    from megatron_llama.model.llama import Block


class Chunks:
    """What layers with chunks, and those without positions, need of a microbatch beside its rotary
    table."""

    def __init__(self, model: ModelConfig, ids: Tensor, *, restarts: bool) -> None:
        """``ids`` are this rank's positions, int64 [s, 1 or b]. ``restarts``: whether those of
        packed documents begin with 0."""
        self._size = model.attention_chunk_size
        self._restarts = restarts
        self._limited: dict[Sequence[int], Positions] = {}
        self.temperatures = temperatures(model, ids) if model.attn_temperature_tuning else None
        """The factors of queries in layers without positions, fp32 [s, 1 or b, 1]; None: 1."""

    def limit(self, positions: Positions, tokens: Tensor, cp: Axis, keys: Axis) -> Positions:
        """Return the positions with chunks in the place of documents. ``tokens`` are [s, b, ...];
        the sequence is spread over ``cp``, and its keys over ``keys``. Computed once for all layers
        of a stage."""
        shape = tokens.shape[:2]
        if shape not in self._limited:
            self._limited[shape] = self._limit(positions, tokens, cp, keys)
        return self._limited[shape]

    def _limit(self, positions: Positions, tokens: Tensor, cp: Axis, keys: Axis) -> Positions:
        before = positions.continuation
        if before is not None:
            if before.length <= self._size:
                return positions
            return replace(positions, mask=self._mask(before))
        length = tokens.shape[0] * cp.size
        if length <= self._size:
            return positions
        split = positions.documents
        whole = split.whole if isinstance(split, SplitDocuments) else split
        count = length * tokens.shape[1]
        given = range(0, count + 1, length) if whole is None else whole.bounds.tolist()
        bounds = np.array(
            chunk_bounds(given, length, self._size, restarts=self._restarts and whole is not None)
        )
        # The copy is behind everything that the device has to do before: the host goes on.
        starts = torch.from_numpy(bounds.astype(np.int32)).to(tokens.device, non_blocking=True)
        chunks = Documents(starts, bounds)
        if keys.size == 1:
            return replace(positions, documents=chunks)
        return replace(positions, documents=SplitDocuments.of(chunks, length, keys))

    def _mask(self, before: Continuation) -> Tensor:
        """Return which of the tokens before, and of the new ones, each new token sees: bool [b, 1,
        s, length]."""
        slots = before.slots.t().unsqueeze(-1)
        keys = torch.arange(before.length, device=slots.device)
        seen = (keys <= slots) & (keys // self._size == slots // self._size)
        return seen.unsqueeze(1)


def temperatures(model: ModelConfig, ids: Tensor) -> Tensor:
    """Return the factors of queries at positions [s, b]: fp32 [s, b, 1], which grow with the
    logarithm of the length that a query sees (Nakanishi, 2025)."""
    steps = torch.floor((ids.float() + 1.0) / model.floor_scale)
    return (torch.log1p(steps) * model.attn_scale + 1.0).unsqueeze(-1)


class _L2Norm(torch.autograd.Function):
    """The norm of each head of queries and keys, in place, without a weight."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, sizes: tuple[int, int], head_dim: int, eps: float, ops: Ops
    ) -> Tensor:
        query, key = sizes
        ones = qkv.new_ones(head_dim)
        heads = heads_of(qkv, head_dim)[:, :, : query + key]
        kept, scale = ops.norm_heads(heads, ones, ones, eps, False, query)
        ctx.save_for_backward(kept, scale)
        ctx.query = query
        ctx.ops = ops
        ctx.mark_dirty(qkv)
        return qkv

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, scale = ctx.saved_tensors
        head_dim = kept.shape[-1]
        ones = grad.new_ones(head_dim)
        qkv_grad, *_ = ctx.ops.norm_heads_backward(
            heads_of(grad, head_dim), kept, ones, ones, scale, False, ctx.query
        )
        return qkv_grad.flatten(2), None, None, None, None


class _ScaledQueries(torch.autograd.Function):
    """The product of the queries, the first ``width`` channels, with a factor of each token, in
    place."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, factors: Tensor, width: int) -> Tensor:
        ctx.save_for_backward(factors)
        ctx.width = width
        ctx.mark_dirty(qkv)
        qkv[..., :width].mul_(factors)
        return qkv

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (factors,) = ctx.saved_tensors
        qkv_grad = grad.clone()
        qkv_grad[..., : ctx.width].mul_(factors)
        return qkv_grad, None, None


class ChunkedAttention(Attention):
    """Attention of a layer that rotates: each token sees its chunk, up to itself."""

    def __init__(self, config: ModelConfig, mesh: Mesh, options: StageOptions) -> None:
        super().__init__(config, mesh, options)
        self.sequence = mesh.cp
        self.ops = interleaved(self.ops)
        self.normalizes = config.qk_norm == "l2"
        self.qk_norm = "none"

    def project(self, x: Tensor | Recomputable) -> Tensor:
        """Return queries, keys and values. Where the model has norms, heads of the first two have a
        root mean square of 1."""
        qkv = super().project(x)
        if not self.normalizes:
            return qkv
        # transformers rotates before it. The norm of a rotated vector is the rotated norm.
        sizes = (self.heads, self.kv_heads)
        out = _L2Norm.apply(  # type: ignore[no-untyped-call]
            qkv, sizes, self.head_dim, self.eps, self.ops
        )
        return cast(Tensor, out)

    def attend(self, qkv: Tensor, positions: Positions) -> Tensor:
        """Attend with chunks in the place of documents."""
        assert positions.chunks is not None
        limited = positions.chunks.limit(positions, qkv, self.sequence, self.cp)
        return super().attend(qkv, limited)


class UnrotatedAttention(Attention):
    """Attention of a layer without positions: each token sees all before it."""

    def __init__(self, config: ModelConfig, mesh: Mesh, options: StageOptions) -> None:
        super().__init__(config, mesh, options)
        # It rotates no dim, which the kernels of a device do not know.
        self.ops = interleaved(self.ops)
        self.qk_norm = "none"

    def attend(self, qkv: Tensor, positions: Positions) -> Tensor:
        """Attend to all that is before, with queries times their temperature and without a
        rotation."""
        assert positions.chunks is not None
        factors = positions.chunks.temperatures
        if factors is not None:
            width = self.heads * self.head_dim
            qkv = _ScaledQueries.apply(qkv, factors, width)  # type: ignore[no-untyped-call]
        cos, sin = (table[..., :0] for table in (positions.cos, positions.sin))
        return super().attend(qkv, replace(positions, cos=cos, sin=sin))


def with_chunks(
    config: ModelConfig, layers: range, blocks: Sequence[type[Block]]
) -> list[type[Block]]:
    """Return the classes of the layers' blocks with the attention of each layer. Raises ConfigError
    for a changed block that has an attention of its own."""
    changed = [block for block in blocks if block.attention_class is not Attention]
    if changed:
        raise ConfigError(
            flag("attention_chunk_size"),
            got=f"{config.attention_chunk_size} with a block whose attention is "
            f"{changed[0].attention_class.__name__}",
            expected="blocks whose attention chunks may replace",
            do="leave attention_class as it is, or train a model without chunks",
        )
    kinds: dict[tuple[type[Block], type[Attention]], type[Block]] = {}
    result = []
    for layer, block in zip(layers, blocks, strict=True):
        attention = ChunkedAttention if chunk_of(config, layer) else UnrotatedAttention
        name = attention.__name__.removesuffix("Attention") + block.__name__
        made = kinds.setdefault(
            (block, attention), type(name, (block,), {"attention_class": attention})
        )
        result.append(made)
    return result
