"""The regular comparison of copies that must be alike."""

from __future__ import annotations

from megatron_llama.config.schema import Config
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.replicas import check_replicas, has_replicas
from megatron_llama.train.run.callbacks import Part, Run


class ReplicaCheck(Part):
    """Compares the copies of several ranks every --check-weight-hash-across-dp-replicas-interval
    steps."""

    # Copies stay alike in a bad step too.
    needs_checked_step = False

    def __init__(
        self, config: Config, optimizer: OverlappedDistributedOptimizer, mesh: Mesh
    ) -> None:
        """Make the check. Collective."""
        self._optimizer = optimizer
        self._mesh = mesh
        interval = config.training.check_weight_hash_across_dp_replicas_interval
        self._interval = interval if has_replicas(optimizer, mesh) else 0

    def due(self, run: Run) -> bool:
        return self._interval > 0 and run.iteration % self._interval == 0

    def on_due(self, run: Run) -> None:
        check_replicas(self._optimizer, self._mesh, run.iteration)
