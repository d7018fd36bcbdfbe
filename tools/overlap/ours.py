"""The engine of this project, put together as ``train`` does, in every mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_llama.data.loader import Batch
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.llama import build_stages
from megatron_llama.pipeline.build import build_optimizer, compute_dtype
from megatron_llama.pipeline.runtime import PipelineRuntime
from tools.overlap.catalogue import Mode, configuration
from tools.overlap.contender import SEED, Setting
from tools.overlap.waits import install


class Ours:
    """One mode."""

    def __init__(self, mode: Mode, setting: Setting) -> None:
        self._hosts = setting.hosts
        self._config = config = configuration(mode, setting.hosts, setting.experts)
        self._mesh = build_mesh(
            config, rank=setting.rank, world_size=setting.hosts, device=torch.device("cpu")
        )
        stages = build_stages(config, self._mesh)
        self._engine = build_optimizer(config, stages.values(), self._mesh)
        self._runtime = PipelineRuntime(
            stages, self._engine, self._mesh, config, dtype=compute_dtype(config)
        )
        self._engine.load_weights(InitialWeights(SEED, config.model.initializer_range))
        self._engine.settle()
        layers = stages[0].model.layers
        self._buckets = {
            placed.spec.name: bucket.index
            for bucket in self._engine.bucket_plan.buckets
            for placed in bucket.placements
        }
        install(
            [(f"model.layers.{name}", block) for name, block in layers.items()],
            setting.clock,
            self._ready,
        )

    def _ready(self, names: Sequence[str]) -> None:
        for name in names:
            self._engine.parameters.wait_unsharded(self._buckets[name], name)

    def begin(self) -> None:
        """See Contender."""
        self._engine.publish()

    def step(self, batch: Batch) -> Tensor:
        """See Contender."""
        optimizer = self._config.optimizer
        self._engine.announce_step(optimizer.lr, clip=optimizer.clip_grad)
        loss = self._runtime.step([batch])
        self._engine.step(optimizer.lr, clip=optimizer.clip_grad)
        return loss

    def drain(self) -> None:
        """See Contender."""
        self._engine.settle()

    def payload_bytes(self) -> float:
        """See Contender. Scalars travel on the world axis."""
        total = 0.0
        matrices = 0
        for (axis, operation), traffic in self._mesh.recorder.traffic.items():
            if operation.startswith("matrices"):
                matrices += traffic.bytes  # what leaves this rank, and not what all have together
            elif axis != "world":
                total += traffic.bytes * (2 if operation == "all_reduce" else 1)
        return total * (self._hosts - 1) / self._hosts + matrices
