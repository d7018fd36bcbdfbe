"""Rotary tables against those of transformers 5, bit for bit, and rotation of a part of each head."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.nn import interleaved
from megatron_llama.model.nn.compiled import _rotate_back
from megatron_llama.model.nn.functional import split_heads
from megatron_llama.model.nn.host.attention import rotated_attention
from megatron_llama.model.nn.ops import PLAIN, rotate_back
from megatron_llama.model.nn.rotary import Rotary, rope_frequencies
from torch import Tensor
from torch.autograd import gradcheck

from tests.over_cases import over_cases

CPU = torch.device("cpu")
HEAD_DIM, CONTEXT, LONGEST = 16, 64, 96
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": CONTEXT}
SHORT = {"short_factor": [1.0 + 0.1 * pair for pair in range(8)], "original_max_position_embeddings": CONTEXT}
LONGROPE = {"rope_type": "longrope", "long_factor": [2.0 + 0.7 * pair for pair in range(8)], **SHORT}
SCALINGS: Mapping[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "dynamic": {"rope_type": "dynamic", "factor": 3.3},
    "yarn": YARN,
    "yarn with a factor of attention": YARN | {"attention_factor": 1.7},
    "yarn as in DeepSeek": YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn as in DeepSeek with a zero": YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0, "finetuned": True},
    "yarn with zeros for defaults": YARN | {"mscale": 0.0, "mscale_all_dim": 0.7, "beta_fast": 0, "beta_slow": 0},
    "yarn with other bounds": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "longrope": LONGROPE,
    "longrope with a factor": LONGROPE | {"factor": 8.0},
    "longrope with a factor of attention": LONGROPE | {"attention_factor": 0.8},
}
scalings = pytest.mark.parametrize("name", SCALINGS)
shares = pytest.mark.parametrize("share", [1.0, 0.5])
LENGTHS = (10, 64, 65, 96, 97, 150, 151, 30)
"""Around both contexts, growing as text that is generated; and a short one again, for which transformers starts anew."""


def scaling_of(name: str, share: float) -> dict[str, Any]:
    """Lists have a number for each pair of channels that rotates."""
    pairs = int(HEAD_DIM * share) // 2
    return {key: value[:pairs] if isinstance(value, list) else value for key, value in SCALINGS[name].items()}


def theirs(scaling: Mapping[str, Any], theta: float, share: float) -> Any:
    """transformers' module with a table for each call."""
    from transformers import LlamaConfig, Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    is_long = scaling["rope_type"] == "longrope"
    parameters = {**scaling, "rope_theta": theta} | ({"partial_rotary_factor": share} if share < 1 else {})
    sizes = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": LONGEST}
    only = {"pad_token_id": 0, "original_max_position_embeddings": CONTEXT} if is_long else {}
    kind = Phi3Config if is_long else LlamaConfig
    return Phi3RotaryEmbedding(kind(**sizes, **only, partial_rotary_factor=share, rope_parameters=parameters))


def ours(scaling: Mapping[str, Any] | None, theta: float, share: float) -> Rotary:
    model = ModelConfig(
        head_dim=HEAD_DIM,
        max_position_embeddings=LONGEST,
        rope_theta=theta,
        rope_scaling=None if scaling is None else dict(scaling),
        partial_rotary_factor=share,
    )
    return Rotary.of(model)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers warns that our small factors do not fit our small contexts."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@over_cases
@scalings
@shares
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_tables_are_bit_for_bit_huggingfaces(name: str, theta: float, share: float) -> None:
    scaling = scaling_of(name, share)
    module, rotary = theirs(scaling, theta, share), ours(scaling, theta, share)
    unscaled, seen = ours(None, theta, share), 0
    for length in LENGTHS:
        positions, lengths = torch.arange(length), torch.tensor([length])
        expected = module(torch.zeros(1, length, 1), positions[None])
        found = rotary.table(positions.unsqueeze(-1), lengths)
        frequencies = rope_frequencies(rotary.width, theta, scaling, CPU, lengths=lengths, max_position_embeddings=LONGEST)
        assert torch.equal(frequencies.view(-1), module.inv_freq) and frequencies.dtype is torch.float32
        for own, table in zip(found, expected, strict=True):
            assert torch.equal(own[:, 0, 0], table[0, :, : rotary.width // 2])
        seen += any(
            bool((own - plain).abs().max() > 1e-2) for own, plain in zip(found, unscaled.table(positions.unsqueeze(-1)), strict=True)
        )
    assert seen >= 3, "a scaling that were left out would show"


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_each_sequence_has_the_frequencies_of_its_own_length(name: str) -> None:
    """In one table: as if each sequence were alone. No length is one within the original context."""
    rotary = ours(SCALINGS[name], 1e4, 1.0)
    assert rotary.depends_on_length and not ours(YARN, 1e4, 1.0).depends_on_length
    lengths = torch.tensor([30, 97, 151])
    positions = torch.arange(20).unsqueeze(-1).expand(20, 3)
    together = rotary.table(positions, lengths)
    for row, length in enumerate(lengths):
        alone = rotary.table(positions[:, :1], length.view(1))
        assert all(torch.equal(own[:, row : row + 1], other) for own, other in zip(together, alone, strict=True))
    assert not torch.equal(together[0][:, 1], together[0][:, 0])
    within = rotary.table(positions[:, :1])
    assert all(torch.equal(own[:, :1], other) for own, other in zip(together, within, strict=True))
    assert (rotary.switches_at, ours(None, 1e4, 1.0).switches_at) == ({"dynamic": None, "longrope": CONTEXT}[name], None)


def test_sliding_layers_have_a_base_of_their_own_without_scaling() -> None:
    model = ModelConfig(head_dim=HEAD_DIM, rope_theta=1e6, rope_scaling=dict(SCALINGS["linear"]), rope_local_base_freq=1e4)
    rotary = Rotary.of_sliding_layers(model)
    assert rotary is not None and (rotary.theta, rotary.scaling) == (1e4, None)
    assert Rotary.of_sliding_layers(ModelConfig(head_dim=HEAD_DIM)) is None


def turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """By the formula of transformers' Phi-3: the rest of each head passes."""
    width = 2 * cos.shape[-1]
    first, second = heads[..., :width].chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, heads[..., width:]), -1)


