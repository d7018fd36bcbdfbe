"""The change of what is trained, where ``requires_grad_`` has been called between steps.

Some parameters of a bucket may be frozen without the others (``engine/rules/parted.py``), except
where the host updates or Muon does: there what is updated together is frozen together.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.pieces import rule_progress
from megatron_llama.engine.rules.parted import PartedRule
from megatron_llama.engine.shard.freezing import Freezing
from megatron_llama.engine.shard.order import AccessOrder
from megatron_llama.engine.shard.unused import is_divisible, parted_rules
from megatron_llama.engine.shard.values import named
from megatron_llama.errors import TrainingError, describe, listing


class FreezeError(TrainingError, RuntimeError):
    """``requires_grad_`` at a moment, or for parameters, where the engine cannot follow it."""


def train_what_is_asked(
    engine: OverlappedDistributedOptimizer, freezing: Freezing, order: AccessOrder
) -> None:
    """Train from now on the parameters that were asked for, and no others. Collective. Raises
    FreezeError for those that the engine cannot train or freeze, OrderError where ranks differ."""
    asked = {**dict.fromkeys(freezing.names, False), **freezing.asked}
    frozen = frozenset(name for name, trained in asked.items() if not trained)
    problems = [*_problems(engine, freezing, frozen)]
    if problems:
        raise FreezeError(listing("requires_grad_ after shard():", problems))
    order.agree_to_freeze(frozen)
    buckets = frozenset(freezing.freeze_as_asked())
    engine.freeze(buckets)
    in_part = frozen.difference(*(freezing.names_of[bucket] for bucket in buckets))
    if in_part or any(isinstance(rule, PartedRule) for rule in engine.rules.distinct):
        engine.settle()  # updates of the last step may be under way
        for rule in parted_rules(engine):
            rule.leave_out(lambda: in_part)


def _problems(
    engine: OverlappedDistributedOptimizer, freezing: Freezing, frozen: frozenset[str]
) -> Iterator[str]:
    """Yield what is wrong with the parameters that were asked for, of which those in ``frozen``
    shall not be trained."""
    # Not where it is asked: adapters are switched on and off again around passes without
    # gradients, and a parameter without a gradient may be asked for one meanwhile.
    untrained = [name for name in freezing.asked if not freezing.may_train(name)]
    if untrained:
        yield describe(
            named(untrained),
            got="requires_grad=True",
            expected="False as in shard(), which has made no optimizer state for them",
            do="let them require gradients before shard(), and freeze them after that until they "
            "are trained",
        )
    if rule_progress(engine) is not None:
        yield describe(
            "requires_grad_",
            got=f"another value for {named(freezing.asked)}",
            expected='what it was in shard(), with optimizer_offload="zenflow"',
            do='take optimizer_offload="exact" or "none"',
        )
    for bucket, names in freezing.names_of.items():
        apart = [name for name in names if name in frozen]
        trained = [name for name in names if name not in frozen]
        if apart and trained and not is_divisible(engine, bucket):
            yield describe(
                engine.bucket_plan.label(bucket),
                got=f"requires_grad=False for {named(apart)} and True for {named(trained)}",
                expected="one value for what this optimizer updates together",
                do="give them groups of their own, as in "
                f'shard(optimizer=ml.AdamW(groups=[ml.group("{apart[0]}")]))',
            )
