"""Sliding windows: the layers of a model that have one."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_llama.config.schema import ModelConfig

FULL = "full_attention"
SLIDING = "sliding_attention"
LAYER_TYPES = (FULL, SLIDING)


def window_of(model: ModelConfig, layer: int) -> int:
    """Return the number of positions that a query sees in a layer, its own included. 0: all."""
    slides = not model.layer_types or model.layer_types[layer] == SLIDING
    return model.sliding_window if slides else 0


def layer_windows(model: ModelConfig) -> tuple[int, ...]:
    """Return the window of each layer."""
    return tuple(window_of(model, layer) for layer in range(model.num_hidden_layers))


def normal_windows(window: int, types: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    """Return (sliding_window, layer_types) in their normal form: no types if all layers are alike,
    and no window if no layer has one. Layers that slide have a window."""
    if not window or (types and SLIDING not in types):
        return 0, ()
    return window, tuple(types) if FULL in types else ()
