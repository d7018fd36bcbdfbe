"""Tells a folder of Megatron-Core's ``torch_dist`` format from others."""

from __future__ import annotations

from pathlib import Path

from megatron_llama.checkpoint.index import METADATA
from megatron_llama.checkpoint.meta import META

BACKEND = "metadata.json"


def is_torch_dist(folder: Path) -> bool:
    """Whether a folder has files of Megatron's sharded formats. Of these ``torch_dist`` can be
    read."""
    return (folder / BACKEND).is_file() or (
        (folder / METADATA).is_file() and not (folder / META).is_file()
    )
