"""The weights for evaluation, if an update rule trains others (schedule-free AdamW).

Such a rule keeps an average as the master, and the point at which gradients are taken in the shard.
Evaluation, checkpoints and exports are of the average.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_llama.engine.parameters import ParameterBuckets
from megatron_llama.engine.rules.update_rule import UpdateRules


class EvaluationWeights:
    """The choice between two kinds of weights in the shards."""

    def __init__(
        self, parameters: ParameterBuckets, rules: UpdateRules, trained: Sequence[int]
    ) -> None:
        """``trained`` are the trainable buckets in forward order."""
        self._parameters = parameters
        self._rules = rules
        self.buckets = tuple(bucket for bucket in trained if rules.by_bucket[bucket].averages)
        """The buckets that have two kinds."""
        self._shown = False
        """Whether their shards are those for evaluation."""

    def reset(self) -> None:
        """Note that the shards have been written, with the weights for training."""
        self._shown = False

    def show(self, *, average: bool) -> None:
        """Gather the weights for evaluation, or for training, if the shards hold the others."""
        if not self.buckets or average == self._shown:
            return
        self._shown = average
        self._parameters.settle()  # a shard that is being gathered must not change
        # Gathered by all ranks here, at a fixed point of the program, as prefetching demands.
        self._parameters.invalidate(self.buckets)
        for bucket in self.buckets:
            rule = self._rules.by_bucket[bucket]
            if average:
                rule.show_average(bucket)
            else:
                rule.refresh(bucket)
            self._parameters.publish(bucket)
