"""The files and fields that a run keeps of the folder of its first weights, and those that it
leaves behind."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from megatron_llama.checkpoint.carried import (
    NO_FILES,
    Carried,
    changed_fields,
    end_tokens,
    read_carried,
    with_end_tokens,
)
from megatron_llama.checkpoint.model_folders.formats import hf_weights
from megatron_llama.config.schema import Config
from megatron_llama.data.tokenizer.base import Tokenizer
from megatron_llama.model.hf import carried_config
from megatron_llama.train.setup.start import Start


def carried_files(
    config: Config, start: Start | None, tokenizer: Tokenizer | None
) -> tuple[Carried, list[str]]:
    """Return the files for checkpoints and exports beside the model of a run that begins at
    ``start`` or with --init-from-hf, and a line for each file and field that is left behind. Raises
    CheckpointError."""
    folder = config.checkpoint.init_from_hf
    lines: list[str] = []
    if start is not None:
        carried = start.carried(config.model)
        where = f"{start.path}"
    elif folder is not None:
        carried = read_carried(folder)
        where = folder
        ignored = config.checkpoint.ignore_hf_config_fields
        weights = hf_weights(folder, ignored=ignored)
        lines += weights.notes
        left_out = weights.files_left_out(_names_of(tokenizer))
        if left_out:
            lines.append(f"{where}: checkpoints and exports leave out {', '.join(left_out)}")
    else:
        return NO_FILES, []
    model = config.model
    if not carried.hf_config:
        return carried, lines
    written = carried_config(model, carried.hf_config, dtype="float32")
    lines += changed_fields(carried.hf_config, written, f"exports: {where}/config.json")
    new = [] if model.eos_token_id is None else [model.eos_token_id]
    if not set(new) <= set(end_tokens(carried.hf_config, where)):
        generation = with_end_tokens(carried.generation, new, where)
        lines += changed_fields(
            carried.generation, generation, f"exports: {where}/generation_config.json"
        )
        carried = replace(carried, generation=generation)
    return carried, lines


def _names_of(tokenizer: Tokenizer | None) -> list[str]:
    """Return the names of the files of a tokenizer's copy."""
    if tokenizer is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_hf(folder)
        return [path.name for path in Path(folder).iterdir()]
