"""Savings of sliding windows and of chunks."""

from __future__ import annotations

from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.windows import chunk_of, layer_windows


def score_share(model: ModelConfig, length: int) -> float:
    """Return the attention scores of all layers, as a share of those that they would have without
    windows and chunks: of the half of the square below its diagonal."""
    if model.attention_chunk_size:
        return chunk_squares(model, length) / (length**2 * model.num_hidden_layers)
    if not model.sliding_window:
        return 1.0
    windows = [min(window or length, length) for window in layer_windows(model)]
    return sum(2 * length * window - window**2 for window in windows) / (length**2 * len(windows))


def chunk_squares(model: ModelConfig, length: int) -> int:
    """Return the (query, key) pairs of all layers of a model with chunks, those above the diagonal
    too: the squares of chunks, or of sequences of ``length`` positions."""
    total = 0
    for layer in range(model.num_hidden_layers):
        chunk = min(chunk_of(model, layer) or length, length)
        total += length // chunk * chunk**2 + (length % chunk) ** 2
    return total
