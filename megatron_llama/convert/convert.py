"""Any model folder to any format: tensor by tensor from memory-mapped files, without a model or a
process group."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_llama.checkpoint.checkpoint_dir import TOKENIZER
from megatron_llama.checkpoint.checksums import damaged_weights, seal_weights
from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.folders import commit, fresh_staging, recover, staging
from megatron_llama.checkpoint.storage import refuse
from megatron_llama.config.schema import ModelConfig
from megatron_llama.convert.formats import Source
from megatron_llama.convert.hf.files import WRITTEN, hf_jobs
from megatron_llama.convert.jobs import Watched, WriteTask, run_write_tasks
from megatron_llama.convert.tokenizer_files import TOKENIZER_FILES, copy_tokenizer_files
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.errors import CheckpointError

OURS = (
    *(*WRITTEN, *TOKENIZER_FILES, TOKENIZER),
    *(
        "iter_0000000",
        "release",
        "latest_checkpointed_iteration.txt",
        "consolidated.*.pth",
        "params.json",
    ),
)
"""What a conversion may hold, and may therefore replace."""


class Target(Protocol):
    """A format to write, with its choices made."""

    def problems(self, model: ModelConfig) -> Iterator[str]:
        """Why the model cannot be written so."""
        ...

    def jobs(
        self,
        folder: Path,
        model: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        extra: Mapping[str, Any],
    ) -> Iterator[WriteTask]:
        """The work, by files under ``folder``, which is there and empty. ``extra``: fields of a
        config.json beside the model's."""
        ...


@dataclass(frozen=True)
class HFTarget:
    """See Target."""

    max_shard_bytes: int

    def problems(self, model: ModelConfig) -> Iterator[str]:
        """None: every model fits."""
        return iter(())

    def jobs(
        self,
        folder: Path,
        model: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        extra: Mapping[str, Any],
    ) -> Iterator[WriteTask]:
        """See Target."""
        return hf_jobs(
            folder, model, source, dtype, max_shard_bytes=self.max_shard_bytes, extra=extra
        )


def require_free(target: Path, source: Path, *, overwrite: bool) -> None:
    """Raise CheckpointError unless ``target`` may be written: it is not there, empty, or an earlier
    conversion to replace."""
    if target == source or target in source.parents or source in target.parents:
        do = "give another path"
        raise CheckpointError(
            target,
            got=f"a folder that holds, or lies in, the source {source}",
            expected="another",
            do=do,
        )
    if target.exists() and not target.is_dir():
        raise CheckpointError(target, got="a file", expected="a folder", do="give another path")
    names = sorted(entry.name for entry in target.iterdir()) if target.exists() else []
    strange = [name for name in names if not any(fnmatch(name, pattern) for pattern in OURS)]
    if strange:
        do = "give another path"
        raise CheckpointError(
            target,
            got=f"a folder with {', '.join(strange[:3])}",
            expected="an earlier conversion",
            do=do,
        )
    if names and not overwrite:
        do = "give another path, or replace it with --overwrite"
        raise CheckpointError(target, got="a folder that is there already", expected="none", do=do)


def require_sound(folder: str | Path, workers: int) -> None:
    """Raise CheckpointError unless all files of weights are what a list of checksums in their
    folder says, where there is one."""
    refuse(
        f"{folder} is damaged, or its files stand for each other:",
        damaged_weights(Path(folder), workers),
    )


def convert(
    source: Source,
    folder: Path,
    target: Target,
    model: ModelConfig,
    dtype: torch.dtype,
    *,
    tokenizer_files: str,
    workers: int,
    overwrite: bool,
) -> int:
    """Write ``folder``, which appears whole or not at all, and return the bytes of its weights.

    ``tokenizer_files``: folder under ``folder`` for the files that travel along. Raises
    CheckpointError."""
    folder = folder.resolve()
    require_free(folder, source.folder.resolve(), overwrite=overwrite)
    watched = Watched(source)
    try:
        with writing(folder):
            recover(folder)
            fresh = fresh_staging(folder)
            jobs = list(target.jobs(fresh, model, watched, dtype, source.extra))
            watched.show(sum(job.elements for job in jobs) * dtype.itemsize)
            run_write_tasks(jobs, workers)
            if source.tokenizer_files:
                (fresh / tokenizer_files).mkdir(exist_ok=True)
                copy_tokenizer_files(source.tokenizer_files, fresh / tokenizer_files)
            seal_weights(fresh)
            commit(folder)
    finally:
        watched.close()
        shutil.rmtree(staging(folder), ignore_errors=True)
    return watched.bytes
