"""Sliding windows in the spellings of HuggingFace's families."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_llama.config.fields import shown
from megatron_llama.config.limits import LARGEST_LAYERS
from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.families.reader import ConfigReader
from megatron_llama.model.windows import FULL, LAYER_TYPES, SLIDING, layer_windows, normal_windows


@dataclass(frozen=True)
class Windows:
    """A spelling of windows in the ``config.json`` of a family."""

    read: Callable[[ConfigReader], tuple[int, tuple[str, ...]]]
    """Returns sliding_window and layer_types in their normal form."""
    write: Callable[[ModelConfig], Mapping[str, Any]]


def _types(reader: ConfigReader, derived: Callable[[int], Sequence[str]]) -> tuple[str, ...]:
    """Return the kind of each layer: as listed, or else as transformers derives it."""
    layers = reader.size("num_hidden_layers", high=LARGEST_LAYERS)
    listed = reader.value("layer_types", None)
    # A list cannot be compared with a number of layers that was refused (0).
    if listed is None or layers == 0:
        return tuple(derived(layers))
    if (
        not isinstance(listed, list)
        or len(listed) != layers
        or not all(isinstance(kind, str) and kind in LAYER_TYPES for kind in listed)
    ):
        expected = f"{layers} of {FULL} and {SLIDING}, one for each layer"
        reader.problem("layer_types", shown(listed), expected, "copy the model's own config.json")
        return (FULL,) * layers
    return tuple(listed)


def _read_none(reader: ConfigReader) -> tuple[int, tuple[str, ...]]:
    return 0, ()


def _write_none(model: ModelConfig) -> Mapping[str, Any]:
    return {}


def _read_every(reader: ConfigReader) -> tuple[int, tuple[str, ...]]:
    window = reader.size("sliding_window", default=0)
    kind = SLIDING if window else FULL
    if reader.switch("use_sliding_window", default=bool(window)) != bool(window):
        got = f"false with sliding_window {window}" if window else "true without a sliding_window"
        reader.problem("use_sliding_window", got, "the same of both", "remove the wrong one")
    types = _types(reader, lambda layers: [kind] * layers)
    if any(layer_type != kind for layer_type in types):
        expected = f"{kind} for each layer, since sliding_window is {window or 'null'}"
        reader.problem("layer_types", list(types), expected, "such models are not supported")
    return window, ()


def _write_every(model: ModelConfig) -> Mapping[str, Any]:
    return {"sliding_window": model.sliding_window or None}


def _read_last(reader: ConfigReader) -> tuple[int, tuple[str, ...]]:
    first = reader.integer("max_window_layers", default=0)
    window = reader.size("sliding_window", default=0)
    if not reader.switch("use_sliding_window"):
        window = 0

    def derived(layers: int) -> list[str]:
        return [SLIDING if window and layer >= first else FULL for layer in range(layers)]

    types = _types(reader, derived)
    if SLIDING in types and not window:
        expected = f"{FULL} for each layer, since no window is switched on"
        reader.problem("layer_types", list(types), expected, "such models are not supported")
    return normal_windows(window, types)


def _write_last(model: ModelConfig) -> Mapping[str, Any]:
    windows = layer_windows(model)
    return {
        "use_sliding_window": any(windows),
        "sliding_window": model.sliding_window or None,
        # The first layer with a window: transformers before 4.53 does not know layer_types.
        "max_window_layers": next((n for n, window in enumerate(windows) if window), len(windows)),
        "layer_types": [SLIDING if window else FULL for window in windows],
    }


def _read_pattern(every: int, reader: ConfigReader) -> tuple[int, tuple[str, ...]]:
    window = reader.size("sliding_window", default=0)

    def derived(layers: int) -> list[str]:
        return [SLIDING if (layer + 1) % max(every, 1) else FULL for layer in range(layers)]

    types = _types(reader, derived)
    if SLIDING in types and not window:
        reader.problem("sliding_window", "null", "a number, by the layers", "give the window")
    return normal_windows(window, types)


def _read_own_pattern(usual: int, reader: ConfigReader) -> tuple[int, tuple[str, ...]]:
    every = reader.size("sliding_window_pattern", default=usual)
    # transformers writes this field and derives nothing from it.
    written = reader.value("_sliding_window_pattern", None)
    if written not in (None, every) and reader.value("layer_types", None) is None:
        expected = f"sliding_window_pattern {every}, or layer_types"
        reader.problem("_sliding_window_pattern", written, expected, "give layer_types")
    return _read_pattern(every, reader)


def _write_pattern(model: ModelConfig) -> Mapping[str, Any]:
    types = [SLIDING if window else FULL for window in layer_windows(model)]
    return {"sliding_window": model.sliding_window or 4096, "layer_types": types}


NO_WINDOWS = Windows(_read_none, _write_none)
"""As in LLaMA, which has none."""
EVERY_LAYER = Windows(_read_every, _write_every)
"""As in Mistral: sliding_window counts in each layer."""
LAST_LAYERS = Windows(_read_last, _write_last)
"""As in Qwen: use_sliding_window switches it on, from layer max_window_layers on."""
EVERY_OTHER = Windows(partial(_read_pattern, 2), _write_pattern)
"""As in Gemma 2: every second layer sees all."""
ALL_BUT_EVERY_SIXTH = Windows(partial(_read_own_pattern, 6), _write_pattern)
"""As in Gemma 3: every sixth layer sees all, or each sliding_window_pattern-th."""
