"""Writes native checkpoints. With an optimizer's state a run goes on from them; with weights only
it starts at iteration 0, with a fresh optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_llama.checkpoint.checkpoint_dir import TRACKER, checkpoint_path
from megatron_llama.checkpoint.checksums import seal
from megatron_llama.checkpoint.chunks import Region, make_index, state_key
from megatron_llama.checkpoint.finite import is_finite
from megatron_llama.checkpoint.folders import sync, write_synced
from megatron_llama.checkpoint.meta import META, TrainState, meta_json
from megatron_llama.checkpoint.model_folders.optimizer_state import OptimizerState
from megatron_llama.checkpoint.model_folders.write_tasks import ProgressSource, WriteTask
from megatron_llama.checkpoint.storage import WrittenParts, write_index, write_parts
from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.errors import CheckpointError
from megatron_llama.model.plan.params import hf_shapes


@dataclass(frozen=True)
class NativeWriter:
    """The native format as a ModelWriter: fp32 masters in chunks, whatever the layout of the run
    that loads them."""

    files: int
    state: OptimizerState | None = None
    """The optimizer's state to write. Its masters take the place of the weights."""

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
        """Yield a task for each file and one for the index. ``dtype`` is the one that a run is to
        compute in."""
        iteration = self.state.iteration if self.state is not None else 0
        checkpoint = checkpoint_path(folder, iteration)
        checkpoint.mkdir()
        written = list[WrittenParts]()
        sources = {"master": source}
        if self.state is not None:
            counted = source.beside if isinstance(source, ProgressSource) else None
            sources = {
                state: counted(values) if counted is not None else values
                for state, values in self.state.sources.items()
            }
        parts = [
            (state, region)
            for name, shape in hf_shapes(model).items()
            for state in sources
            for region in Region.without_values(name, shape).split()
        ]
        share = -(-len(parts) // self.files)

        def read(state: str, part: Region) -> Region:
            values = torch.empty(part.size)
            sources[state](Rectangle(part.key, part.shape, part.offset, part.size, 0), values)
            key = state_key(state, part.key)
            if not is_finite(values):
                do = "look at the source: its values are damaged"
                raise CheckpointError(key, got="NaN or infinity", expected="finite values", do=do)
            return replace(part, key=key, tensor=values)

        def write(number: int, own: list[tuple[str, Region]]) -> None:
            written.append(write_parts(checkpoint, number, (read(*entry) for entry in own)))

        def finish() -> None:
            stored = (replace(region, key=state_key(state, region.key)) for state, region in parts)
            index = make_index([[region.write_item() for region in stored]])
            seal(checkpoint, write_index(checkpoint, index, written), META, meta)
            sync(checkpoint)
            write_synced(folder / TRACKER, f"{iteration}\n".encode())

        meta = _meta(model, dtype, extra, self.state)
        for number in range(self.files):
            own = parts[number * share : (number + 1) * share]
            elements = sum(region.tensor.numel() for _, region in own)
            yield WriteTask(elements, partial(write, number, own))
        yield WriteTask(0, finish, last=True)


def _meta(
    model: ModelConfig, dtype: torch.dtype, extra: Mapping[str, Any], state: OptimizerState | None
) -> bytes:
    run = Config() if state is None else state.config
    training = replace(run.training, bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)
    position = TrainState(0, 0, hf_config=extra)
    updates = 0
    if state is not None:
        position = TrainState(state.iteration, state.consumed_samples, hf_config=extra)
        updates = state.step
    config = replace(run, model=model, training=training)
    return meta_json(position, updates, [1.0, 0.0, 0.0], config)
