"""``preprocess``: text to an indexed dataset."""

from __future__ import annotations

from megatron_llama.config.parse import Parsed
from megatron_llama.data.preprocess_config import PreprocessConfig


def preprocess(parsed: Parsed) -> None:
    """Write the dataset and print exact counts of documents and tokens."""
    from megatron_llama.data.preprocess import preprocess as run

    print(run(parsed.get(PreprocessConfig)))
