"""The engine of this project in one mode, on a device that is there or on one that is modelled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_llama.config.schema import Config
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.streams import Future
from megatron_llama.engine.offload.copies import Copies, Copy, open_copies
from megatron_llama.engine.offload.exact import ExactOffload
from megatron_llama.engine.offload.worker import HostWorker
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.llama import build_stages
from megatron_llama.pipeline.build import build_optimizer, compute_dtype
from megatron_llama.pipeline.runtime import PipelineRuntime
from tools.compare_sharding import random_batches
from tools.offload.catalogue import Mode, configuration, elements
from tools.offload.modelled import ModelledCopies, ModelledWorker, Speeds, compute
from tools.overlap.waits import Clock


@dataclass(frozen=True)
class Sample:
    """One contender in one round; each figure is that of one step."""

    seconds: float
    idle_seconds: float | None = None
    """In which the device waited. None: nobody knows."""
    update_seconds: float | None = None
    """Of the host's worker, waiting aside."""
    bus_bytes: float | None = None
    """Of an element, both ways."""
    kept: float = 0.0
    """Buckets updated ahead of the norm, for good."""
    redone: float = 0.0
    """Buckets updated ahead of the norm, and again."""


class CountedCopies:
    """Copies (see there) with a meter."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self.bytes = 0

    def given(self) -> Future:
        """See Copies."""
        return self._copies.given()

    def to_host(self, target: Tensor, source: Tensor) -> Copy:
        """See Copies."""
        self.bytes += target.nbytes
        return self._copies.to_host(target, source)

    def to_device(self, target: Tensor, source: Tensor, *, after: Future) -> Copy:
        """See Copies."""
        self.bytes += target.nbytes
        return self._copies.to_device(target, source, after=after)

    def close(self, timeout: float = 0.0) -> None:
        """See Copies."""
        self._copies.close(timeout)


class Ours:
    """One mode, built, with its weights."""

    def __init__(
        self, mode: Mode, config: Config, device: torch.device, speeds: Speeds | None
    ) -> None:
        """``speeds``: of a modelled device; None: this one is real. Raises UserError or
        OutOfMemoryError."""
        self.mode = mode
        self._config = configuration(mode, config)
        self.mesh = build_mesh(self._config, rank=0, world_size=1, device=device)
        self.recorder = self.mesh.recorder
        self._elements = elements(config)
        if not devices.is_host(device):
            self.recorder.mark = partial(devices.timed_event, device)
        modelled = None if speeds is None else ModelledCopies(speeds, self.recorder.event)
        self._copies = CountedCopies(modelled or open_copies(device))
        self._workers: list[HostWorker] = []
        self._clock = Clock()
        stages = build_stages(self._config, self.mesh)
        self.engine = build_optimizer(
            self._config,
            stages.values(),
            self.mesh,
            copies=self._copies,
            worker_factory=partial(self._hire, speeds),
            blocking=mode.blocking,
        )
        self._runtime = PipelineRuntime(
            stages, self.engine, self.mesh, self._config, dtype=compute_dtype(self._config)
        )
        self._batches = [batch.to(device) for batch in random_batches(self._config, self.mesh)]
        self.engine.load_weights(repeated)
        if modelled is not None and speeds is not None:
            self._model(stages[0], speeds, modelled)

    def _hire(self, speeds: Speeds | None, cores: Sequence[int], threads: int) -> HostWorker:
        modelled = speeds and ModelledWorker(
            cores, threads, speeds=speeds, note=self.recorder.event
        )
        worker = modelled or HostWorker(cores, threads)
        self._workers.append(worker)
        return worker

    def _model(self, stage: Any, speeds: Speeds, copies: ModelledCopies) -> None:
        weights = self.engine.parameters
        layout = self.engine.bucket_plan
        buckets = {
            placed.spec.name: bucket.index
            for bucket in layout.buckets
            for placed in bucket.placements
        }
        for bucket, shard in self.engine.gradients.shards.items():
            copies.names |= {
                shard.data_ptr(): str(bucket),
                weights.shards[bucket].data_ptr(): str(bucket),
            }

        def ready(names: Sequence[str]) -> None:
            for name in names:
                weights.wait_unsharded(buckets[name], name)

        self._clock = compute(stage, speeds, ready, self.recorder.event)

    def steps(self, count: int) -> Sample:
        """So many steps, as they follow each other in a run: what the one before them has put off
        belongs to them, what they put off to the next one."""
        recorder = self.recorder
        device = self.mesh.device
        self._clock.restart()
        self.step()
        recorder.take_exposed_seconds()
        recorder.marks.clear()
        updating = self._update_seconds
        sent = self._copies.bytes
        attempts = self._attempts
        begin = _now(device)
        for _ in range(count):
            self.step()
        end = _now(device)
        devices.synchronize(device)
        marks = [(before, after) for before, after in recorder.marks]
        idle = (
            recorder.take_exposed_seconds()
            if devices.is_host(device)
            else sum(_seconds(*pair) for pair in marks)
        )
        kept, redone = (now - then for now, then in zip(self._attempts, attempts, strict=True))
        return Sample(
            _seconds(begin, end) / count,
            idle / count,
            (self._update_seconds - updating) / count,
            (self._copies.bytes - sent) / count / self._elements,
            kept / count,
            redone / count,
        )

    def step(self) -> None:
        """One step of training."""
        optimizer = self._config.optimizer
        self.engine.announce_step(optimizer.lr, clip=optimizer.clip_grad)
        self._runtime.step(self._batches)
        self.engine.step(optimizer.lr, clip=optimizer.clip_grad)

    @property
    def _update_seconds(self) -> float:
        return sum(sum(worker.seconds.values()) for worker in self._workers)

    @property
    def _attempts(self) -> tuple[int, int]:
        found = [
            rule.speculation
            for rule in self.engine.rules.distinct
            if isinstance(rule, ExactOffload)
        ]
        return (found[0].kept, found[0].redone) if found else (0, 0)

    def close(self) -> None:
        """End its threads."""
        self.engine.settle()
        self.engine.close()


def _now(device: torch.device) -> Any:
    return time.perf_counter() if devices.is_host(device) else devices.timed_event(device)


def _seconds(begin: Any, end: Any) -> float:
    return float(end - begin) if isinstance(begin, float) else float(begin.elapsed_time(end)) / 1e3


def repeated(rectangle: Rectangle, values: Tensor) -> None:
    """Weights that are quickly made: the same random numbers over and over, norms of 1."""
    if values.dim() == 1:
        values.fill_(1.0)
        return
    some = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1)) * 0.02
    flat = values.view(-1)
    for start in range(0, flat.numel(), some.numel()):
        part = flat[start : start + some.numel()]
        part.copy_(some[: part.numel()])
