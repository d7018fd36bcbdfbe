"""The learning rate as a pure function of the iteration, or of the samples consumed."""

from __future__ import annotations

import math

from megatron_llama.config.schema import OptimizerConfig


def learning_rate(
    config: OptimizerConfig, train_iters: int, iteration: int, consumed_samples: int = 0
) -> float:
    """Return the learning rate of step ``iteration`` (0-based), as Megatron's
    ``OptimizerParamScheduler`` does. ``consumed_samples`` is the number of samples before that
    step.

    Warm-up rises linearly from 0, so its first step changes nothing (as in Megatron and
    HuggingFace). The rate then decays from ``lr`` to ``min_lr`` over the rest of ``lr_decay_iters``
    (0: ``train_iters``), with WSD over the last ``lr_wsd_decay_iters`` of them, and stays at
    ``min_lr``. With ``lr_decay_samples`` all of this is counted in samples."""
    if config.lr_decay_samples:
        now = consumed_samples
        decay = config.lr_decay_samples
        last = config.lr_wsd_decay_samples
        warmup: float = config.lr_warmup_samples
    else:
        now = iteration
        decay = config.lr_decay_iters or train_iters
        last = config.lr_wsd_decay_iters
        warmup = config.lr_warmup_iters
    warmup = warmup or config.lr_warmup_fraction * decay
    if now < warmup:
        return config.lr * now / warmup
    if config.lr_decay_style == "constant":
        return config.lr
    if now >= decay:
        return config.min_lr
    done = (now - warmup) / (decay - warmup)
    if config.lr_decay_style == "WSD":
        into = now - (decay - last)
        left = _left(config.lr_wsd_decay_style, into / last) if into > 0 else 1.0
    else:
        left = _left(config.lr_decay_style, done)
    return config.min_lr + left * (config.lr - config.min_lr)


def _left(style: str, done: float) -> float:
    """Return the share of the way from ``min_lr`` to ``lr`` that is left (0 to 1) when the share
    ``done`` of the decay is over (0 to 1)."""
    if style == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    if style == "exponential":
        return float(2.0 * 0.5**done - 1.0)
    return 1.0 - (math.sqrt(done) if style == "minus_sqrt" else done)
