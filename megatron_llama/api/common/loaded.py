"""The model of the weights that ``--load`` names, before the rest of the configuration is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import CheckpointConfig, DataConfig, ModelConfig
from megatron_llama.errors import CheckpointError

if TYPE_CHECKING:
    from megatron_llama.loop.start import Start


def loaded_model(parsed: Parsed, start: Start | None) -> ModelConfig | None:
    """Read the model's fields from what --load names; None if nothing is loaded.

    A folder that stores only a padded vocabulary gets the size of --vocab-size, or of the tokenizer
    that is given. Raises CheckpointError or DataError."""
    if start is None:
        return None
    data = parsed.get(DataConfig)
    vocab_size = parsed.get(ModelConfig).vocab_size
    if parsed.get(CheckpointConfig).resize_embeddings and not start.native:
        return _resizable(start)
    if start.native or data.tokenizer_model is None or vocab_size:
        return start.model(vocab_size=vocab_size)
    from megatron_llama.tokenizer.load import load_tokenizer

    return start.model(tokens=load_tokenizer(data.tokenizer_model, data.tokenizer_type).vocab_size)


def _resizable(start: Start) -> ModelConfig:
    """Read the model of a folder that is to get more rows, to which --vocab-size says nothing.
    Raises CheckpointError for a format that stores padding."""
    from megatron_llama.conversion.formats import detect

    if (kind := detect(start.path)) != "hf":
        raise CheckpointError(
            "--resize-embeddings",
            got=f"--load {start.path}, a {kind} folder",
            expected="a HuggingFace folder or a checkpoint, which store no padding",
            do="convert it first: convert SRC DST --to hf",
        )
    return start.model()
