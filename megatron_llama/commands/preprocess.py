"""``preprocess``: text to an indexed dataset."""

from __future__ import annotations

from megatron_llama.data.options import PreprocessConfig
from megatron_llama.options import Parsed


def preprocess(parsed: Parsed) -> None:
    """Run it and print the exact counts."""
    from megatron_llama.data.preprocess import preprocess as run

    print(run(parsed.get(PreprocessConfig)))