@pytest.mark.parametrize("width", [2, 6, 8])
def test_a_part_of_each_head_rotates(width: int) -> None:
    """Forward and backward, in the functions that layers use."""
    length, batch, heads, head_dim = 5, 2, (4, 2), 8
    total = (heads[0] + 2 * heads[1]) * head_dim
    generator = torch.Generator().manual_seed(3)
    qkv, upstream = (torch.randn(length, batch, size, dtype=torch.float64, generator=generator) for size in (total, heads[0] * head_dim))
    cos, sin = Rotary(width, 100.0, None, 64).table(torch.arange(length).unsqueeze(-1))
    cos, sin = cos.double(), sin.double()
    projected = qkv.view(length, batch, -1, head_dim)
    expected = torch.cat((turned(projected[:, :, : sum(heads)], cos, sin), projected[:, :, sum(heads) :]), 2)
    found = torch.cat(split_heads(qkv.clone(), cos, sin, query=heads[0], key=heads[1]), 2)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)

    leaf = qkv.clone().requires_grad_()
    assert gradcheck(lambda x: split_heads(x.clone(), cos, sin, query=heads[0], key=heads[1]), (leaf,))
    grads = torch.randn(length, batch, sum(heads) + heads[1], head_dim, dtype=torch.float64, generator=generator).split([4, 2, 2], 2)
    torch.testing.assert_close(_rotate_back(*grads, cos, sin), rotate_back(*grads, cos, sin), rtol=1e-12, atol=1e-12)

    plain = qkv.clone().requires_grad_()
    query, key, value = split_heads(plain.clone(), cos, sin, query=heads[0], key=heads[1])
    apart = torch.nn.functional.scaled_dot_product_attention(
        *(part.permute(1, 2, 0, 3) for part in (query, key, value)), is_causal=True, enable_gqa=True
    )
    whole = rotated_attention(leaf.clone(), cos, sin, query=heads[0], key=heads[1], ops=PLAIN)
    torch.testing.assert_close(whole, apart.permute(2, 0, 1, 3).flatten(2), rtol=1e-10, atol=1e-10)
    [own] = torch.autograd.grad(whole, leaf, upstream)
    [other] = torch.autograd.grad(apart.permute(2, 0, 1, 3).flatten(2), plain, upstream)
    torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)


def test_neighbouring_dims_rotate_as_llama_4s() -> None:
    """And so do gradients; values' stay as they are."""
    from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

    generator = torch.Generator().manual_seed(3)
    length, batch, heads = 7, 2, (4, 2, 2)
    query, key = (torch.randn(length, batch, count, HEAD_DIM, generator=generator) for count in heads[:2])
    cos, sin = Rotary(HEAD_DIM, 100.0, None, 64).table(torch.arange(length).unsqueeze(-1))
    leaves = query.clone().requires_grad_(), key.clone().requires_grad_()
    turns = torch.complex(cos, sin)[:, 0, 0].expand(batch, -1, -1)
    expected = [part.transpose(0, 1) for part in apply_rotary_emb(*(leaf.transpose(0, 1) for leaf in leaves), turns)]
    for part, theirs in zip((query, key), expected, strict=True):
        interleaved.rotate(part, cos, sin)
        torch.testing.assert_close(part, theirs, rtol=1e-6, atol=1e-6)

    grads = [torch.randn(length, batch, count, HEAD_DIM, generator=generator) for count in heads]
    theirs_back = torch.autograd.grad(expected, leaves, grads[:2])
    found = interleaved.rotate_back(*grads, cos, sin)
    torch.testing.assert_close(found, torch.cat((*theirs_back, grads[2]), 2), rtol=1e-6, atol=1e-6)
