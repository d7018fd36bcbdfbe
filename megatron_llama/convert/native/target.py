"""Writes native checkpoints that hold weights only: a run that loads one starts at iteration 0,
with a fresh optimizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_llama.checkpoint.checkpoint_dir import TRACKER, checkpoint_path
from megatron_llama.checkpoint.checksums import seal
from megatron_llama.checkpoint.chunks import Region, make_index
from megatron_llama.checkpoint.folders import sync, write_synced
from megatron_llama.checkpoint.meta import META, TrainState, meta_json
from megatron_llama.checkpoint.storage import Written, write_index, write_parts
from megatron_llama.config.schema import Config, ModelConfig, TrainingConfig
from megatron_llama.convert.jobs import WriteTask
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.plans.params import Rectangle, hf_shapes


@dataclass(frozen=True)
class NativeTarget:
    """How a model is laid out in files: fp32 masters in chunks, whatever the layout of the run that
    loads them."""

    files: int

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
        """One for each file under ``folder``, and the index. ``dtype``: what the weights are meant
        to be computed in."""
        checkpoint = checkpoint_path(folder, 0)
        written = list[Written]()
        checkpoint.mkdir()
        parts = [
            part
            for name, shape in hf_shapes(model).items()
            for part in _unread(name, shape).split()
        ]
        share = -(-len(parts) // self.files)
        for number in range(self.files):
            own = parts[number * share : (number + 1) * share]
            elements = sum(part.tensor.numel() for part in own)
            yield WriteTask(elements, partial(_write, checkpoint, number, own, source, written))
        yield WriteTask(
            0, partial(_finish, checkpoint, parts, written, _meta(model, dtype, extra)), last=True
        )


def _unread(name: str, shape: tuple[int, ...]) -> Region:
    """A whole tensor of which only the size is there yet."""
    return Region(name, shape, (0,) * len(shape), shape, torch.empty(()).expand(shape))


def _write(
    folder: Path, number: int, parts: list[Region], source: WeightSource, written: list[Written]
) -> None:
    written.append(write_parts(folder, number, (_read(part, source) for part in parts)))


def _read(part: Region, source: WeightSource) -> Region:
    values = torch.empty(part.size)
    source(Rectangle(part.key, part.shape, part.offset, part.size, 0), values)
    return replace(part, tensor=values)


def _finish(folder: Path, parts: list[Region], written: list[Written], meta: bytes) -> None:
    sums = write_index(folder, make_index([[part.write_item() for part in parts]]), written)
    seal(folder, sums, META, meta)
    sync(folder)
    write_synced(folder.parent / TRACKER, b"0\n")


def _meta(model: ModelConfig, dtype: torch.dtype, extra: Mapping[str, Any]) -> bytes:
    training = TrainingConfig(bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)
    content = json.loads(
        meta_json(TrainState(0, 0), 0, [1.0, 0.0, 0.0], Config(model=model, training=training))
    )
    content["model"] |= extra
    return (json.dumps(content, indent=2) + "\n").encode()
