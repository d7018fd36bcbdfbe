"""The options of offload: problems with them, and those without effect."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.config.schema import Config
from megatron_llama.errors import describe
from megatron_llama.plans.offload import MODES, NONE, core_list


def offload_problems(config: Config) -> Iterator[str]:
    """Yields one line for each problem with the options of offload."""
    options = config.offload
    if options.optimizer_offload not in MODES:
        expected = " or ".join(MODES)
        yield describe(
            "--optimizer-offload",
            got=options.optimizer_offload,
            expected=expected,
            do="exact hides what can be hidden exactly",
        )
    if not 0 <= options.optimizer_offload_fraction <= 1:
        do = "give the share of the optimizer that is to leave the device"
        yield describe(
            "--optimizer-offload-fraction",
            got=options.optimizer_offload_fraction,
            expected="a number from 0 to 1",
            do=do,
        )
    if options.offload_cores != "auto" and not core_list(options.offload_cores):
        yield describe(
            "--offload-cores",
            got=options.offload_cores,
            expected="auto, or numbers and ranges such as 0-15,32-47",
            do="mend it",
        )


def offload_warnings(config: Config) -> Iterator[str]:
    """Yields one line for each option of offload that has no effect."""
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
