"""What windows leave of attention: counted query by query, and chunk by chunk."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron_llama.config.schema import ModelConfig
from megatron_llama.config.windows import layer_windows
from megatron_llama.metrics.flops import flops_per_token
from megatron_llama.nn.zigzag import window_messages
from megatron_llama.plans.windows import context_share, score_share

MODEL = ModelConfig(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    sliding_window=512,
)
MIXED = replace(MODEL, layer_types=("sliding_attention", "full_attention", "sliding_attention"))


def pairs(length: int, window: int) -> int:
    """Queries and keys that they see, each query half of itself: the convention of s * s / 2 for a whole sequence."""
    return sum(min(place, window) for place in range(length)) if window else length * (length - 1) // 2


def test_windows_of_layers() -> None:
    assert layer_windows(MODEL) == (512, 512, 512)
    assert layer_windows(MIXED) == (512, 0, 512)
    assert layer_windows(replace(MODEL, sliding_window=0)) == (0, 0, 0)


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


def test_a_context_parallel_rank_receives_what_windows_reach() -> None:
    """Against the messages of all ranks, for a window within a chunk; the first chunk has none before it, and two neighbours are one rank's."""
    length, size = 65536, 4
    sent = sum(window_messages(rank, size, length // (2 * size), 512)[1] for rank in range(size))
    assert sent == (2 * size - 2) * 511
    assert context_share(MODEL, length) * length * size == 2 * size * 511 >= sent
    assert context_share(MIXED, length) == pytest.approx((2 * 2 * 511 / length + 1) / 3)
    assert context_share(replace(MODEL, sliding_window=0), length) == 1.0
