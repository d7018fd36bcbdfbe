"""Exact optimizer offload: AdamW on the host, overlapped with the device's work, with the bits that
waiting for every update would give.

    backward    A gradient is copied to the host as soon as it is reduced. Without clipping its
                bucket is updated at once.
    norm        With clipping updates begin here, in the order in which the next forward pass needs
                the buckets. With --offload-speculative they have been made during backward on a
                second copy, as if nothing were clipped; they are kept, or made again on the first.
    forward     Each layer waits for its own bucket only: update, copy to the device, all-gather.

One worker thread updates, with torch's fused AdamW. The kernel gives the same bits however the
elements are cut into calls, because all lengths are multiples of 64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megatron_llama.engine.comm.recorder import Recorder
from megatron_llama.engine.comm.streams import Future
from megatron_llama.engine.comm.worker import Task
from megatron_llama.engine.offload.build import Host
from megatron_llama.engine.offload.copies import Copies, Copy
from megatron_llama.engine.offload.pinned_buffer import PinnedBuffer
from megatron_llama.engine.offload.worker import HostWorker, errors_of_bucket
from megatron_llama.engine.options import UpdateOptions
from megatron_llama.engine.plan.offload import FACTORS, STAGED, OffloadPlan
from megatron_llama.engine.rules.registry import RuleInputs
from megatron_llama.engine.rules.update_rule import Shard, UpdateRule, adamw_step

UPDATING = "updating"
COPYING_STATE = "copying state"
"""Kinds of work on which the worker spends its time."""


@dataclass
class _Factors:
    """Scale and skip of an update, on their way to the host."""

    scale: Tensor
    skip: Tensor
    on_host: Tensor
    """[2] on the host."""
    copy: Copy


_State = tuple[Tensor, Tensor, Tensor]
"""Master and both moments of a shard."""


@dataclass
class _HostShard:
    """The state of one bucket on the host."""

    shard: Shard
    label: str
    attached: _State
    """Where the engine and checkpoints look when nothing is in flight."""
    count: Tensor
    """Number of updates, 0-dim."""
    grad: Tensor
    """Where the gradient arrives."""
    factors: Tensor
    """[2], room for scale and skip."""
    spare: _State | None = None
    """Room for a second copy; None: this bucket is not updated speculatively."""
    arrival: Copy | None = None
    """The copy of the last gradient to the host."""
    attempt: Task | None = None
    """The speculative update of this step."""
    speculative_count: Tensor | None = None
    """The number of updates of the second copy, if a speculative update has been made there."""
    update: Task | None = None
    """The update of the last step."""
    live: _State = field(init=False)
    """The state at the end of the last step: ``attached``, or the former second copy."""

    def __post_init__(self) -> None:
        self.live = self.attached


@dataclass
class Speculation:
    """How often speculative updates were kept, and how often they had to be made again."""

    kept: int = 0
    redone: int = 0


def exact_offload(inputs: RuleInputs, host: Host) -> ExactOffload:
    """Build the rule of exact offload."""
    bucket_plan = inputs.bucket_plan
    return ExactOffload(
        inputs.options.groups,
        host.plan,
        master_dtype=inputs.master_dtype,
        compute_dtype=inputs.dtype,
        device=inputs.mesh.device,
        largest=max(map(bucket_plan.shard_numel, host.plan.buckets), default=0),
        label=bucket_plan.label,
        worker=host.worker,
        copies=host.copies,
        recorder=inputs.mesh.recorder,
        blocking=inputs.blocking,
        unclipped=inputs.options.grad_divisor,
    )


class ExactOffload(UpdateRule):
    """AdamW on the host for the buckets of a plan. Masters, moments and arriving gradients are in
    the host's memory.

    ``blocking`` waits for every copy and update at once: the reference for comparisons."""

    is_async = True
    takes_options = True

    def __init__(
        self,
        groups: Sequence[UpdateOptions],
        plan: OffloadPlan,
        *,
        master_dtype: torch.dtype,
        compute_dtype: torch.dtype,
        device: torch.device,
        largest: int,
        label: Callable[[int], str],
        worker: HostWorker,
        copies: Copies,
        recorder: Recorder,
        blocking: bool = False,
        unclipped: float = 1.0,
    ) -> None:
        """``groups`` has betas, eps and weight decay of each group of parameters; ``largest`` is
        the number of elements of the plan's largest shard; ``label`` names buckets in errors;
        ``unclipped`` is the scale of a gradient that nothing clips. Raises OffloadError where
        memory is refused."""
        self._groups = tuple(groups)
        self._plan = plan
        self._label = label
        self._recorder = recorder
        self._worker = worker
        self._copies = copies
        self._blocking = blocking
        self._buffers = {
            "state": PinnedBuffer(
                plan.state // master_dtype.itemsize, master_dtype, device, "weights and moments"
            ),
            "gradients": PinnedBuffer(
                plan.gradients // master_dtype.itemsize, master_dtype, device, "gradients"
            ),
            "undo": PinnedBuffer(
                plan.undo // master_dtype.itemsize,
                master_dtype,
                device,
                "updates that may be taken back",
            ),
            "factors": PinnedBuffer(
                FACTORS * len(plan.buckets), torch.float32, device, "scales of gradients"
            ),
            "staging": PinnedBuffer(
                STAGED * largest if compute_dtype != master_dtype else 0,
                compute_dtype,
                device,
                "weights on their way to the device",
            ),
        }
        staging = self._buffers["staging"]
        self._staging = [staging.take(largest) for _ in range(STAGED)] if staging.nbytes else []
        self._sending: list[Copy | None] = [None] * STAGED
        self._sent = 0
        self._shards: dict[int, _HostShard] = {}
        self._speculative_lr: dict[int, float] = {}
        """Learning rates of speculative updates that have not begun. Two threads look: the one that
        pops the entry decides whether the update is made."""
        self._factors: _Factors | None = None
        self._unscaled = torch.full((), unclipped)
        self._unskipped = torch.zeros(())
        self.to_host_bytes = 0
        """Bytes of gradients that have been copied to the host so far."""
        self.to_device_bytes = 0
        """Bytes of weights that have been copied to the device so far."""
        self.speculation = Speculation()

    @property
    def nbytes(self) -> int:
        """Bytes of all host memory that the rule has allocated."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def attach(self, shard: Shard) -> Tensor:
        numel = shard.param_shard.numel()
        bucket = shard.bucket
        self._shards[bucket] = host_shard = _HostShard(
            shard,
            self._label(bucket),
            _take_state(self._buffers["state"], numel),
            torch.zeros((), dtype=torch.float32),
            self._buffers["gradients"].take(numel),
            self._buffers["factors"].take(2),
            _take_state(self._buffers["undo"], numel) if bucket in self._plan.speculated else None,
        )
        return host_shard.attached[0]

    def change_options(self, groups: Sequence[UpdateOptions]) -> None:
        for host_shard in self._shards.values():
            if host_shard.update is not None:
                # It reads the options when the host comes to it.
                host_shard.update.wait()
        self._groups = tuple(groups)

    def on_reduced(self, bucket: int, grad: Tensor, *, speculative_lr: float | None) -> None:
        host_shard = self._shards[bucket]
        if host_shard.update is not None:
            # It reads the gradient that is overwritten now. It ended long ago, since a forward pass
            # has read what it made; waiting brings its error here.
            host_shard.update.wait()
        host_shard.arrival = self._copies.to_host(host_shard.grad, grad)
        self.to_host_bytes += grad.nbytes
        if self._blocking:
            with (
                errors_of_bucket(host_shard.label),
                self._recorder.exposed("the optimizer on the host"),
            ):
                host_shard.arrival.complete()
        elif speculative_lr is not None and host_shard.spare is not None:
            self._speculative_lr[bucket] = speculative_lr
            host_shard.attempt = Task(partial(self._speculate, host_shard))
            self._worker.put(host_shard.attempt, priority=host_shard.shard.position)

    def before_grad_reuse(self, bucket: int) -> None:
        host_shard = self._shards[bucket]
        if host_shard.arrival is not None:
            with errors_of_bucket(host_shard.label):
                host_shard.arrival.wait()

    def step(self, bucket: int, grad: Tensor, *, scale: Tensor, skip: Tensor, lr: float) -> Future:
        host_shard = self._shards[bucket]
        # With the scale on its way, a speculative update that has not begun would only cost time.
        self._speculative_lr.pop(bucket, None)
        factors = self._factors_on_host(host_shard, scale, skip)
        # The work that the current stream has been given so far may still read the shard (its last
        # gather): the copy of the new weights to the device waits for it.
        update = _Update(self, host_shard, lr, factors, self._copies.given())
        host_shard.update = update.task
        self._worker.put(update.task, priority=host_shard.shard.position)
        if self._blocking:
            with self._recorder.exposed("the optimizer on the host"):
                update.complete()
        return update

    def _factors_on_host(self, host_shard: _HostShard, scale: Tensor, skip: Tensor) -> _Factors:
        """Copy scale and skip to the host, once for all buckets that have them in common. Neither
        thread waits for the copy here: the worker does."""
        factors = self._factors
        # The tensors themselves are compared: to compare their values would wait for the device.
        if factors is None or factors.scale is not scale or factors.skip is not skip:
            copy = self._copies.to_host(host_shard.factors, torch.stack([scale, skip]))
            factors = self._factors = _Factors(scale, skip, host_shard.factors, copy)
        return factors

    def _speculate(self, host_shard: _HostShard) -> None:
        """Called by the worker: update a second copy as if nothing were clipped or skipped, unless
        the step has come meanwhile."""
        lr = self._speculative_lr.pop(host_shard.shard.bucket, None)
        if lr is None:
            return
        assert host_shard.arrival is not None and host_shard.spare is not None
        host_shard.arrival.complete()
        with self._worker.working(COPYING_STATE, host_shard.grad.numel()):
            for copy, tensor in zip(host_shard.spare, host_shard.live, strict=True):
                copy.copy_(tensor)
        count = host_shard.count.clone()
        self._adamw(host_shard, host_shard.spare, count, self._unscaled, self._unskipped, lr)
        host_shard.speculative_count = count

    def perform(self, host_shard: _HostShard, lr: float, factors: _Factors) -> None:
        """Called by the worker: bring master and moments to the end of the step."""
        assert host_shard.arrival is not None, f"{host_shard.label}: no gradient has arrived"
        if host_shard.attempt is not None:
            # It was before this in the queue, so it has ended; waiting raises its error.
            host_shard.attempt.wait()
            host_shard.attempt = None
        # ``complete`` and not ``wait``: this is a thread of the host, which no stream holds back.
        host_shard.arrival.complete()
        factors.copy.complete()
        scale = factors.on_host[0]
        skip = factors.on_host[1]
        if host_shard.speculative_count is not None:
            count = host_shard.speculative_count
            host_shard.speculative_count = None
            if bool(scale == self._unscaled) and not bool(skip):
                self.speculation.kept += 1
                assert host_shard.spare is not None
                # The two copies change roles. Nothing is moved before ``settle``.
                host_shard.live, host_shard.spare = host_shard.spare, host_shard.live
                host_shard.count.copy_(count)
                return
            # Nothing has to be restored: the guess was made on the second copy.
            self.speculation.redone += 1
        self._adamw(host_shard, host_shard.live, host_shard.count, scale, skip, lr)

    def _adamw(
        self,
        host_shard: _HostShard,
        values: _State,
        count: Tensor,
        scale: Tensor,
        skip: Tensor,
        lr: float,
    ) -> None:
        master, exp_avg, exp_avg_sq = values
        state = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "step": count}
        kind = host_shard.shard.kind
        options = self._groups[kind.group]
        with self._worker.working(UPDATING, master.numel()):
            adamw_step(
                master,
                host_shard.grad,
                state,
                options,
                decay=options.weight_decay if kind.decay else 0.0,
                scale=scale,
                skip=skip,
                lr=lr,
            )

    def send(self, host_shard: _HostShard, given: Future) -> Copy:
        """Called by the worker: copy the new weights to the device, once ``given`` is over."""
        param_shard = host_shard.shard.param_shard
        source = host_shard.live[0]
        if self._staging:
            # The host casts, so that half as many bytes cross the bus. There are two buffers:
            # weights are cast into one while the other one is copied.
            number = self._sent % STAGED
            last = self._sending[number]
            if last is not None:
                last.complete()
            source = self._staging[number][: param_shard.numel()].copy_(source)
        copy = self._copies.to_device(param_shard, source, after=given)
        if self._staging:
            self._sending[number] = copy
        self._sent += 1
        self.to_device_bytes += param_shard.nbytes
        return copy

    def refresh(self, bucket: int) -> None:
        host_shard = self._shards[bucket]
        host_shard.shard.param_shard.copy_(host_shard.attached[0])

    def settle(self) -> Mapping[int, Future]:
        """Wait for the updates, and put the state that became live by speculation into
        ``attached``. No update is put off beyond its step."""
        for host_shard in self._shards.values():
            if host_shard.update is not None:
                with errors_of_bucket(host_shard.label), self.waiting():
                    host_shard.update.wait()
            # The engine's masters and checkpoints are views of ``attached``.
            if host_shard.live is not host_shard.attached:
                for tensor, copy in zip(host_shard.attached, host_shard.live, strict=True):
                    tensor.copy_(copy)
                host_shard.live, host_shard.spare = host_shard.attached, host_shard.live
        return {}

    def reset(self) -> None:
        for host_shard in self._shards.values():
            for tensor in (*host_shard.attached[1:], host_shard.count):
                tensor.zero_()

    def state(self, bucket: int) -> dict[str, Tensor]:
        host_shard = self._shards[bucket]
        return {
            "exp_avg": host_shard.attached[1],
            "exp_avg_sq": host_shard.attached[2],
            "step": host_shard.count,
        }

    def waiting(self) -> AbstractContextManager[None]:
        """Return a section in which the calling thread waits for the host."""
        return self._recorder.waiting("the optimizer on the host")

    def close(self, timeout: float = 0.0) -> None:
        self._worker.close(timeout)
        self._copies.close(timeout)


