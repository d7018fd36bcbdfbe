"""Some buckets are one rule's, the others another's."""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import Tensor

from megatron_llama.distributed.comm.streams import Future
from megatron_llama.engine.update_rule import Shard, ShardUpdate


class Divided:
    """An update rule (ShardUpdate) of two: ``chosen`` buckets go to ``rule``, the others to
    ``rest``."""

    def __init__(self, chosen: Container[int], rule: ShardUpdate, rest: ShardUpdate) -> None:
        self.chosen = chosen
        self.rule = rule
        self.rest = rest

    def _of(self, bucket: int) -> ShardUpdate:
        return self.rule if bucket in self.chosen else self.rest

    def attach(self, shard: Shard) -> Tensor:
        """See ShardUpdate."""
        return self._of(shard.bucket).attach(shard)

    def beside(self, bucket: int) -> bool:
        """See ShardUpdate."""
        return self._of(bucket).beside(bucket)

    def arrived(self, bucket: int, grad: Tensor, *, ahead: float | None) -> None:
        """See ShardUpdate."""
        self._of(bucket).arrived(bucket, grad, ahead=ahead)

    def release(self, bucket: int) -> None:
        """See ShardUpdate."""
        self._of(bucket).release(bucket)

    def step(self, bucket: int, grad: Tensor, *, scale: Tensor, skip: Tensor, lr: float) -> Future:
        """See ShardUpdate."""
        return self._of(bucket).step(bucket, grad, scale=scale, skip=skip, lr=lr)

    def finish(self, steps: Future, *, scale: Tensor, skip: Tensor) -> None:
        """See ShardUpdate."""
        self.rule.finish(steps, scale=scale, skip=skip)
        self.rest.finish(steps, scale=scale, skip=skip)

    def refresh(self, bucket: int) -> None:
        """See ShardUpdate."""
        self._of(bucket).refresh(bucket)

    def settle(self) -> Mapping[int, Future]:
        """See ShardUpdate."""
        return {**self.rule.settle(), **self.rest.settle()}

    def forget(self) -> None:
        """See ShardUpdate."""
        self.rule.forget()
        self.rest.forget()

    def state(self, bucket: int) -> dict[str, Tensor]:
        """See ShardUpdate."""
        return self._of(bucket).state(bucket)

    def close(self) -> None:
        """See ShardUpdate."""
        self.rule.close()
        self.rest.close()

    def join(self, seconds: float) -> None:
        """See ShardUpdate."""
        self.rule.join(seconds)
        self.rest.join(seconds)
