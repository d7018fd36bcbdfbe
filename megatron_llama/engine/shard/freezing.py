"""Parameters that are trained in some steps and frozen in others, by ``requires_grad_``.

Adapters that are switched, layers that thaw one after the other, the discriminator of a GAN while
its generator learns: all of them call ``requires_grad_`` between steps. Placeholders note it, and
the next pass that trains makes it so on all ranks (``requires_grad.py``). What is frozen gets no
gradient, no update and no weight decay, and its moments and step count stay, as in torch.optim.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.shard.holders import Holders


class Freezing:
    """The parameters that are trained now, and those that shall be from the next pass on."""

    def __init__(self, engine: OverlappedDistributedOptimizer, holders: Holders) -> None:
        self._holders = holders
        plan = engine.bucket_plan
        self.names_of = {
            bucket: [placed.spec.name for placed in plan.buckets[bucket].placements]
            for bucket in engine.gradients.trainable
        }
        """The parameters of each bucket that may be trained."""
        self._trainable = {name for names in self.names_of.values() for name in names}
        self._asked: dict[str, bool] = {}
        """By parameter, what ``requires_grad`` shall be where that is not what it is."""
        self.names: frozenset[str] = frozenset()
        """The trainable parameters that are frozen now."""
        self.buckets: frozenset[int] = frozenset()
        """The trainable buckets of which all is frozen now."""

    @property
    def everything(self) -> bool:
        """Whether nothing is trained now."""
        return len(self.buckets) == len(self.names_of)

    @property
    def asked(self) -> Mapping[str, bool]:
        """The parameters that shall be trained and are not, or the other way round."""
        return self._asked

    def may_train(self, name: str) -> bool:
        """Whether a parameter was trained in ``shard``, so that it may be now."""
        return name in self._trainable

    def ask(self, name: str, trained: bool) -> None:
        """Note that a parameter shall be trained, or not."""
        if self._holders.trained[name] == trained:
            self._asked.pop(name, None)
        else:
            self._asked[name] = trained

    def freeze_as_asked(self) -> Collection[int]:
        """Let the parameters require gradients as was asked. Returns the buckets that get none."""
        for name, trained in self._asked.items():
            self._holders.set_trained(name, trained)
        self._asked.clear()
        trained_now = self._holders.trained
        self.names = frozenset(name for name in self._trainable if not trained_now[name])
        self.buckets = frozenset(
            bucket for bucket, own in self.names_of.items() if self.names.issuperset(own)
        )
        return self.buckets
