"""AdamW on the host that nobody waits for longer than has to be: to the bit what waiting for every
update would give.

    backward    a gradient leaves for the host as soon as it is reduced; without clipping its bucket
                is updated at once
    norm        with clipping updates begin here, in the order in which the next forward pass needs
                buckets; or, speculating, they
                have been made during backward on a second copy, as if nothing were clipped, and are
                kept, or made again on the first
    forward     each layer waits for its own bucket only: update, copy to the device, gather

One thread computes: torch's fused AdamW, which gives the same bits whatever shards it is called on,
their lengths being multiples of 64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megatron_llama.config.schema import OptimizerConfig
from megatron_llama.distributed.comm.streams import Future
from megatron_llama.distributed.comm.worker import Task
from megatron_llama.distributed.recorder import Recorder
from megatron_llama.engine.offload.copies import Copies, Copy
from megatron_llama.engine.offload.failures import of_bucket
from megatron_llama.engine.offload.slabs import Slab
from megatron_llama.engine.offload.worker import HostWorker
from megatron_llama.engine.update_rule import Shard, adamw_step
from megatron_llama.plans.offload import FACTORS, STAGED, OffloadPlan

UPDATING = "updating"
SETTING_ASIDE = "setting aside"
"""What the worker's time is spent at."""


@dataclass
class _Factors:
    """Scale and skip of an update on their way to the host."""

    scale: Tensor
    skip: Tensor
    source: Tensor
    """[2] on the device: both of them."""
    here: Tensor
    """[2] on the host."""
    copy: Copy


_Values = tuple[Tensor, Tensor, Tensor]
"""Master and both moments of a shard."""


@dataclass
class _Held:
    """A bucket on the host."""

    shard: Shard
    label: str
    attached: _Values
    """Where everybody but the worker looks for them, when nothing is under way."""
    count: Tensor
    """Of updates, 0-dim."""
    grad: Tensor
    factors: Tensor
    decay: float
    spare: _Values | None = None
    """Room for a second copy; None: nothing is done ahead."""
    arrival: Copy | None = None
    attempt: Task | None = None
    """The update of this step that was tried before its scale was known."""
    ahead: Tensor | None = None
    """It was made on the second copy; the count of updates there."""
    update: Task | None = None
    """That of the last step."""
    live: _Values = field(init=False)
    """At the end of the last step; ``attached``, or what was the second copy."""

    def __post_init__(self) -> None:
        self.live = self.attached


@dataclass
class Attempts:
    """How often buckets were updated ahead of the norm, and what became of that."""

    kept: int = 0
    redone: int = 0


