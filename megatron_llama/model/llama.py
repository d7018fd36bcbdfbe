"""LLaMA (Touvron et al., 2023; Dubey et al., 2024) as a pipeline stage; with one stage it is the whole model.

Activations are [sequence, batch, hidden]: the sequence is the outermost dim, so that sequence-parallel shards are contiguous.
Names are those of HuggingFace's LlamaForCausalLM; qkv_proj and gate_up_proj are its projections stacked (see params.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from megatron_llama.config import ModelConfig
from megatron_llama.mesh import Mesh
from megatron_llama.nn.embedding import VocabParallelEmbedding
from megatron_llama.nn.functional import apply_rope, attend, rms_norm, rope_frequencies, rope_table, swiglu
from megatron_llama.nn.linear import ColumnLinear, RowLinear, column_linear, empty_weight
from megatron_llama.params import padded_vocab_size, stage_layers


@dataclass(frozen=True)
class Positions:
    """What attention needs to know of a microbatch: cos and sin [s, 1 or b, 1, head_dim / 2], mask bool [b, 1, s, s]."""

    cos: Tensor
    sin: Tensor
    mask: Tensor | None


class RMSNorm(nn.Module):
    """[..., h] -> [..., h]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.weight = empty_weight(config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """See ``rms_norm``."""
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; heads are split over tp."""

    def __init__(self, config: ModelConfig, mesh: Mesh, sequence_parallel: bool) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.heads = config.num_attention_heads // mesh.tp.size
        self.kv_heads = config.num_key_value_heads // mesh.tp.size
        query, key_value = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.qkv_proj = ColumnLinear(config.hidden_size, query + 2 * key_value, tp=mesh.tp, sequence_parallel=sequence_parallel)
        self.o_proj = RowLinear(query, config.hidden_size, tp=mesh.tp, sequence_parallel=sequence_parallel)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """[s or s/tp, b, h] -> [s or s/tp, b, h]."""
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        rotated, value = torch.split(heads, [self.heads + self.kv_heads, self.kv_heads], dim=2)
        query, key = torch.split(apply_rope(rotated, positions.cos, positions.sin), [self.heads, self.kv_heads], dim=2)
        return cast(Tensor, self.o_proj(attend(query, key, value, positions.mask)))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)); the inner width is split over tp."""

    def __init__(self, config: ModelConfig, mesh: Mesh, sequence_parallel: bool) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = ColumnLinear(hidden, 2 * inner, tp=mesh.tp, sequence_parallel=sequence_parallel)
        self.down_proj = RowLinear(inner, hidden, tp=mesh.tp, sequence_parallel=sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """[s or s/tp, b, h] -> [s or s/tp, b, h]."""
        return cast(Tensor, self.down_proj(swiglu(self.gate_up_proj(x))))


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: ModelConfig, mesh: Mesh, sequence_parallel: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config)
        self.self_attn = Attention(config, mesh, sequence_parallel)
        self.post_attention_layernorm = RMSNorm(config)
        self.mlp = MLP(config, mesh, sequence_parallel)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """[s or s/tp, b, h] -> [s or s/tp, b, h]."""
        x = x + self.self_attn(self.input_layernorm(x), positions)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class Stage(nn.Module):
    """The embedding (first stage), some blocks, and the final norm with the head (last stage)."""

    def __init__(self, config: ModelConfig, mesh: Mesh, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh
        self.sequence_parallel = sequence_parallel and mesh.tp.size > 1
        self.on_use: Callable[[int], None] = lambda unit: None
        """Called with the index of a unit right before its forward pass: the engine makes its weights current."""
        padded, hidden = padded_vocab_size(config, mesh.tp.size), config.hidden_size
        layers = stage_layers(config.num_hidden_layers, mesh.pp.size, mesh.pp.rank)
        self.model = nn.Module()
        if mesh.is_first_stage:
            self.model.embed_tokens = VocabParallelEmbedding(padded, hidden, tp=mesh.tp, sequence_parallel=self.sequence_parallel)
        self.model.layers = nn.ModuleDict({str(layer): Block(config, mesh, self.sequence_parallel) for layer in layers})
        if mesh.is_last_stage:
            self.model.norm = RMSNorm(config)
            if not (config.tie_word_embeddings and mesh.is_first_stage):
                self.lm_head = nn.Module()
                self.lm_head.weight = empty_weight(padded // mesh.tp.size, hidden)

    def forward(self, inputs: Tensor, positions: Positions) -> Tensor:
        """First stage: token ids [s, b] in, else activations [s or s/tp, b, h]. Last stage: logits
        [s, b, padded_vocab / tp] out, else activations."""
        unit, x = 0, inputs
        if self.mesh.is_first_stage:
            self.on_use(unit)
            x, unit = self.model.embed_tokens(x), unit + 1  # type: ignore[operator]
        for block in cast(nn.ModuleDict, self.model.layers).values():
            self.on_use(unit)
            x, unit = block(x, positions), unit + 1
        if self.mesh.is_last_stage:
            self.on_use(unit)
            x = column_linear(self.model.norm(x), self.head_weight, self.mesh.tp, sequence_parallel=self.sequence_parallel)  # type: ignore[operator]
        return x

    @property
    def head_weight(self) -> Tensor:
        """The output head: a weight of its own, or the embedding of this stage."""
        owner = self.lm_head if hasattr(self, "lm_head") else self.model.embed_tokens
        return cast(Tensor, cast(nn.Module, owner).weight)

    def positions(self, length: int, device: torch.device, position_ids: Tensor | None = None, mask: Tensor | None = None) -> Positions:
        """Tables for ``length`` positions from 0, or for given ids [s, b]."""
        c = self.config
        ids = torch.arange(length, device=device).unsqueeze(-1) if position_ids is None else position_ids
        frequencies = rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling, device)
        cos, sin = rope_table(ids, frequencies)
        return Positions(cos, sin, mask)
