"""Sliding windows of a model's layers: how far back each of them sees."""

from __future__ import annotations

from megatron_llama.config.schema import ModelConfig

SLIDING = "sliding_attention"
"""The name in ``layer_types`` of a layer with a window."""


def window_of(model: ModelConfig, layer: int) -> int:
    """Return how many positions a query sees in a layer, its own included. 0: all."""
    slides = not model.layer_types or model.layer_types[layer] == SLIDING
    return model.sliding_window if slides else 0


def seen_keys(length: int, window: int) -> int:
    """Return how many pairs of a query and a key that it sees a sequence of ``length`` positions
    has."""
    window = min(window, length) if window else length
    return length * window - window * (window - 1) // 2
