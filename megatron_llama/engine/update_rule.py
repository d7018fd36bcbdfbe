"""Update rules. They see flat shards only: nothing of buckets' residence, of the model or of
communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_llama.config.schema import OptimizerConfig
from megatron_llama.distributed.comm.streams import CompletedFuture, Future
from megatron_llama.nn.kernels.choice import runs_kernels
from megatron_llama.plans.buckets import Kind, Segment


@dataclass(frozen=True)
class Shard:
    """What a rule takes charge of: one rank's part of a bucket."""

    bucket: int
    turn: int
    """Its place in the order in which a forward pass first needs buckets."""
    own: Tensor
    """[n] on the device, in the compute dtype: what is gathered. The rule writes it whenever the
    master has changed."""
    dtype: torch.dtype
    """Of master and gradient."""
    kind: Kind
    segments: tuple[Segment, ...]
    """Which parts of which parameters it holds; what lies between them is padding, whose gradient
    is zero."""


class ShardUpdate(Protocol):
    """What the engine asks of an update rule. A step of the engine: ``arrived`` and then ``step``,
    once for each bucket, during backward or behind the norm; ``release`` before the bucket's next
    gradient is written. All of one thread at a time, with the device's current stream set to where
    the arguments are made."""

    def attach(self, shard: Shard) -> Tensor:
        """Take charge of a shard. Returns its master [n] in ``shard.dtype``, wherever the rule
        keeps it: ``own`` itself, if it likes."""

    def beside(self, bucket: int) -> bool:
        """Whether ``step`` of this bucket only sets threads of the rule to work. May be asked
        before ``attach``."""

    def arrived(self, bucket: int, grad: Tensor, *, ahead: float | None) -> None:
        """The reduced gradient [n] of the step is final, and stays until ``release``. ``ahead``:
        the learning rate of the step, where nothing but the norm is unknown: most likely it will
        have scale 1 and no skip."""

    def release(self, bucket: int) -> None:
        """The gradient that arrived last is about to be overwritten: wait until nobody reads it (a
        device: its current stream does)."""

    def step(self, bucket: int, grad: Tensor, *, scale: Tensor, skip: Tensor, lr: float) -> Future:
        """Update the master with ``grad / scale``, or leave everything as it is where ``skip`` is
        1; then write ``own``.

        ``scale`` and ``skip`` are 0-dim tensors on the device: whoever calls never learns them
        inside a step. Nobody reads ``own`` from the call until ``Future``, which may be waited for
        more than once, or not at all."""

    def finish(self, steps: Future, *, scale: Tensor, skip: Tensor) -> None:
        """Every bucket has had its ``step``, with these; ``steps``: all of those calls have
        returned. Of the thread that computes; may be collective over all ranks."""

    def refresh(self, bucket: int) -> None:
        """Master and state were written from outside, nothing being under way: ``own`` follows at
        once."""

    def settle(self) -> Mapping[int, Future]:
        """Begin what was put off beyond its step. Returns the buckets whose ``own`` changes by it,
        and when. The same ones on all ranks that share them."""

    def forget(self) -> None:
        """Back to the state before the first step; masters stay."""

    def state(self, bucket: int) -> dict[str, Tensor]:
        """Live state by name: shard-shaped tensors, and 0-dim ones that are equal on every rank;
        ``step`` among these."""

    def close(self) -> None:
        """Nothing more will be asked."""

    def join(self, seconds: float) -> None:
        """After ``close``: wait for the end of the rule's threads, each at most so long."""


