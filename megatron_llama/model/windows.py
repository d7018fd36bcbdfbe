"""Sliding windows and chunks: the layers of a model that have some."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_llama.config.schema import ModelConfig

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
LAYER_TYPES = (FULL, SLIDING, CHUNKED)


def window_of(model: ModelConfig, layer: int) -> int:
    """Return the number of positions that a query sees in a layer, its own included. 0: all."""
    slides = not model.layer_types or model.layer_types[layer] == SLIDING
    return model.sliding_window if slides else 0


def chunk_of(model: ModelConfig, layer: int) -> int:
    """Return the positions of a chunk in a layer. 0: it has no chunks, and does not rotate if other
    layers have some."""
    has_chunks = not model.layer_types or model.layer_types[layer] == CHUNKED
    return model.attention_chunk_size if has_chunks else 0


def layer_windows(model: ModelConfig) -> tuple[int, ...]:
    """Return the window of each layer."""
    return tuple(window_of(model, layer) for layer in range(model.num_hidden_layers))


def normal_windows(window: int, types: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    """Return (sliding_window, layer_types) in their normal form: no types if all layers are alike,
    and no window if no layer has one. Layers that slide have a window. Kinds with chunks stay."""
    if CHUNKED in types:
        return window, tuple(types) if {*types} != {CHUNKED} else ()
    if not window or (types and SLIDING not in types):
        return 0, ()
    return window, tuple(types) if FULL in types else ()
