"""What windows leave of attention: counted query by query, and chunk by chunk."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron_llama.config.schema import ModelConfig
from megatron_llama.metrics.flops import flops_per_token
from megatron_llama.model.plan.windows import score_share
from megatron_llama.model.plan.zigzag import chunk_owner
from megatron_llama.model.windows import layer_windows
from megatron_llama.planner.context_traffic import context_shares, context_tokens

MODEL = ModelConfig(
    vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, sliding_window=512,
)  # fmt: skip
MIXED = replace(MODEL, layer_types=("sliding_attention", "full_attention", "sliding_attention"))


def pairs(length: int, window: int) -> int:
    """Queries and keys that they see, each query half of itself: the convention of s * s / 2 for a whole sequence."""
    return sum(min(place, window) for place in range(length)) if window else length * (length - 1) // 2


@pytest.mark.parametrize("model", [MODEL, MIXED], ids=["all layers", "some layers"])
@pytest.mark.parametrize("length", [4096, 512, 300])
def test_scores_are_those_within_windows(model: ModelConfig, length: int) -> None:
    seen = sum(pairs(length, window) for window in layer_windows(model))
    whole = len(layer_windows(model)) * pairs(length, 0)
    assert score_share(model, length) == pytest.approx(seen / whole, rel=1e-2)
    plain = replace(model, sliding_window=0, layer_types=())
    for causal in (True, False):
        found, full = (flops_per_token(one, length, causal=causal) for one in (model, plain))
        assert (found < full) == (length > 512)
    # 12 FLOPs for each score and channel, forward and backward; without scores both are the same.
    rest = flops_per_token(plain, length, causal=True) - 6 * 3 * 32 * length
    assert flops_per_token(model, length, causal=True) - rest == pytest.approx(12 * 32 * seen / length, rel=1e-2)


def reached_of_others(rank: int, size: int, length: int, window: int) -> list[tuple[int, int]]:
    """(holder, position) of the keys of other ranks that this rank's queries see, position by position."""
    chunk = length // (2 * size)
    holder = [chunk_owner(place // chunk, size)[0] for place in range(length)]
    own = [place for place in range(length) if holder[place] == rank]
    seen = {key for query in own for key in range(max(0, query - window + 1), query)}
    return [(holder[key], key) for key in sorted(seen) if holder[key] != rank]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("window", [1, 5, 9, 20, 63])
def test_context_parallel_ranks_send_what_windows_reach(window: int, size: int) -> None:
    seen = [reached_of_others(rank, size, 64, window) for rank in range(size)]
    sent = [sum(holder == rank for other in seen for holder, _ in other) for rank in range(size)]
    assert [context_tokens(window, 64, size, rank) for rank in range(size)] == list(zip(sent, map(len, seen), strict=True))
    model = replace(MODEL, sliding_window=window)
    whole = (size - 1) * 64 / size
    assert context_shares(model, 64, size) == (max(sent) / whole, max(map(len, seen)) / whole)
    mixed = context_shares(replace(MIXED, sliding_window=window), 64, size)
    assert mixed == pytest.approx(((2 * max(sent) / whole + 1) / 3, (2 * max(map(len, seen)) / whole + 1) / 3))


def test_without_windows_all_is_sent() -> None:
    for window in (0, 64, 100):
        assert context_tokens(window, 64, 4, 1) == (48, 48)
        assert context_shares(replace(MODEL, sliding_window=window), 64, 4) == (1.0, 1.0)
    assert context_shares(MODEL, 4096, 1) == (1.0, 1.0)
