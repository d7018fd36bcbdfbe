"""Update rules. They see flat shards only: nothing of buckets' residence, of the model or of communication."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron_llama.config import OptimizerConfig


class ShardUpdate(Protocol):
    """What the engine asks of an update rule."""

    def attach(self, bucket: int, master: Tensor, *, decay: bool) -> None:
        """Take charge of one master shard [n]."""

    def step(self, bucket: int, grad: Tensor, *, scale: Tensor, skip: Tensor, lr: float) -> None:
        """Update the master in place with ``grad / scale``, or leave everything as it is where ``skip`` is 1.

        ``scale`` and ``skip`` are 0-dim tensors on the device: the host never learns them inside a step."""

    def state(self, bucket: int) -> dict[str, Tensor]:
        """Live state by name: shard-shaped tensors, and 0-dim ones that are equal on every rank."""


class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter, 2019) by torch's fused kernel: one call per bucket, which also
    applies the clip factor and the skip, so that the gradient is read once."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.config = config
        self._masters: dict[int, Tensor] = {}
        self._states: dict[int, dict[str, Tensor]] = {}
        self._decay: dict[int, float] = {}

    def attach(self, bucket: int, master: Tensor, *, decay: bool) -> None:
        """See ShardUpdate."""
        self._masters[bucket] = master
        self._decay[bucket] = self.config.weight_decay if decay else 0.0
        self._states[bucket] = {
            "exp_avg": torch.zeros_like(master),
            "exp_avg_sq": torch.zeros_like(master),
            "step": torch.zeros((), dtype=torch.float32, device=master.device),
        }

    def step(self, bucket: int, grad: Tensor, *, scale: Tensor, skip: Tensor, lr: float) -> None:
        """See ShardUpdate."""
        state, config = self._states[bucket], self.config
        adamw(
            [self._masters[bucket]],
            [grad],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            fused=True,
            grad_scale=scale,
            found_inf=skip,
            amsgrad=False,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            lr=lr,
            weight_decay=self._decay[bucket],
            eps=config.adam_eps,
            maximize=False,
        )

    def state(self, bucket: int) -> dict[str, Tensor]:
        """See ShardUpdate."""
        return self._states[bucket]
