"""Keeps a copy of a tokenizer beside a dataset."""

from __future__ import annotations

import shutil
from pathlib import Path

from megatron_llama.data.tokenizer.files import read_tokenizer_file
from megatron_llama.data.tokenizer.load import usual_name
from megatron_llama.data.tokenizer.settings import files_beside
from megatron_llama.files import replace_file

RANKS_BESIDE = "params.json"
"""A file that tells to which LLaMA a file of ranks belongs."""


def copy_tokenizer(file: Path, folder: Path) -> None:
    """Copy a tokenizer, and the files beside it that belong to it, into a folder of its own, which
    replaces an older one. A tokenizer in that folder stays as it is."""
    copy = copied_path(file, folder)
    if copy == file:
        return
    content = {**files_beside(file), copy.name: read_tokenizer_file(file)}
    if (beside := file.with_name(RANKS_BESIDE)).is_file():
        content[RANKS_BESIDE] = read_tokenizer_file(beside)
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in content.items():
        replace_file(folder / name, data)


def copied_path(file: Path, folder: Path) -> Path:
    """Return the path to which ``copy_tokenizer`` copies a tokenizer: a file of the usual name, or
    ``file`` itself if it is there."""
    if file.resolve().parent == folder.resolve():
        return file
    return folder / (usual_name(file) or file.name)
