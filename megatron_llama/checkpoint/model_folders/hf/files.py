"""The files of a HuggingFace folder that have its weights."""

from __future__ import annotations

from pathlib import Path

from megatron_llama.checkpoint.storage import refuse
from megatron_llama.config.json_file import read_weight_map
from megatron_llama.errors import CheckpointError, describe

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OLD_SINGLE = "pytorch_model.bin"
OLD_INDEX = "pytorch_model.bin.index.json"
WEIGHT_FILES = (SINGLE, INDEX, OLD_SINGLE, OLD_INDEX)
"""Files that tell where the weights are, preferred first, as in transformers."""
DOWNLOAD = "copy the file again from where the model came from"


def present_weight_files(folder: Path) -> list[Path]:
    """Return those of WEIGHT_FILES that are there; the weights are read from the first one. Raises
    CheckpointError when there is none."""
    present = [folder / name for name in WEIGHT_FILES if (folder / name).is_file()]
    if not present:
        do = "save the model with transformers' save_pretrained, which writes one of them"
        raise CheckpointError(folder, got="no weights", expected=f"{SINGLE} or {INDEX}", do=do)
    return present


def files_named_by(named: Path) -> list[Path]:
    """Return the files of the weights: those that an index names, or ``named`` itself. Raises
    CheckpointError with all that are missing."""
    if named.name not in (INDEX, OLD_INDEX):
        return [named]
    paths = [named.parent / name for name in sorted(set(read_weight_map(named).values()))]
    missing = [
        describe(path, got="no such file", expected=f"it, by {named.name}", do=DOWNLOAD)
        for path in paths
        if not path.is_file()
    ]
    refuse(f"{named.parent} is incomplete:", missing)
    return paths
