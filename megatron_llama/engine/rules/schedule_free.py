"""Schedule-free AdamW (Defazio et al., "The Road Less Scheduled", 2024, section 2 and appendix A):
an average of the weights takes the place of a learning rate that decays.

    z   is what AdamW updates, with gradients at y;
    x   is the average of all z, each weighted by the square of its learning rate;
    y   lies between them: (1 - beta1) z + beta1 x. beta1 takes the place of momentum.

The model is trained with y, which is what a shard sends to the other ranks, and evaluated, saved
and exported with x, the master. y is not kept: it is made of x and z whenever it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_llama.engine.comm.streams import CompletedFuture, Future
from megatron_llama.engine.kernels import runs_kernels
from megatron_llama.engine.options import UpdateOptions
from megatron_llama.engine.plan.limits import UPDATE_PIECE
from megatron_llama.engine.rules.divisible import DivisibleRule, part_of_shard, part_of_state
from megatron_llama.engine.rules.registry import RuleInputs
from megatron_llama.engine.rules.update_rule import Shard, UpdateRules


def schedule_free_rules(inputs: RuleInputs) -> UpdateRules:
    """Build schedule-free AdamW for all buckets."""
    rule = ScheduleFreeAdamW(inputs.options.groups)
    return UpdateRules([rule] * len(inputs.bucket_plan.buckets), [rule])


class ScheduleFreeAdamW(DivisibleRule):
    """Schedule-free AdamW on the device that has the shards."""

    # One average for all shards: it includes a step on every rank, or on none.
    needs_whole_step = True
    averages = True

    def __init__(self, groups: Sequence[UpdateOptions]) -> None:
        """``groups`` has peak learning rate, betas, eps and weight decay of each group of
        parameters."""
        self._groups = tuple(groups)
        self._shards: dict[int, Shard] = {}
        self._masters: dict[int, Tensor] = {}
        self._states: dict[int, dict[str, Tensor]] = {}

    def attach(self, shard: Shard) -> Tensor:
        # The shard holds y, so it is no master in fp32 training either.
        master = torch.zeros_like(shard.param_shard, dtype=shard.master_dtype)
        self._shards[shard.bucket] = shard
        self._masters[shard.bucket] = master
        self._states[shard.bucket] = {
            "z": torch.zeros_like(master),
            "exp_avg_sq": torch.zeros_like(master),
            "step": torch.zeros((), dtype=torch.float32, device=master.device),
            # In fp64, like a Python float: in fp32 it would stop growing after 2^24 steps.
            "weight_sum": torch.zeros((), dtype=torch.float64, device=master.device),
        }
        return master

    def divide(self, source: int, key: int, piece: slice) -> None:
        master = self._masters[source]
        self._shards[key] = part_of_shard(self._shards[source], key, piece)
        self._masters[key] = master[piece]
        self._states[key] = part_of_state(self._states[source], piece, len(master))

    def drop(self, key: int) -> None:
        for tensors in (self._shards, self._masters, self._states):
            del tensors[key]

    def step(self, bucket: int, grad: Tensor, *, scale: Tensor, skip: Tensor, lr: float) -> Future:
        shard = self._shards[bucket]
        options = self._groups[shard.kind.group]
        decay = options.weight_decay if shard.kind.decay else 0.0
        state = self._states[bucket]
        # The host never learns of a skip: all values then move by 0.
        taken = 1 - skip.double()
        step = state["step"].add_(taken)
        # The weight of this step in the average. Relative to the peak, it is the same for all
        # groups: their rates follow one warm-up, and stay. It is rounded, so it is the same to the
        # bit, and one sum in a checkpoint serves all groups.
        weight = float(np.float32(lr / options.lr)) ** 2 if options.lr else 0.0
        weight_sum = state["weight_sum"].add_(weight * taken)
        dtype = grad.dtype
        # A first step of warm-up has rate 0 and weight 0.
        share = torch.where(weight_sum > 0, weight * taken / weight_sum, 0.0).to(dtype)
        rate = (lr * taken).to(dtype)
        forgets = ((1 - options.adam_beta2) * taken).to(dtype)
        # After a first step that is skipped there is nothing to correct.
        correction = (1 - options.adam_beta2 ** step.clamp(min=1).double()).to(dtype)
        master = self._masters[bucket]
        if runs_kernels(master.device, master.dtype):
            # Triton exists on GPUs only.
            from megatron_llama.engine.rules.schedule_free_kernel import update as one_pass

            one_pass(
                master,
                grad,
                state["z"],
                state["exp_avg_sq"],
                shard.param_shard,
                share=share,
                rate=rate,
                forgets=forgets,
                correction=correction,
                scale=scale,
                skip=skip,
                beta1=options.adam_beta1,
                decay=decay,
                eps=options.adam_eps,
            )
            return CompletedFuture()
        for start in range(0, master.numel(), UPDATE_PIECE):
            piece = slice(start, start + UPDATE_PIECE)
            x = master[piece]
            z = state["z"][piece]
            second = state["exp_avg_sq"][piece]
            # In place: this is the last read of the gradient of this step.
            update = grad[piece].div_(scale).masked_fill_(skip.bool(), 0.0)
            second.lerp_(update.square(), forgets)
            update.div_((second / correction).sqrt_().add_(options.adam_eps))
            if decay:
                update.add_(self._trained(x, z, options), alpha=decay)
            z.addcmul_(update, rate, value=-1.0)
            x.lerp_(z, share)
            shard.param_shard[piece].copy_(self._trained(x, z, options))
        return CompletedFuture()

    @staticmethod
    def _trained(x: Tensor, z: Tensor, options: UpdateOptions) -> Tensor:
        """Return y."""
        return torch.lerp(x, z, 1 - options.adam_beta1)

    def refresh(self, bucket: int) -> None:
        shard = self._shards[bucket]
        state = self._states[bucket]
        master = self._masters[bucket]
        # New weights begin all three sequences.
        state["z"].copy_(torch.where(state["step"] > 0, state["z"], master))
        options = self._groups[shard.kind.group]
        if runs_kernels(master.device, master.dtype):
            from megatron_llama.engine.rules.schedule_free_kernel import show

            show(master, state["z"], shard.param_shard, beta1=options.adam_beta1)
        else:
            shard.param_shard.copy_(self._trained(master, state["z"], options))

    def show_average(self, bucket: int) -> None:
        self._shards[bucket].param_shard.copy_(self._masters[bucket])

    def state(self, bucket: int) -> dict[str, Tensor]:
        return self._states[bucket]

    def reset(self) -> None:
        for state in self._states.values():
            for tensor in state.values():
                tensor.zero_()
