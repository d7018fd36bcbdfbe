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
from megatron_llama.checkpoint.storage import WrittenParts, write_index, write_parts
from megatron_llama.config.schema import Config, ModelConfig, TrainingConfig
from megatron_llama.conversion.safetensors_file import is_finite
from megatron_llama.conversion.write_tasks import WriteTask
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.errors import CheckpointError
from megatron_llama.plans.params import Rectangle, hf_shapes


@dataclass(frozen=True)
class NativeWriter:
    """The native format as a ModelWriter: fp32 masters in chunks, whatever the layout of the run
    that loads them."""

    files: int

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
        """Yield a task for each file and one for the index. ``dtype`` is what the weights are meant
        to be computed in."""
        checkpoint = checkpoint_path(folder, 0)
        checkpoint.mkdir()
        written = list[WrittenParts]()
        parts = [
            part
            for name, shape in hf_shapes(model).items()
            for part in Region.without_values(name, shape).split()
        ]
        share = -(-len(parts) // self.files)

        def write(number: int, own: list[Region]) -> None:
            written.append(write_parts(checkpoint, number, (_read(part, source) for part in own)))

        def finish() -> None:
            index = make_index([[part.write_item() for part in parts]])
            seal(checkpoint, write_index(checkpoint, index, written), META, meta)
            sync(checkpoint)
            write_synced(folder / TRACKER, b"0\n")

        meta = _meta(model, dtype, extra)
        for number in range(self.files):
            own = parts[number * share : (number + 1) * share]
            elements = sum(part.tensor.numel() for part in own)
            yield WriteTask(elements, partial(write, number, own))
        yield WriteTask(0, finish, last=True)


def _read(part: Region, source: WeightSource) -> Region:
    values = torch.empty(part.size)
    source(Rectangle(part.key, part.shape, part.offset, part.size, 0), values)
    if not is_finite(values):
        do = "look at the source: its weights are damaged"
        raise CheckpointError(part.key, got="NaN or infinity", expected="finite values", do=do)
    return replace(part, tensor=values)


def _meta(model: ModelConfig, dtype: torch.dtype, extra: Mapping[str, Any]) -> bytes:
    training = TrainingConfig(bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)
    config = Config(model=model, training=training)
    content = json.loads(meta_json(TrainState(0, 0), 0, [1.0, 0.0, 0.0], config))
    content["model"] |= extra
    return (json.dumps(content, indent=2) + "\n").encode()
