"""ModuleEngine: what ``shard`` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from torch import nn

from megatron_llama.distributed.data_mesh import close_data_mesh
from megatron_llama.distributed.mesh import Mesh
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer, StepResult
from megatron_llama.errors import ConfigError
from megatron_llama.sharding.gathered import gathered
from megatron_llama.sharding.hooks import PassError, Passes
from megatron_llama.sharding.initial import initialize
from megatron_llama.sharding.optimizer import ParameterGroup
from megatron_llama.sharding.specs import ModuleUnit
from megatron_llama.sharding.values import ModuleValues


class ModuleEngine:
    """The engine around one module: its shards, their optimizer, and the messages between ranks.

    The model is called as before. Every ``microbatches`` backward passes are followed by ``step``.
    ``close`` ends it; as a context manager it closes itself. ``shard`` makes it."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ModuleUnit],
        engine: OverlappedDistributedOptimizer,
        values: ModuleValues,
        passes: Passes,
        groups: Sequence[ParameterGroup],
        *,
        clip: float,
        detach: Callable[[], None],
    ) -> None:
        self.model = model
        """The module that was given to ``shard``."""
        self.clip = clip
        """The largest global L2 norm of the gradient; 0: no clipping. May be changed between
        steps."""
        self._units = [unit.module for unit in units]
        self._engine = engine
        self._values = values
        self._passes = passes
        self._groups = groups
        self._detach = detach
        self._closed = False

    @property
    def mesh(self) -> Mesh:
        """The ranks that hold the model, and how they share it."""
        return self._engine.mesh

    @property
    def microbatches(self) -> int:
        """The backward passes of a step. May be set between steps."""
        return self._passes.microbatches

    @microbatches.setter
    def microbatches(self, count: int) -> None:
        """Set the number. Raises ConfigError for less than 1, PassError within a step."""
        if not isinstance(count, int) or count < 1:
            raise ConfigError(
                "engine.microbatches", got=count, expected="1 or more", do="give a number"
            )
        self._require_between_steps("engine.microbatches = ...")
        self._passes.microbatches = count

    def step(self, lr: float | None = None) -> StepResult:
        """Update the parameters with the gradient of the last ``microbatches`` backward passes.

        ``lr`` is the learning rate of all groups; None: each group's own. Returns ``grad_norm``
        (over all ranks, after their mean or sum, before clipping) and ``skipped`` as 0-dim tensors
        on the device, which the host does not wait for. A gradient that is not finite changes
        nothing, and ``skipped`` is 1. Raises PassError if there were more or fewer backward
        passes, and RuntimeError with the names of trainable parameters that got no gradient."""
        rates = [group.lr for group in self._groups] if lr is None else lr
        return self._passes.end_step(lambda: self._engine.step(rates, clip=self.clip))

    @contextmanager
    def gathered(self, *, modify: bool = False) -> Iterator[None]:
        """Have the parameters whole in the module, on every rank, between two steps. Collective.

        They are copies. With ``modify`` rank 0's become those of all ranks at the end; without it a
        change is an error."""
        self._require_between_steps("engine.gathered()")
        self._passes.suspended = True
        try:
            with gathered(self._values, modify=modify):
                yield
        finally:
            self._passes.suspended = False
            if modify:
                self._passes.generation += 1

    def initialize(self, fn: Callable[[nn.Module], object] | None = None) -> None:
        """Give values to the parameters and buffers that were on the meta device, unit by unit:
        ``fn(module)`` is called for every module while its unit is whole, by default its own
        ``reset_parameters``, or ``_init_weights`` of a model of transformers. What rank 0 computes
        counts. Collective."""
        self._require_between_steps("engine.initialize()")
        self._passes.suspended = True
        try:
            initialize(self._values, self._units, fn)
        finally:
            self._passes.suspended = False
            self._passes.generation += 1

    def close(self) -> None:
        """End the engine's threads and communicators. The module keeps placeholders: take its
        values before, with ``gathered``. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._passes.refusal = self._passes.refusal or "engine.close() before"
        self._detach()
        self._engine.close()
        close_data_mesh(self.mesh)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _require_between_steps(self, what: str) -> None:
        """Raise PassError within a step, or where the engine has ended."""
        self._passes.require_usable()
        if not self._passes.between_steps:
            raise PassError(
                what,
                got="a step whose passes have begun",
                expected="a call between two steps",
                do="call engine.step() first",
            )