def _take_state(buffer: PinnedBuffer, numel: int) -> _State:
    return buffer.take(numel), buffer.take(numel), buffer.take(numel)


class _Update:
    """The update of one bucket in one step, including the copy to the device: a Future."""

    def __init__(
        self,
        rule: ExactOffload,
        host_shard: _HostShard,
        lr: float,
        factors: _Factors,
        given: Future,
    ) -> None:
        self._rule = rule
        self._host_shard = host_shard
        self._sent: Copy | None = None
        self.task = Task(partial(self._run, lr, factors, given))

    def _run(self, lr: float, factors: _Factors, given: Future) -> None:
        with errors_of_bucket(self._host_shard.label):
            self._rule.perform(self._host_shard, lr, factors)
            self._sent = self._rule.send(self._host_shard, given)

    def _copy(self) -> Copy:
        """The host waits for the update itself, which no event of a device can announce."""
        with self._rule.waiting():
            self.task.wait()
        assert self._sent is not None
        return self._sent

    def wait(self) -> None:
        sent = self._copy()
        with errors_of_bucket(self._host_shard.label):
            sent.wait()

    def complete(self) -> None:
        """The host waits for the copy too."""
        sent = self._copy()
        with errors_of_bucket(self._host_shard.label):
            sent.complete()
