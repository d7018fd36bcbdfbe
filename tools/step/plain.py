"""LLaMA as one writes it in torch without a framework: modules, autograd, torch's own fused
functions, nothing else."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_llama.config.schema import ModelConfig


class _Norm(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width = config.head_dim
        hidden = config.hidden_size
        query, key = (
            heads * config.head_dim
            for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(hidden, query, bias=False)
        self.o_proj = nn.Linear(query, hidden, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(hidden, key, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (_rotated(part, cos, sin) for part in (q, k))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return cast(Tensor, self.o_proj(out.transpose(1, 2).flatten(2)))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class _MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        inner = config.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class _Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = _Norm(config)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = _Norm(config)
        self.mlp = _MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class PlainLlama(nn.Module):
    """Token ids and labels [b, s] to the mean loss. Parameters carry HuggingFace's names. Rotary
    positions without scaling."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(_Block(config) for _ in range(config.num_hidden_layers))
        self.model.norm = _Norm(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """See the class."""
        x = cast(Tensor, self.model.embed_tokens(tokens))  # type: ignore[operator]
        cos, sin = self._table(tokens.shape[1], x)
        for block in cast(nn.ModuleList, self.model.layers):
            x = block(x, cos, sin)
        logits = self.lm_head(self.model.norm(x))  # type: ignore[operator]
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    def _table(self, length: int, x: Tensor) -> tuple[Tensor, Tensor]:
        steps = (
            torch.arange(0, self.config.head_dim, 2, device=x.device).float() / self.config.head_dim
        )
        angles = torch.outer(
            torch.arange(length, device=x.device).float(), self.config.rope_theta**-steps
        ).repeat(1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)
