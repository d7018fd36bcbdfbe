"""The options of offload that have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.config.schema import Config
from megatron_llama.engine.offload_options import NONE


def offload_warnings(config: Config) -> Iterator[str]:
    """Yield one line for each option of offload that has no effect."""
    options = config.offload
    if (
        options.optimizer_offload != NONE
        and options.offload_speculative
        and config.optimizer.clip_grad == 0
    ):
        yield (
            "--offload-speculative has no effect with --clip-grad 0: "
            "buckets are updated when their gradients arrive anyway"
        )
    if options.optimizer_offload != NONE and options.offload_speculative and config.training.fp16:
        yield (
            "--offload-speculative has no effect with --fp16: "
            "whether a step counts is known at its end"
        )
