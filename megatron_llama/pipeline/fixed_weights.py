"""The engine of a model that is only evaluated."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from megatron_llama.engine.plan.weight_access import WeightAccess


class FixedWeights:
    """A ``runtime.Engine`` whose weights are always there: they are never sharded."""

    def access(self, unit: int, backward: bool) -> None:
        pass

    def begin_evaluation(self, accesses: Sequence[WeightAccess]) -> None:
        pass

    def begin_preliminary(self, accesses: Sequence[WeightAccess]) -> None:
        pass

    def begin_step(self, microbatches: int, accesses: Sequence[WeightAccess]) -> Tensor:
        raise RuntimeError("a model without an optimizer has no training step")

    def postpone_wgrads(self, key: Hashable | None) -> None:
        pass

    def run_wgrads(self, key: Hashable) -> None:
        pass
