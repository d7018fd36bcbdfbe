"""Elementwise optimizers of torch on flat shards: SGD, Adam and others, and those of users.

An elementwise optimizer does to each element what it would do to it alone: it may keep tensors of
the parameter's shape and numbers, and asks for no norm, row or column. So a shard can be its
parameter. The optimizer's own ``step`` updates the master, in pieces of ``UPDATE_PIECE`` elements,
and what it needs beside master and state is of that size.

A step that is skipped changes no bit. A host looks at ``skip``. A device does not wait to learn
it: each piece is updated, and where ``skip`` is 1 it gets back what was copied before. That costs
one more read and two writes of master and state. There the host waits for the device in these
cases only:

    numbers     that the optimizer keeps on the host, as Adagrad its count of steps, cannot be taken
                back by the device. Every update of a bucket waits for ``skip``.
    beginnings  An optimizer may make its state of values of its first step: SGD with dampening,
                NAdam, Rprop and ASGD do (``TorchGroup.initial`` is None). That is done in the first
                step that is not skipped, and until then every update waits.

On a device optimizers compute as with ``capturable=True``, which keeps their counts there.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from megatron_llama.engine.comm.streams import CompletedFuture, Future
from megatron_llama.engine.options import TorchGroup, UpdateOptions
from megatron_llama.engine.plan.limits import UPDATE_PIECE
from megatron_llama.engine.rules.divisible import (
    DivisibleRule,
    part_of_master,
    part_of_shard,
    part_of_state,
)
from megatron_llama.engine.rules.registry import RuleInputs
from megatron_llama.engine.rules.update_rule import Shard, UpdateRules
from megatron_llama.errors import TrainingError, describe

NO_STATE: Mapping[str, Tensor] = MappingProxyType({})


def torch_rules(inputs: RuleInputs) -> UpdateRules:
    """Build the rule of the user's optimizer for all buckets."""
    rule = TorchRule(inputs.options.groups)
    return UpdateRules([rule] * len(inputs.bucket_plan.buckets), [rule])


def bare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy of an optimizer without parameters, groups, state and hooks. Its other
    attributes are the optimizer's own: a constructor may have kept there what no group says."""
    bare: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(bare).update(vars(optimizer))
    vars(bare).update({name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")})
    bare.state = defaultdict(dict)
    bare.param_groups = []
    return bare


def make_optimizer(group: TorchGroup, device: torch.device, *, lr: float) -> torch.optim.Optimizer:
    """Return an optimizer of the group's class and options, for parts of parameters on a device:
    ``step_part`` gives them to it, one at a time."""
    optimizer = bare_optimizer(group.optimizer)
    optimizer.param_groups = [{"params": []}]
    set_options(optimizer, group.options, device, lr=lr)
    return optimizer


def set_options(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], device: torch.device, *, lr: float
) -> None:
    """Give an optimizer of ``make_optimizer`` the options of its group."""
    own = optimizer.param_groups[0]
    own.update(options, lr=lr)
    # One tensor at a time: several kernels for it are what ``foreach`` would save.
    if "foreach" in own:
        own["foreach"] = False
    if "capturable" in own:
        own["capturable"] = device.type != "cpu" and not own.get("fused")


@torch.no_grad()
def step_part(
    optimizer: torch.optim.Optimizer,
    values: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor] = NO_STATE,
) -> dict[str, Any]:
    """Update ``values`` in place by one step, as a parameter of their own with this state. Returns
    the state after it: the same tensors where the optimizer has updated them in place. Without
    ``state`` the step is the first. Raises RuntimeError if the optimizer has done anything else."""
    part = nn.Parameter(values)
    part.grad = grad
    optimizer.param_groups[0]["params"] = [part]
    if state:
        optimizer.state[part] = dict(state)
    try:
        optimizer.step()
        left = optimizer.state.pop(part, {})
        if optimizer.state:
            raise RuntimeError(f"it keeps {next(iter(optimizer.state))!r}, which is no parameter's")
        if part.data_ptr() != values.data_ptr():
            raise RuntimeError("it puts another tensor into the place of the parameter's")
        return {name: value for name, value in left.items() if value is not None}
    finally:
        # The optimizer lives as long as the engine, and the part is memory of the bucket.
        optimizer.param_groups[0]["params"] = []
        optimizer.state.clear()


@dataclass
class _Bucket:
    """The shard of a bucket, its master and its state."""

    shard: Shard
    master: Tensor
    state: dict[str, Tensor]
    """Live: [n] or 0-dim."""
    begun: bool
    """Whether the state has values. If not, it is full of NaN: so it is also saved, and a load
    knows it again."""


