"""Savings of sliding windows: scores, and keys and values between context-parallel ranks."""

from __future__ import annotations

from functools import cache

from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.plan.zigzag import tails
from megatron_llama.model.windows import layer_windows


def score_share(model: ModelConfig, length: int) -> float:
    """Return the attention scores of all layers, as a share of those that they would have without
    windows: of the half of the square below its diagonal."""
    if not model.sliding_window:
        return 1.0
    windows = [min(window or length, length) for window in layer_windows(model)]
    return sum(2 * length * window - window**2 for window in windows) / (length**2 * len(windows))


def context_tokens(window: int, length: int, size: int, rank: int) -> tuple[int, int]:
    """Return the numbers of tokens whose keys and values a context-parallel rank sends in one
    layer, counted once for each receiving rank, and receives. ``window`` 0: all of a sequence of
    ``length``. Gradients go the other way."""
    if not 0 < window < length:
        others = (size - 1) * (length // size)
        return others, others
    chunk = length // (2 * size)
    peers = [peer for peer in range(size) if peer != rank]
    sent = [tail.tokens for peer in peers for tail in tails(rank, peer, size, chunk, window)]
    received = [tail.tokens for peer in peers for tail in tails(peer, rank, size, chunk, window)]
    return sum(sent), sum(received)


@cache
def _most_tokens(window: int, length: int, size: int) -> tuple[int, int]:
    """Return both numbers of ``context_tokens``, each the largest of all ranks."""
    sent, received = zip(
        *(context_tokens(window, length, size, rank) for rank in range(size)), strict=True
    )
    return max(sent), max(received)


def context_shares(model: ModelConfig, length: int, size: int) -> tuple[float, float]:
    """Return the keys and values that leave a context-parallel rank in all layers, and their
    gradients, each as a share of the same without windows, the largest of all ranks."""
    if size == 1 or not model.sliding_window:
        return 1.0, 1.0
    most = [_most_tokens(window, length, size) for window in layer_windows(model)]
    whole = len(most) * (size - 1) * (length // size)
    return sum(sent for sent, _ in most) / whole, sum(back for _, back in most) / whole
