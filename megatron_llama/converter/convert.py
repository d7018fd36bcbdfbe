"""Converts any model folder to any format: tensor by tensor from memory-mapped files, without a
model or a process group."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_llama.checkpoint.checkpoint_dir import TOKENIZER, TRACKER
from megatron_llama.checkpoint.checksums import SUMS
from megatron_llama.checkpoint.folders import new_folder, require_replaceable
from megatron_llama.checkpoint.listed_files import ListedFilesCheck, seal_files
from megatron_llama.checkpoint.model_folders.formats import ModelReader, ModelWriter
from megatron_llama.checkpoint.model_folders.hf.writer import EXPORT_FILES
from megatron_llama.checkpoint.model_folders.tokenizer_files import (
    TEMPLATES,
    TOKENIZER_FILES,
    copy_tokenizer_files,
)
from megatron_llama.checkpoint.model_folders.write_tasks import ProgressSource, run_write_tasks
from megatron_llama.config.schema import ModelConfig
from megatron_llama.errors import CheckpointError

CONVERSION_FILES = (
    *EXPORT_FILES,
    *TOKENIZER_FILES,
    *TEMPLATES,
    TOKENIZER,
    "iter_0000000",
    "release",
    TRACKER,
    "consolidated.*.pth",
    "params.json",
)
"""Names that a conversion to any format may contain, and that --overwrite may therefore replace."""


def require_free(target: Path, source: Path, *, overwrite: bool) -> None:
    """Raise CheckpointError unless ``target`` may be written: it is missing, empty, or an earlier
    conversion that is to be replaced."""
    do = "give another path"
    if target == source or target in source.parents or source in target.parents:
        got = f"a folder that holds, or lies in, the source {source}"
        raise CheckpointError(target, got=got, expected="another", do=do)
    if target.exists() and not target.is_dir():
        raise CheckpointError(target, got="a file", expected="a folder", do=do)
    present = require_replaceable(target, CONVERSION_FILES, expected="an earlier conversion")
    if present and not overwrite:
        do = "give another path, or replace it with --overwrite"
        raise CheckpointError(target, got="a folder that is there already", expected="none", do=do)


def require_sound(source: ModelReader, workers: int) -> None:
    """Raise CheckpointError unless the files of a model match the list of checksums in their
    folder, if there is one. A native checkpoint is compared with its own list where it is read."""
    if source.format != "native":
        with ListedFilesCheck(source.folder, workers=workers) as check:
            check.require()


def convert(
    source: ModelReader,
    folder: Path,
    writer: ModelWriter,
    model: ModelConfig,
    dtype: torch.dtype,
    *,
    tokenizer_files: str,
    workers: int,
    overwrite: bool,
) -> int:
    """Write ``folder``, which appears whole or not at all, and return the bytes of its weights.

    ``tokenizer_files`` names the folder under ``folder`` that gets the tokenizer's files. Raises
    CheckpointError."""
    folder = folder.resolve()
    require_free(folder, source.folder.resolve(), overwrite=overwrite)
    progress = ProgressSource(source)
    try:
        with new_folder(folder) as fresh:
            tasks = list(writer.tasks(fresh, model, progress, dtype, source.extra))
            progress.show(sum(task.elements for task in tasks) * dtype.itemsize)
            run_write_tasks(tasks, workers)
            if source.tokenizer_files:
                (fresh / tokenizer_files).mkdir(exist_ok=True)
                copy_tokenizer_files(source.tokenizer_files, fresh / tokenizer_files)
            # A native checkpoint has a list of its own. Beside it only the tokenizer's folder gets
            # one, because a run that goes on there replaces that folder.
            native = any(fresh.glob(f"iter_*/{SUMS}"))
            seal_files(fresh / tokenizer_files if native else fresh, workers)
    finally:
        progress.close()
    return progress.bytes