def adamw_step(
    master: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    config: OptimizerConfig,
    *,
    decay: float,
    scale: Tensor,
    skip: Tensor | None,
    lr: float,
) -> None:
    """Decoupled weight decay (Loshchilov and Hutter, 2019) by torch's fused kernel, in place. It
    also applies the clip factor, to the gradient too, and the skip, so that everything is read
    once. The kernel itself, because what ``torch.optim`` does around it takes longer than the
    update of a small shard."""
    step = state["step"].add_(1.0)
    torch._fused_adamw_(
        [master],
        [grad],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [step],
        amsgrad=False,
        lr=lr,
        beta1=config.adam_beta1,
        beta2=config.adam_beta2,
        weight_decay=decay,
        eps=config.adam_eps,
        maximize=False,
        grad_scale=scale,
        found_inf=skip,
    )
    if skip is not None:
        step.sub_(skip)


class AdamW:
    """AdamW where the shards are: one call per bucket."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.config = config
        self._shards: dict[int, Shard] = {}
        self._masters: dict[int, Tensor] = {}
        self._states: dict[int, dict[str, Tensor]] = {}
        self._decay: dict[int, float] = {}

    def attach(self, shard: Shard) -> Tensor:
        """See ShardUpdate. In the compute dtype itself the shard is the master: nothing to copy
        after an update."""
        master = (
            shard.own
            if shard.own.dtype == shard.dtype
            else torch.zeros_like(shard.own, dtype=shard.dtype)
        )
        self._shards[shard.bucket] = shard
        self._masters[shard.bucket] = master
        self._decay[shard.bucket] = self.config.weight_decay if shard.kind.decay else 0.0
        self._states[shard.bucket] = {
            "exp_avg": torch.zeros_like(master),
            "exp_avg_sq": torch.zeros_like(master),
            "step": torch.zeros((), dtype=torch.float32, device=master.device),
        }
        return master

    def beside(self, bucket: int) -> bool:
        """See ShardUpdate."""
        return False

    def arrived(self, bucket: int, grad: Tensor, *, ahead: float | None) -> None:
        """See ShardUpdate."""

    def release(self, bucket: int) -> None:
        """See ShardUpdate."""

    def step(self, bucket: int, grad: Tensor, *, scale: Tensor, skip: Tensor, lr: float) -> Future:
        """See ShardUpdate."""
        master = self._masters[bucket]
        state = self._states[bucket]
        decay = self._decay[bucket]
        if runs_kernels(master.device, master.dtype):
            self._in_one_pass(bucket, grad, scale, skip, lr)
            return CompletedFuture()
        adamw_step(master, grad, state, self.config, decay=decay, scale=scale, skip=skip, lr=lr)
        self.refresh(bucket)
        return CompletedFuture()

    def _in_one_pass(
        self, bucket: int, grad: Tensor, scale: Tensor, skip: Tensor, lr: float
    ) -> None:
        """The update, and the shard in the compute dtype with it."""
        from megatron_llama.engine.adamw_kernel import adamw as one_pass

        master = self._masters[bucket]
        own = self._shards[bucket].own
        state = self._states[bucket]
        c = self.config
        one_pass(
            master,
            grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            state["step"],
            None if own is master else own,
            scale=scale,
            skip=skip,
            lr=lr,
            beta1=c.adam_beta1,
            beta2=c.adam_beta2,
            decay=self._decay[bucket],
            eps=c.adam_eps,
        )

    def finish(self, steps: Future, *, scale: Tensor, skip: Tensor) -> None:
        """See ShardUpdate."""

    def refresh(self, bucket: int) -> None:
        """See ShardUpdate."""
        own = self._shards[bucket].own
        master = self._masters[bucket]
        if own is not master:
            own.copy_(master)

    def settle(self) -> Mapping[int, Future]:
        """See ShardUpdate."""
        return {}

    def forget(self) -> None:
        """See ShardUpdate."""
        for state in self._states.values():
            for tensor in state.values():
                tensor.zero_()

    def state(self, bucket: int) -> dict[str, Tensor]:
        """See ShardUpdate."""
        return self._states[bucket]

    def close(self) -> None:
        """See ShardUpdate."""

    def join(self, seconds: float) -> None:
        """See ShardUpdate."""
