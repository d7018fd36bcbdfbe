"""The learning rate as a pure function of the iteration."""

from __future__ import annotations

import math

from megatron_llama.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, train_iters: int, iteration: int) -> float:
    """The rate of step ``iteration`` (0-based), as Megatron's ``OptimizerParamScheduler`` has it.

    Warm-up rises linearly from 0, so its first step changes nothing (Megatron and HuggingFace alike); the decay goes from
    ``lr`` to ``min_lr`` over the rest of ``lr_decay_iters`` (0: ``train_iters``); afterwards the rate stays at ``min_lr``.
    """
    warmup, decay = config.lr_warmup_iters, config.lr_decay_iters or train_iters
    if iteration < warmup:
        return config.lr * iteration / warmup
    if config.lr_decay_style == "constant":
        return config.lr
    if iteration >= decay:
        return config.min_lr
    done = (iteration - warmup) / (decay - warmup)
    left = 1.0 - done if config.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr + left * (config.lr - config.min_lr)
