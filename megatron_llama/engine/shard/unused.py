"""Parameters that are left out of steps, as torch.optim leaves out those without a gradient:
``shard(unused="skip")``, and what is frozen apart from others of its bucket.

Ranks may use different parameters. One message a step, of a byte for each parameter, says which of
them some rank has used: these are trained with the mean over all ranks, and the others not at all.
The message is under way while the step reduces its gradients, and the first update waits for it.
The host waits for other hosts then, and never for a device.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama.engine.comm.collectives import Pending, all_reduce
from megatron_llama.engine.comm.object_collectives import all_gather_object
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.options import ADAM, SCHEDULE_FREE, TORCH
from megatron_llama.engine.rules.divisible import DivisibleRule
from megatron_llama.engine.rules.parted import PartedRule
from megatron_llama.engine.shard.optimizer import ParameterGroup
from megatron_llama.errors import ConfigError

DIVISIBLE = (ADAM, SCHEDULE_FREE, TORCH)
"""The rules that can leave out some parameters of a bucket."""


def require_skippable(groups: Sequence[ParameterGroup], optimizer_offload: str) -> None:
    """Raise ConfigError where updates cannot leave out single parameters."""
    kinds = dict.fromkeys(group.kind for group in groups if group.rule not in DIVISIBLE)
    if optimizer_offload != "none" or kinds:
        raise ConfigError(
            "shard(unused=)",
            got='"skip" with '
            + (" and ".join(kinds) or f'optimizer_offload="{optimizer_offload}"'),
            expected="an optimizer that can leave out some parameters of a step: AdamW, schedule-"
            "free AdamW or an elementwise one of torch, on the device",
            do='leave the other out, or take unused="zero", with which such parameters decay',
        )


def is_divisible(engine: OverlappedDistributedOptimizer, bucket: int) -> bool:
    """Whether some parameters of a bucket can be updated without the others."""
    return isinstance(engine.rules.by_bucket[bucket], DivisibleRule | PartedRule)


def parted_rules(engine: OverlappedDistributedOptimizer) -> Sequence[PartedRule]:
    """Return the rules of an engine that can leave parameters out of steps. The first call puts
    them into the places of those that update whole buckets; no update is under way then."""
    rules = engine.rules
    present = [rule for rule in rules.distinct if isinstance(rule, PartedRule)]
    if present:
        return present
    made = {
        id(rule): PartedRule(rule, engine.bucket_plan, engine.mesh.dp_shard.rank)
        for rule in rules.distinct
        if isinstance(rule, DivisibleRule)
    }
    # In place: the engine's parts share these lists.
    rules.distinct.extend(made.values())
    rules.by_bucket[:] = [made.get(id(rule), rule) for rule in rules.by_bucket]
    return tuple(made.values())


class Unused:
    """Finds out, in each step, which parameters no rank has used."""

    def __init__(self, engine: OverlappedDistributedOptimizer) -> None:
        self._rules = parted_rules(engine)
        self._axis = engine.mesh.world
        self.names = tuple(
            placed.spec.name
            for bucket in engine.gradients.trainable
            for placed in engine.bucket_plan.buckets[bucket].placements
        )
        """The trainable parameters."""

    def ask(self, used: Collection[str]) -> None:
        """Say which parameters have a gradient on this rank, before the updates of a step, which
        leave out those that have one on no rank. Collective; does not wait."""
        # On the host, so that the answer needs no device.
        by_rank = torch.tensor([name in used for name in self.names], dtype=torch.uint8)
        pending = all_reduce(by_rank, self._axis, dist.ReduceOp.MAX)
        names = cache(lambda: self._without_gradient(by_rank, pending))
        for rule in self._rules:
            rule.leave_out(names)

    def _without_gradient(self, used: Tensor, pending: Pending) -> frozenset[str]:
        pending.wait()
        return frozenset(
            name for name, is_used in zip(self.names, used.tolist(), strict=True) if not is_used
        )


def numbers_by_parameter(engine: OverlappedDistributedOptimizer) -> dict[str, dict[str, Tensor]]:
    """Return the numbers among the optimizer's state of each trained parameter, such as its count
    of steps: copies on the host. Collective where parameters have been left out of steps, unless
    each rank has everything."""
    numbers: dict[str, dict[str, Tensor]] = {}
    apart: dict[str, dict[str, Tensor]] = {}
    is_divided = False
    for bucket in engine.gradients.trainable:
        rule = engine.rules.by_bucket[bucket]
        common = rule.state(bucket)
        for placed in engine.bucket_plan.buckets[bucket].placements:
            numbers[placed.spec.name] = _copied(common)
        of_bucket = rule.numbers(bucket) if isinstance(rule, PartedRule) else None
        if of_bucket is not None:
            is_divided = True
            apart |= {name: _copied(own) for name, own in of_bucket.items()}
    if is_divided:
        # Only the ranks that have a part of a parameter count its steps. One without elements, of
        # which none has a part, keeps the numbers that its bucket had last.
        for of_rank in all_gather_object(apart, engine.mesh.dp_gather):
            numbers |= of_rank
    return numbers


def write_numbers(
    engine: OverlappedDistributedOptimizer,
    numbers: Mapping[str, Mapping[str, float]],
    begun: Mapping[str, bool],
) -> None:
    """Give trained parameters their numbers, after the rest of their state. Others keep theirs.

    ``begun`` says whether the state of a parameter has values. If not, its optimizer makes them in
    its first step, which may be the first one for some parameters of a bucket alone."""
    for bucket in engine.gradients.trainable:
        placements = engine.bucket_plan.buckets[bucket].placements
        names = [placed.spec.name for placed in placements]
        # What keeps its numbers is cut from the rest, and not joined with what had others.
        classes: dict[str, Hashable] = {
            name: (tuple(map(repr, numbers[name].items())), begun.get(name, True))
            if name in numbers
            else None
            for name in names
        }
        # What no rank has a part of can have no count apart from others.
        counted = [placed.spec.name for placed in placements if placed.spec.numel]
        of_counted = {name: classes[name] for name in counted}
        if len(set(of_counted.values())) > 1 or isinstance(
            engine.rules.by_bucket[bucket], PartedRule
        ):
            parted_rules(engine)
        rule = engine.rules.by_bucket[bucket]
        apart = None
        if isinstance(rule, PartedRule):
            rule.divide(bucket, of_counted, anew=numbers.keys() >= set(counted))
            apart = rule.numbers(bucket)
        of_parameters = (
            dict.fromkeys(counted or names, rule.state(bucket)) if apart is None else apart
        )
        for name, live in of_parameters.items():
            for what, number in numbers.get(name, {}).items():
                live[what].fill_(number)


def _copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        what: tensor.detach().clone().cpu() for what, tensor in state.items() if not tensor.dim()
    }
