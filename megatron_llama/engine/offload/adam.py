"""AdamW over columns that have been updated different numbers of times."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_llama.config.schema import OptimizerConfig
from megatron_llama.engine.update_rule import adamw_step

CACHED = 1 << 15
"""Elements that are worked on at once where an operation takes several passes: six times as many
bytes stay in the cache of a core."""
State = tuple[Tensor, Tensor, Tensor]
"""Weights, first and second moments, all of one shape."""


def update_alike(
    state: State,
    grad: Tensor,
    steps: Tensor,
    config: OptimizerConfig,
    *,
    scale: Tensor,
    skip: Tensor | None,
    lr: float,
    decay: float,
) -> None:
    """AdamW in place with ``grad / scale``, all elements with ``steps`` updates behind them (0-dim
    fp32; counted up unless skipped)."""
    moments = {"exp_avg": state[1], "exp_avg_sq": state[2], "step": steps}
    adamw_step(state[0], grad, moments, config, decay=decay, scale=scale, skip=skip, lr=lr)


def corrections(
    counts: Tensor, config: OptimizerConfig, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Of columns that get their ``counts``-th update (any shape): 1 - beta1^n, and the square root
    of 1 - beta2^n."""
    n = counts.to(torch.float64)
    first, second = (
        -torch.expm1(n * math.log(beta)) if beta else torch.ones_like(n)
        for beta in (config.adam_beta1, config.adam_beta2)
    )
    return first.to(dtype), second.sqrt().to(dtype)


def update_columns(
    state: State,
    grad: Tensor,
    corrected: tuple[Tensor, Tensor],
    config: OptimizerConfig,
    *,
    lr: float,
    decay: float,
) -> State:
    """AdamW over [rows, c] with corrections of each column [c]: the new values, as new tensors."""
    weight, first, second = state
    first = first.lerp(grad, 1.0 - config.adam_beta1)
    second = (second * config.adam_beta2).addcmul_(grad, grad, value=1.0 - config.adam_beta2)
    root = second.sqrt().div_(corrected[1]).add_(config.adam_eps)
    return (
        (weight * (1.0 - lr * decay)).addcdiv_(first / corrected[0], root, value=-lr),
        first,
        second,
    )


def update_columns_(
    state: State,
    grad: Tensor,
    corrected: tuple[Tensor, Tensor],
    config: OptimizerConfig,
    *,
    lr: float,
    decay: float,
) -> None:
    """The same in place, some rows at a time: what lies between stays in the cache, as it would in
    one fused kernel."""
    rows = max(1, CACHED // grad.shape[1])
    room, more = (torch.empty_like(grad[:rows]) for _ in range(2))
    for low in range(0, grad.shape[0], rows):
        part = slice(low, low + rows)
        weight = state[0][part]
        first = state[1][part]
        second = state[2][part]
        new = grad[part]
        root = room[: len(new)]
        step = more[: len(new)]
        first.lerp_(new, 1.0 - config.adam_beta1)
        second.mul_(config.adam_beta2).addcmul_(new, new, value=1.0 - config.adam_beta2)
        torch.sqrt(second, out=root).div_(corrected[1]).add_(config.adam_eps)
        weight.mul_(1.0 - lr * decay).addcdiv_(
            torch.div(first, corrected[0], out=step), root, value=-lr
        )
