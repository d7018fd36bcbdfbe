"""Writes HuggingFace folders, for ``AutoModelForCausalLM.from_pretrained``: the format in which
trained models are handed on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_llama.checkpoint.carried import NO_FILES, Carried, derived_generation, save_tokenizer
from megatron_llama.checkpoint.folders import new_folder, require_replaceable, sync, write_synced
from megatron_llama.checkpoint.listed_files import seal_files
from megatron_llama.checkpoint.model_folders.hf.files import INDEX, SINGLE
from megatron_llama.checkpoint.model_folders.safetensors_file import is_exported, write_safetensors
from megatron_llama.checkpoint.model_folders.tokenizer_files import with_end_tokens
from megatron_llama.checkpoint.model_folders.write_tasks import WriteTask
from megatron_llama.config.model_files import SUMS
from megatron_llama.config.schema import ModelConfig
from megatron_llama.data.tokenizer.base import Tokenizer
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.errors import CheckpointError
from megatron_llama.model.families import FAMILIES
from megatron_llama.model.hf import carried_config
from megatron_llama.model.plan.params import hf_shapes

SHARD_BYTES = 5_000_000_000
EXPORT_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    INDEX,
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates",
    SUMS,
)
"""Names that an export, or a conversion to this format, may contain."""


@dataclass(frozen=True)
class HFWriter:
    """HuggingFace's format as a ModelWriter."""

    max_shard_bytes: int = SHARD_BYTES
    """Largest size of a file, unless a single tensor is larger."""
    is_export: bool = False
    """Whether the files are marked as those of an export, which a later one may replace."""

    def problems(self, model: ModelConfig) -> Iterator[str]:
        """Yield nothing: every model fits."""
        return iter(())

    def tasks(
        self,
        folder: Path,
        model: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        extra: Mapping[str, Any],
    ) -> Iterator[WriteTask]:
        """Yield a task for each weight file. The small files are written at once."""
        shapes = hf_shapes(model)
        if FAMILIES[model.model_type].stacked_experts:
            from megatron_llama.checkpoint.model_folders.hf import stacked_experts  # of few models

            shapes = stacked_experts.stacked_shapes(model)
            source = stacked_experts.StackedExperts(source, model)
        files = _plan_files(shapes, dtype, self.max_shard_bytes)
        if len(files) > 1:
            elements = sum(math.prod(shape) for file in files.values() for shape in file.values())
            file_of = {tensor: name for name, shapes in files.items() for tensor in shapes}
            total = {"total_size": elements * dtype.itemsize}
            write_synced(folder / INDEX, _json({"metadata": total, "weight_map": file_of}))
        config = carried_config(model, extra, dtype=str(dtype).removeprefix("torch."))
        write_synced(folder / "config.json", _json(config))
        write_synced(folder / "generation_config.json", _json(derived_generation(config)))
        for name, shapes in files.items():
            elements = sum(math.prod(shape) for shape in shapes.values())
            write = partial(
                write_safetensors, folder / name, shapes, dtype, source, is_export=self.is_export
            )
            yield WriteTask(elements, write)


def export_hf(
    folder: str | Path,
    model: ModelConfig,
    source: WeightSource,
    dtype: str,
    tokenizer: Tokenizer | None = None,
    *,
    max_shard_bytes: int = SHARD_BYTES,
    sources: Iterable[str | Path] = (),
    carried: Carried = NO_FILES,
    overwrite: bool = False,
) -> Path:
    """Write a folder for ``AutoModelForCausalLM.from_pretrained`` and return its path. It appears
    whole or not at all.

    ``model`` has its derived fields filled in. ``dtype`` is ``float32`` (bit-exact), ``bfloat16``
    or ``float16``. ``carried`` has the files that the model came with. At most 64 MiB of weights
    are in memory at a time. For what may be replaced see ``require_export``. Raises
    CheckpointError."""
    target = Path(folder).resolve()
    require_export(target, sources, overwrite=overwrite)
    if tokenizer is not None:
        # Tokens added behind the vocabulary are not the model's, but they do no harm.
        if tokenizer.base_vocab_size > model.vocab_size:
            raise CheckpointError(
                "tokenizer",
                got=f"{tokenizer.vocab_size} tokens",
                expected=f"at most the model's vocab_size {model.vocab_size}",
                do="give the tokenizer of the training data",
            )
        model = with_end_tokens(model, carried.hf_config, tokenizer)
    with new_folder(target) as fresh:
        for task in HFWriter(max_shard_bytes, is_export=True).tasks(
            fresh, model, source, getattr(torch, dtype), carried.hf_config
        ):
            task.run()
        save_tokenizer(tokenizer, fresh, carried.generation)
        for path in fresh.rglob("*"):
            sync(path)
        seal_files(fresh)
    return target


def require_export(
    target: Path,
    sources: Iterable[str | Path] = (),
    *,
    overwrite: bool = False,
    files: Sequence[str] = EXPORT_FILES,
    config: str = "config.json",
) -> None:
    """Raise CheckpointError unless an export may write the folder.

    It may replace an export of this program, so that one command line serves every restart of a
    run. With ``overwrite`` it may replace any folder whose files have these names, ``config`` among
    them. It never replaces one of ``sources``, from which the weights came."""
    for source in map(Path, sources):
        if target.exists() and source.exists() and target.samefile(source):
            raise CheckpointError(
                target,
                got="the folder from which the run took its weights",
                expected="another one, since an export would replace them",
                do="give another folder",
            )
    expected = "no folder, an empty one or an earlier export"
    present = require_replaceable(target, files, expected=expected, marker=config)
    weights = list(target.glob("*.safetensors"))
    if present and not overwrite and not (weights and all(map(is_exported, weights))):
        got = "a model that no export of this program has written"
        do = "give another folder; only the command export replaces this one, with --overwrite"
        raise CheckpointError(target, got=got, expected=expected, do=do)


def _plan_files(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_bytes: int
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the files by name, each with the shapes of its tensors."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    room = max_bytes
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if size > room and shards[-1]:
            shards.append({})
            room = max_bytes
        shards[-1][name] = shape
        room -= size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard
        for number, shard in enumerate(shards, 1)
    }


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
