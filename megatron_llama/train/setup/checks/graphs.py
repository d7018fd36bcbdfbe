"""Options with which --cuda-graph-scope block cannot capture the passes of a block."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.config.parse import flag
from megatron_llama.config.schema import Config
from megatron_llama.errors import describe
from megatron_llama.model.plan.pieces import SYMMETRIC

SPLIT = ("zb-h1", "zb-v")
"""Schedules that keep weight gradients for later, with tensors that a graph would overwrite."""


def graph_problems(config: Config) -> Iterator[str]:
    """Yield the options that --cuda-graph-scope block excludes."""
    parallel = config.parallel
    training = config.training
    alike = "passes that launch the same kernels each time"
    excluded = (
        (
            parallel.pipeline_schedule in SPLIT,
            f"--pipeline-schedule {parallel.pipeline_schedule}",
            "whole backward passes: gpipe, 1f1b or interleaved",
        ),
        (
            parallel.context_parallel_size > 1,
            f"--context-parallel-size {parallel.context_parallel_size}",
            "attention without messages",
        ),
        (
            parallel.tp_comm_overlap == SYMMETRIC,
            f"--tp-comm-overlap {SYMMETRIC}",
            "messages of NCCL: nothing shows that the fused operators can be captured",
        ),
        (config.data.reset_attention_mask, "--reset-attention-mask", alike),
        (
            bool(config.lora.lora_rank),
            f"--lora-rank {config.lora.lora_rank}",
            "a model that is trained whole",
        ),
        (bool(config.optimizer.freeze), flag("freeze"), "a model that is trained whole"),
        (training.compile, "--compile", "kernels that nothing compiles again"),
        (
            config.log.record_timeline is not None,
            "--record-timeline",
            "messages whose times nobody asks for: a graph has no events of its own",
        ),
    )
    for is_given, got, expected in excluded:
        if is_given:
            yield describe(
                "--cuda-graph-scope block",
                got=got,
                expected=expected,
                do="leave one of the two out",
            )