class ExactOffload:
    """An update rule (ShardUpdate) for the buckets of a plan. Masters, moments and arriving
    gradients are in the host's memory.

    ``blocking``: wait for every copy and update at once; the reference."""

    def __init__(
        self,
        config: OptimizerConfig,
        plan: OffloadPlan,
        *,
        dtype: torch.dtype,
        narrow: torch.dtype,
        device: torch.device,
        largest: int,
        label: Callable[[int], str],
        worker: HostWorker,
        copies: Copies,
        recorder: Recorder,
        blocking: bool = False,
    ) -> None:
        """``dtype``: of master and gradient; ``narrow``: of what is gathered; ``largest``: elements
        of the largest shard of the plan; ``label``: buckets for people. Raises OffloadError where
        memory is refused."""
        self._config = config
        self._plan = plan
        self._label = label
        self._recorder = recorder
        self._worker = worker
        self._copies = copies
        self._blocking = blocking
        self._slabs = {
            "state": Slab(plan.state // dtype.itemsize, dtype, device, "weights and moments"),
            "gradients": Slab(plan.gradients // dtype.itemsize, dtype, device, "gradients"),
            "undo": Slab(
                plan.undo // dtype.itemsize, dtype, device, "updates that may be taken back"
            ),
            "factors": Slab(
                FACTORS * len(plan.buckets), torch.float32, device, "scales of gradients"
            ),
            "staging": Slab(
                STAGED * largest if narrow != dtype else 0,
                narrow,
                device,
                "weights on their way to the device",
            ),
        }
        staging = self._slabs["staging"]
        self._staging = [staging.take(largest) for _ in range(STAGED)] if staging.nbytes else []
        self._sending: list[Copy | None] = [None] * STAGED
        self._sent = 0
        self._held: dict[int, _Held] = {}
        self._wanted: dict[int, float] = {}
        """Learning rates of updates that may be tried ahead; whoever takes one out decides about
        it."""
        self._factors: _Factors | None = None
        self._unscaled = torch.ones(())
        self._unskipped = torch.zeros(())
        self.to_host_bytes = self.to_device_bytes = 0
        """Of gradients and weights, so far."""
        self.attempts = Attempts()

    @property
    def nbytes(self) -> int:
        """Of all memory that it has taken from the host."""
        return sum(slab.nbytes for slab in self._slabs.values())

    def attach(self, shard: Shard) -> Tensor:
        """See ShardUpdate."""
        numel = shard.own.numel()
        bucket = shard.bucket
        self._held[bucket] = held = _Held(
            shard,
            self._label(bucket),
            _values(self._slabs["state"], numel),
            torch.zeros((), dtype=torch.float32),
            self._slabs["gradients"].take(numel),
            self._slabs["factors"].take(2),
            self._config.weight_decay if shard.kind.decay else 0.0,
            _values(self._slabs["undo"], numel) if bucket in self._plan.speculated else None,
        )
        return held.attached[0]

    def beside(self, bucket: int) -> bool:
        """See ShardUpdate."""
        return bucket in self._plan.buckets

    def arrived(self, bucket: int, grad: Tensor, *, ahead: float | None) -> None:
        """See ShardUpdate."""
        held = self._held[bucket]
        if held.update is not None:
            held.update.wait()  # long over: a forward pass has read what it made
        held.arrival = self._copies.to_host(held.grad, grad)
        self.to_host_bytes += grad.nbytes
        if self._blocking:
            with of_bucket(held.label), self._recorder.exposed("the optimizer on the host"):
                held.arrival.complete()
        elif ahead is not None and held.spare is not None:
            self._wanted[bucket] = ahead
            held.attempt = Task(partial(self._try, held))
            self._worker.put(held.attempt, turn=held.shard.turn)

    def release(self, bucket: int) -> None:
        """See ShardUpdate."""
        held = self._held[bucket]
        if held.arrival is not None:
            with of_bucket(held.label):
                held.arrival.wait()

    def step(self, bucket: int, grad: Tensor, *, scale: Tensor, skip: Tensor, lr: float) -> Future:
        """See ShardUpdate."""
        held = self._held[bucket]
        self._wanted.pop(bucket, None)  # with the scale there is nothing to try any more
        update = _Update(
            self, held, lr, self._factors_on_host(held, scale, skip), self._copies.given()
        )
        held.update = update.task
        self._worker.put(update.task, turn=held.shard.turn)
        if self._blocking:
            with self._recorder.exposed("the optimizer on the host"):
                update.complete()
        return update

    def _factors_on_host(self, held: _Held, scale: Tensor, skip: Tensor) -> _Factors:
        """One copy for all buckets that have them in common."""
        factors = self._factors
        if factors is None or factors.scale is not scale or factors.skip is not skip:
            source = torch.stack([scale, skip])
            copy = self._copies.to_host(held.factors, source)
            factors = self._factors = _Factors(scale, skip, source, held.factors, copy)
        return factors

    def _try(self, held: _Held) -> None:
        """In the worker: update as if nothing had to be clipped, unless the step has come
        meanwhile."""
        lr = self._wanted.pop(held.shard.bucket, None)
        if lr is None:
            return
        assert held.arrival is not None and held.spare is not None
        held.arrival.complete()
        with self._worker.working(SETTING_ASIDE, held.grad.numel()):
            for copy, tensor in zip(held.spare, held.live, strict=True):
                copy.copy_(tensor)
        count = held.count.clone()
        self._adamw(held, held.spare, count, self._unscaled, self._unskipped, lr)
        held.ahead = count

    def perform(self, held: _Held, lr: float, factors: _Factors) -> None:
        """In the worker: bring master and moments to the end of the step."""
        assert held.arrival is not None, f"{held.label}: no gradient has arrived"
        if held.attempt is not None:
            held.attempt.wait()  # it was before this in the queue
            held.attempt = None
        held.arrival.complete()
        factors.copy.complete()
        scale = factors.here[0]
        skip = factors.here[1]
        if held.ahead is not None:
            count = held.ahead
            held.ahead = None
            if float(scale) == 1.0 and not bool(skip):
                self.attempts.kept += 1
                assert held.spare is not None
                held.live, held.spare = held.spare, held.live
                held.count.copy_(count)
                return
            self.attempts.redone += 1
        self._adamw(held, held.live, held.count, scale, skip, lr)

    def _adamw(
        self, held: _Held, values: _Values, count: Tensor, scale: Tensor, skip: Tensor, lr: float
    ) -> None:
        master, average, square = values
        state = {"exp_avg": average, "exp_avg_sq": square, "step": count}
        with self._worker.working(UPDATING, master.numel()):
            adamw_step(
                master,
                held.grad,
                state,
                self._config,
                decay=held.decay,
                scale=scale,
                skip=skip,
                lr=lr,
            )

    def send(self, held: _Held, given: Future) -> Copy:
        """In the worker: the new weights go to the device."""
        own = held.shard.own
        source = held.live[0]
        if self._staging:
            number = self._sent % STAGED
            last = self._sending[number]
            if last is not None:
                last.complete()
            source = self._staging[number][: own.numel()].copy_(source)
        copy = self._copies.to_device(own, source, after=given)
        if self._staging:
            self._sending[number] = copy
        self._sent += 1
        self.to_device_bytes += own.nbytes
        return copy

    def finish(self, steps: Future, *, scale: Tensor, skip: Tensor) -> None:
        """See ShardUpdate."""

    def refresh(self, bucket: int) -> None:
        """See ShardUpdate."""
        held = self._held[bucket]
        held.shard.own.copy_(held.attached[0])

    def settle(self) -> Mapping[int, Future]:
        """See ShardUpdate. Nothing is put off beyond its step; what became of second copies goes
        where everybody looks for it."""
        for held in self._held.values():
            if held.update is not None:
                with of_bucket(held.label), self.waiting():
                    held.update.wait()
            if held.live is not held.attached:
                for tensor, copy in zip(held.attached, held.live, strict=True):
                    tensor.copy_(copy)
                held.live, held.spare = held.attached, held.live
        return {}

    def forget(self) -> None:
        """See ShardUpdate."""
        for held in self._held.values():
            for tensor in (*held.attached[1:], held.count):
                tensor.zero_()

    def state(self, bucket: int) -> dict[str, Tensor]:
        """See ShardUpdate."""
        held = self._held[bucket]
        return {"exp_avg": held.attached[1], "exp_avg_sq": held.attached[2], "step": held.count}

    def waiting(self) -> AbstractContextManager[None]:
        """A section in which somebody waits for the host."""
        return self._recorder.waiting("the optimizer on the host")

    def close(self) -> None:
        """See ShardUpdate."""
        self._worker.close()
        self._copies.close()

    def join(self, seconds: float) -> None:
        """See ShardUpdate."""
        self._worker.join(seconds)
        self._copies.join(seconds)


def _values(slab: Slab, numel: int) -> _Values:
    return slab.take(numel), slab.take(numel), slab.take(numel)


class _Update:
    """The update of one bucket in one step: a Future."""

    def __init__(
        self, rule: ExactOffload, held: _Held, lr: float, factors: _Factors, given: Future
    ) -> None:
        self._rule = rule
        self._held = held
        self._sent: Copy | None = None
        self.task = Task(partial(self._run, lr, factors, given))

    def _run(self, lr: float, factors: _Factors, given: Future) -> None:
        with of_bucket(self._held.label):
            self._rule.perform(self._held, lr, factors)
            self._sent = self._rule.send(self._held, given)

    def _update(self) -> Copy:
        with self._rule.waiting():
            self.task.wait()
        assert self._sent is not None
        return self._sent

    def wait(self) -> None:
        """See Future."""
        sent = self._update()
        with of_bucket(self._held.label):
            sent.wait()

    def complete(self) -> None:
        """The host waits for all of it."""
        sent = self._update()
        with of_bucket(self._held.label):
            sent.complete()
