"""Reads native checkpoints, as a conversion does: the weights, without an engine."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from megatron_llama.checkpoint import native
from megatron_llama.checkpoint.checkpoint_dir import TOKENIZER
from megatron_llama.checkpoint.model_folders.formats import Reading
from megatron_llama.checkpoint.model_folders.model_fields import OPTIMIZER_LEFT_OUT
from megatron_llama.checkpoint.model_folders.tokenizer_files import tokenizer_files_of
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.errors import CheckpointError


def open_folder(folder: Path, kind: str, reading: Reading) -> NativeReader:
    """Open a native checkpoint, as an ``OpenFolder``."""
    return NativeReader(folder, reading.config, reading.vocab_size)


class NativeReader:
    """A native checkpoint, or the latest one in a folder, as a ModelReader."""

    def __init__(self, path: Path, config: str | Path | None, vocab_size: int) -> None:
        """Open the checkpoint. Raises CheckpointError, also for a ``config``: a native checkpoint
        has its own."""
        self.format = "native"
        if config is not None:
            expected = "none for a native checkpoint, which has its own"
            raise CheckpointError("--config", got=config, expected=expected, do="leave it out")
        self.weights = native.open_weights(path)
        meta = self.weights.meta
        self.folder = meta.folder
        self.model = meta.model
        if vocab_size not in (0, self.model.vocab_size):
            do = "leave it out: this format stores no padding"
            raise CheckpointError(
                "--vocab-size", got=vocab_size, expected=self.model.vocab_size, do=do
            )
        training = meta.config.get("training", {})
        self.dtype = (
            "bfloat16" if training.get("bf16") else "float16" if training.get("fp16") else "float32"
        )
        self.extra = meta.state.hf_config
        run_folder = self.folder.parent
        self.tokenizer_files = tokenizer_files_of(run_folder / TOKENIZER, run_folder)
        self.notes = (OPTIMIZER_LEFT_OUT,) if meta.optimizer_step else ()

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        self.weights(rectangle, out)
