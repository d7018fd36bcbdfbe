"""Numbers, words and lists of the wrong kind in every field of every file that has fields."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tools.harm.hostile_inputs.case import (
    CHECKPOINT,
    Change,
    Hostile,
    reseal,
    with_field,
    with_json,
)

WRONG: Mapping[str, object] = MappingProxyType(
    {
        "word": "seven",
        "list": [1],
        "object": {"a": 1},
        "null": None,
        "true": True,
        "negative": -7,
        "fraction": 2.5,
        "nan": math.nan,
        "infinite": math.inf,
        "huge": 10**9,
        "immense": 10**30,
        "surrogate": "\ud800",
    }
)
"""What stands where a number belongs."""
NUMBERS: Mapping[tuple[str, str], tuple[str, ...]] = MappingProxyType(
    {
        ("native", f"{CHECKPOINT}/meta.json"): (
            "iteration",
            "consumed_samples",
            "optimizer_step",
            "seed",
            "model.num_hidden_layers",
            "model.rms_norm_eps",
        ),
        ("hf/convert", "config.json"): (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
            "rms_norm_eps",
            "max_position_embeddings",
            "bos_token_id",
            "rope_theta",
        ),
        ("peft", "adapter_config.json"): ("r", "lora_alpha"),
        ("meta", "params.json"): ("dim", "n_layers", "n_heads", "norm_eps", "multiple_of"),
        ("calibration", "desk.json"): ("format_version",),
        ("token-store", "examples/*/meta.json"): ("format_version",),
    }
)
"""Fields that hold numbers."""
OTHERS: Mapping[tuple[str, str], tuple[str, ...]] = MappingProxyType(
    {
        ("native", f"{CHECKPOINT}/meta.json"): (
            "loss_scale",
            "history",
            "training_data",
            "tokenizer_model",
            "torch_version",
            "model",
            "config",
            "config.training",
        ),
        ("native/export", f"{CHECKPOINT}/meta.json"): ("model.model_type", "hf_config", "config"),
        ("hf/convert", "config.json"): (
            "architectures",
            "model_type",
            "hidden_act",
            "tie_word_embeddings",
            "rope_scaling",
            "rope_parameters",
            "eos_token_id",
        ),
        ("hf/convert", "generation_config.json"): ("eos_token_id",),
        ("hf/generate", "generation_config.json"): ("eos_token_id", "bos_token_id"),
        ("hf/convert", "tokenizer_config.json"): ("chat_template", "eos_token", "add_bos_token"),
        ("hf/convert", "model.safetensors.index.json"): ("weight_map", "metadata"),
        ("peft", "adapter_config.json"): (
            "target_modules",
            "peft_type",
            "rank_pattern",
            "alpha_pattern",
            "bias",
            "use_rslora",
            "modules_to_save",
        ),
        ("torch_dist", f"{CHECKPOINT}/metadata.json"): ("sharded_backend",),
        ("dataset/train", "d.meta.json"): ("tokens", "documents", "fingerprint"),
        ("calibration", "desk.json"): ("gpu", "kernels"),
    }
)
"""Fields that hold something else, or several kinds."""
OF_OTHERS = ("word", "list", "object", "true", "negative", "nan", "surrogate")


_REAL = ("fraction", "huge", "immense")
POSSIBLE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "rms_norm_eps": _REAL,
        "norm_eps": _REAL,
        "lora_alpha": _REAL,
        "rope_theta": (*_REAL, "null"),
        "max_position_embeddings": ("huge", "null"),
        "bos_token_id": ("null",),
        "eos_token_id": ("null", "list"),
        "tie_word_embeddings": ("true",),
        "add_bos_token": ("true",),
        "use_rslora": ("true",),
        "torch_version": ("word",),
        "tokenizer_model": ("word",),
        "eos_token": ("word",),
        "chat_template": ("word",),
        "architectures": ("word", "list"),
    }
)
"""Values that are possible all the same; for other fields, one that is merely large."""


def cases() -> Iterator[Hostile]:
    """Yield a case for each field and wrong value, and for each file of another kind."""
    for table, values in ((NUMBERS, tuple(WRONG)), (OTHERS, OF_OTHERS)):
        for (format, file), fields in table.items():
            for field in fields:
                for value in values:
                    name = f"{file} {field} {value}"
                    change = with_field(file, field, WRONG[value])
                    possible = value in POSSIBLE.get(field.rpartition(".")[2], ("huge",))
                    yield Hostile(name, format, change, may_be_taken=possible)
    for format, file in {**NUMBERS, **OTHERS}:
        for value in ("word", "list", "null", "nan"):
            yield Hostile(f"{file} is {value}", format, _instead(file, WRONG[value]))
    speeds: tuple[object, ...] = (0, -1, 1e308, 5e-324, "fast", None, math.nan, [1], 10**400)
    for speed in speeds:
        edit = _every_number(speed)
        yield Hostile(f"every speed {str(speed)[:12]}", "calibration", with_json("desk.json", edit))
    yield from _headers()


def _instead(file: str, value: object) -> Change:
    def change(folder: Path) -> None:
        sorted(folder.glob(file))[0].write_text(json.dumps(value))
        reseal(folder)

    return change


def _every_number(value: object) -> Any:
    def edit(content: Any) -> Any:
        if isinstance(content, dict):
            return {name: edit(inner) for name, inner in content.items()}
        if isinstance(content, list):
            return [edit(inner) for inner in content]
        return value if isinstance(content, float) else content

    return edit


def _headers() -> Iterator[Hostile]:
    """Headers of safetensors that lie."""
    for what, entry in (
        ("no dimensions", {"shape": []}),
        ("a size of 2**40", {"shape": [2**40, 32]}),
        ("a negative size", {"shape": [-300, -32]}),
        ("integers", {"dtype": "I32"}),
        ("flags", {"dtype": "BOOL"}),
        ("an unknown dtype", {"dtype": "F3"}),
        ("offsets backwards", {"data_offsets": [64, 0]}),
        ("offsets beyond the end", {"data_offsets": [0, 2**40]}),
        ("offsets that are words", {"data_offsets": ["a", "b"]}),
        ("no offsets", {"data_offsets": None}),
    ):
        for format in ("hf/convert", "hf", "peft"):
            yield Hostile(f"safetensors with {what}", format, _with_entry(entry))
    for length in (0, 2**31, 2**63 - 1, 2**64 - 1):
        for format in ("hf/convert", "peft"):
            yield Hostile(f"safetensors header of {length}", format, _with_length(length))


def _weights(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def _with_entry(entry: Mapping[str, object]) -> Change:
    def change(folder: Path) -> None:
        path = _weights(folder)
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        first = next(name for name in header if name != "__metadata__")
        header[first] |= entry
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
        reseal(folder)

    return change


def _with_length(length: int) -> Change:
    def change(folder: Path) -> None:
        path = _weights(folder)
        path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
        reseal(folder)

    return change
