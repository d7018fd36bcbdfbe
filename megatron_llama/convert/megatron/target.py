"""Writes checkpoints of Megatron-LM and Megatron-LLaMA; ``megatron.py`` has their names and
layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_llama.checkpoint.folders import sync, write_synced
from megatron_llama.config.schema import ModelConfig
from megatron_llama.convert.jobs import WriteTask
from megatron_llama.convert.megatron.args import make_args, namespace
from megatron_llama.convert.megatron.names import (
    CHECKPOINT_VERSION,
    FILE,
    LEGACY,
    TE,
    TRACKER,
    local_parts,
    their_name,
)
from megatron_llama.convert.parts import Outgoing, elements_of
from megatron_llama.convert.pickled import write_pickled
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.errors import describe
from megatron_llama.plans.params import Partition


@dataclass(frozen=True)
class MegatronTarget:
    """How a model is laid out in files."""

    family: str
    """``megatron`` or ``megatron-llama``."""
    tp: int
    split: tuple[int, ...]
    """Blocks of each pipeline stage."""
    layout: str = TE
    """Of Megatron-LM's names: one of ``megatron.LAYOUTS``."""

    @property
    def partition(self) -> Partition:
        """The stages."""
        stops = [sum(self.split[: index + 1]) for index in range(len(self.split))]
        layers = tuple(
            range(stop - count, stop) for stop, count in zip(stops, self.split, strict=True)
        )
        return Partition(layers, tuple(range(len(self.split))))

    def problems(self, model: ModelConfig) -> Iterator[str]:
        """Why the model cannot be laid out so."""
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            size = getattr(model, name)
            if size % self.tp:
                where = f"--tensor-model-parallel-size {self.tp}"
                do = f"give one that divides {size}"
                yield describe(
                    where, got=f"{name} {size}", expected=f"a multiple of {self.tp}", do=do
                )

    def jobs(
        self,
        folder: Path,
        model: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        extra: Mapping[str, Any],
    ) -> Iterator[WriteTask]:
        """One for each file under ``folder``, which has the tracker at once. They may run side by
        side."""
        layout = LEGACY if self.family == "megatron-llama" else self.layout
        args = make_args(model, self.family, dtype, self.tp, self.split, layout)
        args["hf_config"] |= extra
        write_synced(folder / TRACKER, b"release")
        for stage in range(len(self.split)):
            for tp_rank in range(self.tp):
                name = f"mp_rank_{tp_rank:02d}" + (f"_{stage:03d}" if len(self.split) > 1 else "")
                path = folder / "release" / name / FILE
                path.parent.mkdir(parents=True)
                tied = model.tie_word_embeddings
                whole = self.family == "megatron-llama" and not tied
                parts = local_parts(
                    model,
                    self.family,
                    self.partition,
                    stage,
                    tp=self.tp,
                    tp_rank=tp_rank,
                    whole_head=whole,
                )
                tensors = {
                    their_name(own, layout, self.family, tied=tied): Outgoing(part, source)
                    for own, part in parts.items()
                }
                ranks = namespace(
                    args, rank=tp_rank + self.tp * stage, stored_ranks=(tp_rank, stage)
                )
                fields = {"args": ranks, "checkpoint_version": CHECKPOINT_VERSION, "iteration": 0}
                content = {**fields, "model": _nested(tensors) if layout == LEGACY else tensors}
                yield WriteTask(elements_of(tensors), partial(_write, path, content, dtype))


def _write(path: Path, content: Mapping[str, Any], dtype: torch.dtype) -> None:
    write_pickled(path, content, dtype)
    for folder in (path.parent, path.parent.parent):
        sync(folder)


def _nested(tensors: Mapping[str, Outgoing]) -> dict[str, Any]:
    """Dotted names as the dicts of the earlier programs, in which the encoder's names stay
    whole."""
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
