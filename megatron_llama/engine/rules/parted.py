"""Updates of some of the parameters of a bucket.

A rule updates a shard as a whole, and counts the steps of all its parameters together. Where
parameters are frozen between steps, or used by no rank in a step, torch.optim leaves each of them
out: it does not decay, its moments stay, and so does its count of steps. ``PartedRule`` stands
between the engine and such a rule. It cuts a shard into *runs* of parameters that have been left
out of the same steps, each with numbers of its own, and updates the runs that belong to a step.

A shard is cut when a step leaves out a part of its bucket, and not before: until then its update is
one call as without this. Runs are not joined again in training, because the host does not know
whether two of them have the same numbers: a step that is skipped counts for none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from itertools import count, groupby

from torch import Tensor

from megatron_llama.engine.comm.streams import CompletedFuture, Future
from megatron_llama.engine.plan.buckets import BucketPlan
from megatron_llama.engine.rules.divisible import DivisibleRule
from megatron_llama.engine.rules.update_rule import Shard, UpdateRule

Names = Collection[str]


@dataclass(frozen=True)
class _Run:
    """Parameters that lie next to each other in a shard, and are updated together."""

    key: int
    """Its number for the rule: the bucket, until the shard is cut."""
    piece: slice
    """Its elements in the shard; padding belongs to the parameter before it."""
    starts: Mapping[str, int]
    """By parameter, its first element in the shard. There is none in a shard of padding alone."""


class PartedRule(UpdateRule):
    """Updates those parameters of a shard that are not left out of a step, by another rule."""

    def __init__(self, rule: DivisibleRule, bucket_plan: BucketPlan, shard_rank: int) -> None:
        self.rule = rule
        self.averages = rule.averages
        self.needs_whole_step = rule.needs_whole_step
        self.takes_options = rule.takes_options
        self._plan = bucket_plan
        self._shard_rank = shard_rank
        self._keys = count(len(bucket_plan.buckets))
        self._names = {
            bucket.index: frozenset(placed.spec.name for placed in bucket.placements)
            for bucket in bucket_plan.buckets
        }
        """The parameters of each bucket, also those of which this rank has no part."""
        self._runs: dict[int, list[_Run]] = {}
        """By bucket that is divided, the runs of this rank's shard. All ranks divide the same
        buckets, whatever their shards hold."""
        self._left_out: Callable[[], Names] = tuple
        self._updates: Future = CompletedFuture()
        """The end of the last step's updates."""

    def leave_out(self, names: Callable[[], Names]) -> None:
        """Leave parameters out of the coming steps. ``names`` is called by the first update of
        each, and returns the same on all ranks."""
        # A thread may still be making the updates of the last step, which has others.
        self._updates.wait()
        self._left_out = names

    def step(self, bucket: int, grad: Tensor, *, scale: Tensor, skip: Tensor, lr: float) -> Future:
        names = self._names[bucket]
        left_out = names.intersection(self._left_out())
        if left_out == names:
            return CompletedFuture()
        if not left_out and bucket not in self._runs:
            return self.rule.step(bucket, grad, scale=scale, skip=skip, lr=lr)
        if left_out:
            self._cut(bucket, {name: name in left_out for name in names})
        for run in self._runs[bucket]:
            if left_out.isdisjoint(run.starts):
                self.rule.step(run.key, grad[run.piece], scale=scale, skip=skip, lr=lr)
        return CompletedFuture()

    def end_step(self, steps: Future, *, scale: Tensor, skip: Tensor) -> None:
        self._updates = steps

    def _cut(self, bucket: int, classes: Mapping[str, Hashable]) -> None:
        """Divide a bucket, so that each run has parameters of one class."""
        runs = self._runs.get(bucket) or [self._whole(bucket)]
        self._runs[bucket] = [part for run in runs for part in self._cut_run(run, classes)]

    def _whole(self, bucket: int) -> _Run:
        segments = self._plan.segments(bucket, self._shard_rank)
        starts = {segment.spec.name: segment.in_shard for segment in segments}
        return _Run(bucket, slice(0, self._plan.shard_numel(bucket)), starts)

    def _cut_run(self, run: _Run, classes: Mapping[str, Hashable]) -> list[_Run]:
        together = [list(names) for _, names in groupby(run.starts, classes.__getitem__)]
        if len(together) < 2:
            return [run]
        edges = [run.piece.start, *(run.starts[names[0]] for names in together[1:]), run.piece.stop]
        parts = []
        for names, start, stop in zip(together, edges, edges[1:], strict=False):
            key = next(self._keys)
            place = slice(start - run.piece.start, stop - run.piece.start)
            self.rule.divide(run.key, key, place)
            parts.append(_Run(key, slice(start, stop), {name: run.starts[name] for name in names}))
        if run.key not in self._names:
            self.rule.drop(run.key)
        return parts

    def _join(self, bucket: int) -> None:
        """Update a bucket as a whole again."""
        for run in self._runs.pop(bucket, ()):
            if run.key != bucket:
                self.rule.drop(run.key)

    # Between steps: states

    def numbers(self, bucket: int) -> dict[str, dict[str, Tensor]] | None:
        """Return the numbers of each parameter that this rank has a part of, live. None if the
        bucket is not divided: then those of ``state`` are those of all its parameters."""
        if bucket not in self._runs:
            return None
        return {
            name: {
                what: tensor
                for what, tensor in self.rule.state(run.key).items()
                if not tensor.dim()
            }
            for run in self._runs[bucket]
            for name in run.starts
        }

    def divide(self, bucket: int, classes: Mapping[str, Hashable], *, anew: bool) -> None:
        """Let parameters of different classes have numbers of their own, before these are loaded.
        ``anew`` says that all of them are: then parameters of one class share them from now on,
        also if they have not before. All ranks give the same."""
        if anew:
            self._join(bucket)
        if len(set(classes.values())) > 1:
            self._cut(bucket, classes)

    # What the rule itself does with a whole bucket

    def attach(self, shard: Shard) -> Tensor:
        return self.rule.attach(shard)

    def refresh(self, bucket: int) -> None:
        for key in [run.key for run in self._runs.get(bucket, ())] or [bucket]:
            self.rule.refresh(key)

    def show_average(self, bucket: int) -> None:
        self.rule.show_average(bucket)

    def state(self, bucket: int) -> dict[str, Tensor]:
        return self.rule.state(bucket)

    def reset(self) -> None:
        # The rule itself, which is asked as well, returns all numbers to the same values.
        for bucket in list(self._runs):
            self._join(bucket)
