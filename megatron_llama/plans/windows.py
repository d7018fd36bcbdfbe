"""Sliding windows of a model's layers: how far back each of them sees."""

from __future__ import annotations

from megatron_llama.config.schema import ModelConfig

SLIDING = "sliding_attention"
"""The name in ``layer_types`` of a layer with a window."""


def window_of(model: ModelConfig, layer: int) -> int:
    """Return how many positions a query sees in a layer, its own included. 0: all."""
    slides = not model.layer_types or model.layer_types[layer] == SLIDING
    return model.sliding_window if slides else 0


def layer_windows(model: ModelConfig) -> tuple[int, ...]:
    """Return the window of each layer."""
    return tuple(window_of(model, layer) for layer in range(model.num_hidden_layers))


def score_share(model: ModelConfig, length: int) -> float:
    """Return the attention scores of all layers, as a share of those that they would have without
    windows: of the half of the square below its diagonal."""
    if not model.sliding_window:
        return 1.0
    windows = [min(window or length, length) for window in layer_windows(model)]
    return sum(2 * length * window - window**2 for window in windows) / (length**2 * len(windows))


def context_share(model: ModelConfig, length: int) -> float:
    """Return the tokens whose keys and values a context-parallel rank receives in all layers, as a
    share of what it would receive without windows: each of its two chunks needs what its first
    window reaches."""
    if not model.sliding_window:
        return 1.0
    received = [
        min(1.0, 2 * (window - 1) / length) if window else 1.0 for window in layer_windows(model)
    ]
    return sum(received) / len(received)
