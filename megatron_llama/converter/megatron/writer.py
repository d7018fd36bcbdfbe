"""Writes checkpoints of Megatron-LM and Megatron-LLaMA; ``names`` has the places of tensors."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_llama.checkpoint.checkpoint_dir import TRACKER
from megatron_llama.checkpoint.folders import sync, write_synced
from megatron_llama.checkpoint.model_folders.torch_file import write_torch_file
from megatron_llama.checkpoint.model_folders.write_tasks import WriteTask
from megatron_llama.config.schema import ModelConfig
from megatron_llama.converter.megatron.args import held_problems, make_args
from megatron_llama.converter.megatron.names import (
    CHECKPOINT_VERSION,
    FILE,
    LEGACY,
    TE,
    TP_SIZES,
    file_tensors,
    partition_of,
    their_name,
)
from megatron_llama.converter.tensor_map import MappedTensor, element_count
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.errors import describe
from megatron_llama.model.hf import carried_config


@dataclass(frozen=True)
class MegatronWriter:
    """The format of one of the two families as a ModelWriter."""

    family: str
    """``megatron`` or ``megatron-llama``."""
    tp: int
    split: tuple[int, ...]
    """Number of blocks of each pipeline stage."""
    layout: str = TE
    """The set of Megatron-LM's names: one of ``LAYOUTS``."""

    def problems(self, model: ModelConfig) -> Iterator[str]:
        """Yield the reasons why the program cannot hold the model, or why the model cannot be split
        over so many tensor ranks."""
        layout = LEGACY if self.family == "megatron-llama" else self.layout
        yield from held_problems(model, self.family, layout)
        for name in TP_SIZES:
            size = getattr(model, name)
            if size % self.tp:
                where = f"--tensor-model-parallel-size {self.tp}"
                do = f"give one that divides {size}"
                expected = f"a multiple of {self.tp}"
                yield describe(where, got=f"{name} {size}", expected=expected, do=do)

    def tasks(
        self,
        folder: Path,
        model: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        extra: Mapping[str, Any],
    ) -> Iterator[WriteTask]:
        """Yield a task for each rank's file. The tracker is written at once."""
        layout = LEGACY if self.family == "megatron-llama" else self.layout
        tied = model.tie_word_embeddings
        pp = len(self.split)
        partition = partition_of(self.split, pp)
        args = make_args(model, self.family, dtype, self.tp, self.split, layout)
        args["hf_config"] = carried_config(model, extra, dtype=str(dtype).removeprefix("torch."))
        write_synced(folder / TRACKER, b"release")
        for stage in range(pp):
            for tp_rank in range(self.tp):
                name = f"mp_rank_{tp_rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")
                path = folder / "release" / name / FILE
                path.parent.mkdir(parents=True)
                maps = file_tensors(
                    model,
                    self.family,
                    partition,
                    stage,
                    tp=self.tp,
                    tp_rank=tp_rank,
                    whole_head=self.family == "megatron-llama" and not tied,
                )
                tensors = {
                    their_name(own, layout, self.family, tied=tied): MappedTensor(map, source)
                    for own, map in maps.items()
                }
                rank = tp_rank + self.tp * stage
                content = {
                    # The programs pickle their arguments as argparse has made them.
                    "args": Namespace(**args, rank=rank, stored_ranks=(tp_rank, stage)),
                    "checkpoint_version": CHECKPOINT_VERSION,
                    "iteration": 0,
                    "model": _nested(tensors) if layout == LEGACY else tensors,
                }
                yield WriteTask(element_count(tensors), partial(_write, path, content, dtype))


def _write(path: Path, content: Mapping[str, Any], dtype: torch.dtype) -> None:
    write_torch_file(path, content, dtype)
    for folder in (path.parent, path.parent.parent):
        sync(folder)


def _nested(tensors: Mapping[str, MappedTensor]) -> dict[str, Any]:
    """Return dotted names as the nested dicts of the earlier programs, in which the names below the
    encoder stay whole."""
    root: dict[str, Any] = {}
    for name, tensor in tensors.items():
        encoder = "language_model.encoder."
        keys = (
            ["language_model", "encoder", name.removeprefix(encoder)]
            if name.startswith(encoder)
            else name.split(".")
        )
        inner = root
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = tensor
    return root
