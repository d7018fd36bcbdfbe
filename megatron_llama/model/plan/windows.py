"""Savings of sliding windows."""

from __future__ import annotations

from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.windows import layer_windows


def score_share(model: ModelConfig, length: int) -> float:
    """Return the attention scores of all layers, as a share of those that they would have without
    windows: of the half of the square below its diagonal."""
    if not model.sliding_window:
        return 1.0
    windows = [min(window or length, length) for window in layer_windows(model)]
    return sum(2 * length * window - window**2 for window in windows) / (length**2 * len(windows))
