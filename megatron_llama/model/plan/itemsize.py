"""Bytes of one number, by its use."""

from __future__ import annotations

from megatron_llama.config.schema import Config


def compute_itemsize(config: Config) -> int:
    """Return the bytes of a parameter or activation in the dtype that a run computes in."""
    training = config.training
    return 8 if training.fp64 else 2 if training.bf16 or training.fp16 else 4


def fp32_itemsize(config: Config) -> int:
    """Return the bytes of a master weight, moment or accumulated gradient: fp32, or fp64 with
    --fp64."""
    return max(compute_itemsize(config), 4)


def reduce_itemsize(config: Config) -> int:
    """Return the bytes of a gradient while it travels between data-parallel ranks."""
    return 2 if config.parallel.grad_reduce_in_bf16 else fp32_itemsize(config)