class TorchRule(DivisibleRule):
    """An elementwise optimizer of torch on the device that has the shards."""

    takes_options = True

    def __init__(self, groups: Sequence[UpdateOptions]) -> None:
        """``groups`` are ``TorchGroup``, each of which gets an optimizer of its own."""
        self._groups = tuple(groups)
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        """By the number of the group."""
        self._buckets: dict[int, _Bucket] = {}

    def _group(self, number: int) -> TorchGroup:
        group = self._groups[number]
        assert isinstance(group, TorchGroup), group
        return group

    def attach(self, shard: Shard) -> Tensor:
        param_shard = shard.param_shard
        # In fp32 training the shard is its own master, as with AdamW.
        master = (
            param_shard
            if param_shard.dtype == shard.master_dtype
            else torch.zeros_like(param_shard, dtype=shard.master_dtype)
        )
        number = shard.kind.group
        group = self._group(number)
        if number not in self._optimizers:
            self._optimizers[number] = make_optimizer(group, master.device, lr=0.0)
        # A small step says which dtypes its state has here, and which numbers are on the host.
        few = torch.ones_like(master[:1])
        made = self._first_state(self._optimizers[number], few)
        state = {
            name: tensor.new_empty((len(master),) if tensor.dim() else (), requires_grad=False)
            for name, tensor in made.items()
        }
        self._buckets[shard.bucket] = _Bucket(shard, master, state, begun=False)
        self._begin(shard.bucket)
        return master

    def divide(self, source: int, key: int, piece: slice) -> None:
        work = self._buckets[source]
        shard = part_of_shard(work.shard, key, piece)
        master = part_of_master(work.master, work.shard, shard, piece)
        state = part_of_state(work.state, piece, len(work.master))
        self._buckets[key] = _Bucket(shard, master, state, work.begun)

    def drop(self, key: int) -> None:
        del self._buckets[key]

    def _first_state(self, optimizer: torch.optim.Optimizer, few: Tensor) -> dict[str, Tensor]:
        """Return the state of some elements after a first step."""
        return step_part(optimizer, few, torch.ones_like(few), constructed(optimizer, few))

    def _begin(self, bucket: int) -> None:
        """Fill the state with what it has before the first step."""
        work = self._buckets[bucket]
        initial = self._group(work.shard.kind.group).initial
        work.begun = initial is not None
        for name, tensor in work.state.items():
            if initial is not None:
                tensor.fill_(initial[name])
            elif tensor.is_floating_point():
                tensor.fill_(torch.nan)
            else:
                tensor.zero_()

    def step(self, bucket: int, grad: Tensor, *, scale: Tensor, skip: Tensor, lr: float) -> Future:
        work = self._buckets[bucket]
        optimizer = self._optimizers[work.shard.kind.group]
        optimizer.param_groups[0]["lr"] = lr
        copied: Tensor | None = skip.bool()
        if self._host_reads_skip(work):
            if skip:
                return CompletedFuture()
            copied = None
        # Every piece is of the same step.
        counts = {name: t.clone() for name, t in work.state.items() if not t.dim()}
        for start in range(0, len(work.master), UPDATE_PIECE):
            piece = slice(start, min(start + UPDATE_PIECE, len(work.master)))
            for name, count in counts.items():
                work.state[name].copy_(count)
            # In place: this is the last read of the gradient of this step.
            self._update(work, optimizer, piece, grad[piece].div_(scale), copied)
        work.begun = True
        self._show(work)
        return CompletedFuture()

    def _host_reads_skip(self, work: _Bucket) -> bool:
        """Whether an update begins with the knowledge that it is not skipped."""
        on_host = work.master.device.type == "cpu"
        return not work.begun or on_host or any(t.is_cpu for t in work.state.values())

    def _update(
        self,
        work: _Bucket,
        optimizer: torch.optim.Optimizer,
        piece: slice,
        grad: Tensor,
        skip: Tensor | None,
    ) -> None:
        """Update a piece; where ``skip`` (0-dim, bool) is set, put back what was there."""
        values = work.master[piece]
        state = {name: t[piece] if t.dim() else t for name, t in work.state.items()}
        live = (values, *state.values())
        before = () if skip is None else tuple(tensor.clone() for tensor in live)
        left = step_part(
            optimizer, values, grad, state if work.begun else constructed(optimizer, values)
        )
        if left.keys() != state.keys():
            raise TrainingError(
                describe(
                    type(optimizer).__name__,
                    got=f"state {', '.join(left) or 'of nothing'} after a step",
                    expected=f"{', '.join(state) or 'none'}, as in a first step",
                    do="use an optimizer that has all of its state from its first step on",
                )
            )
        for name, tensor in state.items():
            if left[name] is not tensor:
                tensor.copy_(left[name])
        if skip is not None:
            for tensor, old in zip(live, before, strict=True):
                torch.where(skip, old, tensor, out=tensor)

    def change_options(self, groups: Sequence[UpdateOptions]) -> None:
        self._groups = tuple(groups)
        for work in self._buckets.values():
            number = work.shard.kind.group
            optimizer = self._optimizers[number]
            set_options(optimizer, self._group(number).options, work.master.device, lr=0.0)

    def _show(self, work: _Bucket) -> None:
        if work.shard.param_shard is not work.master:
            work.shard.param_shard.copy_(work.master)

    def refresh(self, bucket: int) -> None:
        work = self._buckets[bucket]
        self._show(work)
        floating = [t for t in work.state.values() if t.is_floating_point()]
        if self._group(work.shard.kind.group).initial is not None or not floating:
            return
        # State may have been loaded: with values, or as it was before the first step.
        before = work.begun
        work.begun = not all(bool(tensor.isnan().all()) for tensor in floating)
        if work.begun and not before:
            # What lies between parameters is loaded by nobody, and shall not be NaN.
            padding = torch.ones(len(work.master), dtype=torch.bool, device=work.master.device)
            for segment in work.shard.segments:
                padding[segment.in_shard : segment.in_shard + segment.length] = False
            for tensor in work.state.values():
                if tensor.dim():
                    tensor.masked_fill_(padding, 0)

    def state(self, bucket: int) -> dict[str, Tensor]:
        return self._buckets[bucket].state

    def reset(self) -> None:
        for bucket in self._buckets:
            self._begin(bucket)


def constructed(optimizer: torch.optim.Optimizer, values: Tensor) -> dict[str, Tensor]:
    """Return the state that the constructor makes for a parameter; empty if the first step does."""
    if type(optimizer) is not torch.optim.Adagrad:
        return {}
    group = optimizer.param_groups[0]
    return {
        "step": torch.zeros((), device=values.device if group["fused"] else "cpu"),
        "sum": torch.full_like(values, group["initial_accumulator_value"]),
    }
