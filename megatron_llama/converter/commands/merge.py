"""``merge``: a model with its low-rank additions as plain HuggingFace weights."""

from __future__ import annotations

from megatron_llama.config.parse import Parsed
from megatron_llama.converter.configs import MergeConfig
from megatron_llama.engine.plan.memory import sized


def merge(parsed: Parsed) -> None:
    """Merge and print the result."""
    from megatron_llama.converter.api.merge import merge as write

    options = parsed.get(MergeConfig)
    done = write(**vars(options))
    print(
        f"merged {done.source} and {done.additions} into {options.dst} "
        f"({done.dtype}, {sized(done.bytes)})"
    )
