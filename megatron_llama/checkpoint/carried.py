"""Files of the HuggingFace folder that a run began with, which it keeps beside the numbers of the
model: ``config.json`` and ``generation_config.json``. An export gives both back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_llama.checkpoint.folders import write_synced
from megatron_llama.config.fields import read_fields, shown
from megatron_llama.config.json_file import read_json_object
from megatron_llama.config.model_files import is_there
from megatron_llama.data.tokenizer.base import Tokenizer
from megatron_llama.errors import CheckpointError
from megatron_llama.model.families.reader import LARGEST as LARGEST_ID
from megatron_llama.model.hf import TOKEN_IDS, read_config_json
from megatron_llama.model.hf_fields import GENERATION_FIELDS

GENERATION = "generation_config.json"
NUMBERS = (
    *("max_length", "max_new_tokens", "min_length", "num_beams", "num_return_sequences", "top_k"),
    *("typical_p", "length_penalty", "diversity_penalty", "min_p"),
    *("temperature", "top_p", "repetition_penalty"),
)
"""Numbers of generation_config.json. They are not used here, and other programs have meanings for
many of their values (-1 is no top_k for vLLM), but JSON has no number that is not finite."""


@dataclass(frozen=True)
class Carried:
    """The fields of both files; empty where there is no such file."""

    hf_config: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)


NO_FILES = Carried()


def read_generation(folder: Path) -> dict[str, Any]:
    """Return the fields of a folder's ``generation_config.json``; none without that file. Raises
    CheckpointError."""
    path = folder / GENERATION
    if not is_there(path):
        return {}
    fields = read_json_object(path)
    end_tokens(fields, str(path))
    require_generation(fields, path)
    return fields


def require_generation(content: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError for a value of ``NUMBERS`` in a ``generation_config.json`` that is no
    number. All other values are carried as they are."""
    with read_fields(content, path) as fields:
        for name in NUMBERS:
            fields.number(name, default=None, null=True)


def read_carried(folder: str | Path) -> Carried:
    """Return the contents of both files of a HuggingFace folder. Raises CheckpointError."""
    hf_config = read_config_json(Path(folder) / "config.json")
    generation = read_generation(Path(folder)) or derived_generation(hf_config)
    return Carried(hf_config, generation)


def derived_generation(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generation config that transformers derives from a ``config.json``."""
    names = [*TOKEN_IDS, *sorted(GENERATION_FIELDS & hf_config.keys())]
    if hf_config.get("use_cache") is False:  # true is the default of generate()
        names.append("use_cache")
    fields = {name: hf_config[name] for name in names if hf_config.get(name) is not None}
    return {"_from_model_config": True, **fields}


def end_tokens(fields: Mapping[str, Any], where: str) -> list[int]:
    """Return the tokens that end a text, by ``eos_token_id``: an id, a list of them or null. Raises
    CheckpointError for anything else; ``where`` names the file."""
    value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(id) is int and 0 <= id <= LARGEST_ID for id in ids):
        expected = "a token id or a list of them"
        do = "copy the model's own file"
        raise CheckpointError(f"{where} eos_token_id", got=shown(value), expected=expected, do=do)
    return list(ids)


def with_end_tokens(fields: Mapping[str, Any], ids: list[int], where: str) -> dict[str, Any]:
    """Return the fields of a generation config that also ends texts at these tokens."""
    known = end_tokens(fields, where)
    more = [id for id in ids if id not in known]
    return {**fields, "eos_token_id": [*known, *more]} if more else dict(fields)


def save_tokenizer(
    tokenizer: Tokenizer | None, folder: Path, generation: Mapping[str, Any]
) -> None:
    """Write a tokenizer's files, and a ``generation_config.json`` with the fields of ``generation``
    and of the tokenizer's own, and with the end tokens of both. Raises DataError."""
    path = folder / GENERATION
    if generation:
        # A chat template adds to this file the token that ends its answers.
        write_synced(path, _json(generation))
    if tokenizer is not None:
        tokenizer.save_hf(folder)
    if generation:
        own = read_generation(folder)
        ends = end_tokens(own, str(path))
        merged = with_end_tokens(generation, ends, GENERATION)
        given = {name: value for name, value in own.items() if name != "eos_token_id"}
        if (whole := {**merged, **given}) != own:  # else the file stays as it was written
            write_synced(path, _json(whole))


def changed_fields(before: Mapping[str, Any], now: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield a line for each field that another file of the same name lacks, or has with another
    value. The dtype is left out, since each file chooses its own."""
    for name, value in before.items():
        if name in ("torch_dtype", "dtype"):
            continue
        if name not in now:
            yield f"{where} {name} {json.dumps(value)}: left out"
        elif now[name] != value:
            yield f"{where} {name} {json.dumps(value)}: written as {json.dumps(now[name])}"


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(dict(content), indent=2) + "\n").encode()
