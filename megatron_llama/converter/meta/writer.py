"""Writes Meta's own checkpoints; ``names`` has the places of their tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_llama.checkpoint.folders import write_synced
from megatron_llama.checkpoint.model_folders.model_fields import kind_problems
from megatron_llama.checkpoint.model_folders.torch_file import write_torch_file
from megatron_llama.checkpoint.model_folders.write_tasks import WriteTask
from megatron_llama.config.schema import ModelConfig
from megatron_llama.converter.meta.names import (
    HF_EMBEDDING,
    OUTPUT,
    PARAMS,
    file_tensors,
    make_params,
    split_problems,
)
from megatron_llama.converter.tensor_map import MappedTensor, element_count
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.model.hf import carried_config

ROW_CUT_VOCABULARY = 128_000
"""Smallest vocabulary of a LLaMA 3, whose code cuts the embedding by rows."""


@dataclass(frozen=True)
class MetaWriter:
    """Meta's format as a ModelWriter."""

    files: int

    def problems(self, model: ModelConfig) -> Iterator[str]:
        """Yield the reasons why the format cannot hold the model, or why the model cannot be cut
        into so many files."""
        yield from kind_problems("meta", model)
        yield from split_problems(model, self.files)

    def tasks(
        self,
        folder: Path,
        model: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        extra: Mapping[str, Any],
    ) -> Iterator[WriteTask]:
        """Yield a task for each file of weights. The small files are written at once."""
        config = carried_config(model, extra, dtype=str(dtype).removeprefix("torch."))
        for name, content in ((PARAMS, make_params(model)), ("config.json", config)):
            write_synced(folder / name, (json.dumps(content, indent=2) + "\n").encode())
        by_rows = model.vocab_size >= ROW_CUT_VOCABULARY
        for rank in range(self.files):
            maps = file_tensors(model, self.files, rank, by_rows=by_rows)
            if model.tie_word_embeddings:  # their code always reads a head: the embedding again
                head = maps[OUTPUT]
                pieces = tuple(replace(piece, name=HF_EMBEDDING) for piece in head.slices)
                maps[OUTPUT] = replace(head, slices=pieces)
            tensors = {name: MappedTensor(map, source) for name, map in maps.items()}
            path = folder / f"consolidated.{rank:02d}.pth"
            write = partial(write_torch_file, path, tensors, dtype)
            yield WriteTask(element_count(tensors), write)
