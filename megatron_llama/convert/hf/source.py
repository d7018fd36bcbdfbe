"""HuggingFace folders as a Source: safetensors, or the older ``pytorch_model*.bin``."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from megatron_llama.convert.hf.files import HFWeights
from megatron_llama.convert.tokenizer_files import read_config, tokenizer_files_of
from megatron_llama.errors import CheckpointError
from megatron_llama.plans.params import Rectangle


class HFSource:
    """See Source."""

    def __init__(self, folder: Path, config: str | Path | None, vocab_size: int) -> None:
        """``config`` takes the place of the folder's own. Raises CheckpointError."""
        self.format = "hf"
        self.folder = folder
        self.notes = ()
        model, self.extra = read_config(config or folder / "config.json")
        assert model is not None
        if vocab_size not in (0, model.vocab_size):
            do = "leave it out: this format stores no padding"
            raise CheckpointError(
                "--vocab-size",
                got=vocab_size,
                expected=f"{model.vocab_size}, by config.json",
                do=do,
            )
        self._weights = HFWeights(folder, model, own=model)
        self.model = model
        self.dtype = self._weights.dtype
        self.tokenizer_files = tokenizer_files_of(folder)

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """See Source."""
        self._weights(rectangle, out)
