"""The engine's end of a parameter's handle (``engine/param_handle.py``)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from megatron_llama.engine.gradients import GradientBuckets
from megatron_llama.engine.parameters import ParameterBuckets
from megatron_llama.engine.plan.buckets import PlacedParam


@dataclass(frozen=True)
class BucketParamHandle:
    """The engine's side of one parameter: a ``ParamHandle``. Each call may wait for messages of
    other ranks."""

    parameters: ParameterBuckets
    gradients: GradientBuckets
    bucket: int
    placement: PlacedParam
    waits: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes the context in which each call waits: ``shard`` explains there why a wait has failed.
    The trainer has none."""

    def wait_unsharded(self) -> int:
        with self.waits():
            return self.parameters.wait_unsharded(self.bucket, self.placement.spec.name)

    def check_version(self, version: int) -> None:
        with self.waits():
            self.parameters.check_version(self.bucket, self.placement.spec.name, version)

    def grad_view(self) -> tuple[Tensor, float]:
        with self.waits():
            return self.gradients.grad_view(self.bucket, self.placement)

    def grad_written(self) -> None:
        with self.waits():
            self.gradients.grad_written(self.bucket, self.placement)

    def keep_wgrad(self, work: Callable[[], object]) -> bool:
        # The only call that waits for nothing.
        return self.gradients.keep_wgrad(work)
