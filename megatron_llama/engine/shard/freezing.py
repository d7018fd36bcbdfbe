"""Parameters that are trained in some steps and frozen in others, by ``requires_grad_``.

Adapters that are switched, layers that thaw one after the other, the discriminator of a GAN while
its generator learns: all of them call ``requires_grad_`` between steps. Placeholders note it, and
the next pass that trains makes it so on all ranks. A frozen bucket gets no gradient, no update and
no weight decay, and its moments and step count stay, as in torch.optim.

Some parameters of a bucket may be frozen without the others (``engine/rules/parted.py``), except
where the host updates or Muon does: there what is updated together is frozen together.
"""

from __future__ import annotations

from collections.abc import Collection

from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.pieces import rule_progress
from megatron_llama.engine.shard.holders import Holders
from megatron_llama.engine.shard.values import named
from megatron_llama.errors import TrainingError, describe, listing


class FreezeError(TrainingError, RuntimeError):
    """``requires_grad_`` at a moment, or for parameters, where the engine cannot follow it."""


class Freezing:
    """The parameters that are trained now, and those that shall be from the next pass on."""

    def __init__(self, engine: OverlappedDistributedOptimizer, holders: Holders) -> None:
        self._engine = engine
        self._holders = holders
        plan = engine.bucket_plan
        self._names = {
            bucket: [placed.spec.name for placed in plan.buckets[bucket].placements]
            for bucket in engine.gradients.trainable
        }
        """The parameters of each bucket that may be trained."""
        self._trainable = {name for names in self._names.values() for name in names}
        self._asked: dict[str, bool] = {}
        """By parameter, what ``requires_grad`` shall be where that is not what it is."""
        self.names: frozenset[str] = frozenset()
        """The trainable parameters that are frozen now."""
        self.buckets: frozenset[int] = frozenset()
        """The trainable buckets of which all is frozen now."""
        self._cut: frozenset[str] = frozenset()
        """The parameters that are frozen now, and others of their bucket are not."""

    @property
    def everything(self) -> bool:
        """Whether nothing is trained now."""
        return len(self.buckets) == len(self._names)

    @property
    def asked(self) -> Collection[str]:
        """The parameters that shall be trained and are not, or the other way round."""
        return self._asked.keys()

    def may_train(self, name: str) -> bool:
        """Whether a parameter was trained in ``shard``, so that it may be now."""
        return name in self._trainable

    def ask(self, name: str, trained: bool) -> None:
        """Note that a parameter shall be trained, or not."""
        if self._holders.trained[name] == trained:
            self._asked.pop(name, None)
        else:
            self._asked[name] = trained

    def asked_names(self) -> frozenset[str]:
        """Return the trainable parameters that shall be frozen. Raises FreezeError for parameters
        that were frozen in ``shard``, and for those that can only be updated together and shall not
        be frozen together."""
        asked = {**self._holders.trained, **self._asked}
        problems = []
        # Not where it is asked: adapters are switched on and off again around passes without
        # gradients, and a parameter without a gradient may be asked for one meanwhile.
        untrained = [name for name in self._asked if name not in self._trainable]
        if untrained:
            problems.append(
                describe(
                    named(untrained),
                    got="requires_grad=True",
                    expected="False as in shard(), which has made no optimizer state for them",
                    do="let them require gradients before shard(), and freeze them after that "
                    "until they are trained",
                )
            )
        if rule_progress(self._engine) is not None:
            problems.append(
                describe(
                    "requires_grad_",
                    got=f"another value for {named(self._asked)}",
                    expected='what it was in shard(), with optimizer_offload="zenflow"',
                    do='take optimizer_offload="exact" or "none"',
                )
            )
        for bucket, names in self._names.items():
            frozen = [name for name in names if not asked[name]]
            trained = [name for name in names if asked[name]]
            if frozen and trained and not _divides(self._engine, bucket):
                problems.append(
                    describe(
                        self._engine.bucket_plan.label(bucket),
                        got=f"requires_grad=False for {named(frozen)} and True for "
                        f"{named(trained)}",
                        expected="one value for what this optimizer updates together",
                        do="give them groups of their own, as in "
                        f'shard(optimizer=ml.AdamW(groups=[ml.group("{frozen[0]}")]))',
                    )
                )
        if problems:
            raise FreezeError(listing("requires_grad_ after shard():", problems))
        return frozenset(name for name in self._trainable if not asked[name])

    def freeze(self, names: frozenset[str]) -> None:
        """Train what was asked from now on: ``names`` are those of ``asked_names``."""
        for name, trained in self._asked.items():
            self._holders.set_trained(name, trained)
        self._asked.clear()
        self.names = names
        self.buckets = frozenset(
            bucket for bucket, own in self._names.items() if names.issuperset(own)
        )
        self._engine.freeze(self.buckets)
        cut = names.difference(*(self._names[bucket] for bucket in self.buckets))
        if cut != self._cut:
            # What most runs do not need is imported where it is asked for.
            from megatron_llama.engine.shard.unused import parted_rules

            self._cut = cut
            self._engine.settle()  # updates of the last step may be under way
            for rule in parted_rules(self._engine):
                rule.leave_out(lambda: cut)


def _divides(engine: OverlappedDistributedOptimizer, bucket: int) -> bool:
    from megatron_llama.engine.shard.unused import is_divisible

    return is_divisible(engine, bucket)
