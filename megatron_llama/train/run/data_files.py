"""Files of samples, compared with their sums while a run trains."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from megatron_llama.config.schema import Config
from megatron_llama.data.verification import DatasetCheck
from megatron_llama.engine.comm.object_collectives import raise_error_on_all_ranks
from megatron_llama.engine.mesh import Mesh
from megatron_llama.errors import UserError
from megatron_llama.metrics.log import MetricLog
from megatron_llama.train.run.callbacks import Part, Run
from megatron_llama.train.setup.build import check_datasets
from megatron_llama.train.setup.draft import Shown


class DataFiles(Part):
    """Compares the files of --data-path in the background. The prefetcher asks for ``problem`` at
    every step; the ranks agree on that of the last step at the end."""

    def __init__(self, config: Config, mesh: Mesh, seen: Sequence[Shown], log: MetricLog) -> None:
        """``seen``: the files that each rank sees."""
        self._config = config
        self._mesh = mesh
        self._seen = seen
        self._log = log
        self._check: DatasetCheck | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @property
    def problem(self) -> UserError | None:
        """The problem of a file, as soon as it is known."""
        return self._check.problem if self._check is not None else None

    def after_start(self, run: Run) -> None:
        check = check_datasets(self._config, self._mesh.rank, self._seen, self._log.say)
        self._check = self._stack.enter_context(check)

    def before_end(self, run: Run) -> None:
        # Damage that was found during the last step has not reached the other ranks yet.
        raise_error_on_all_ranks(self.problem, self._mesh.world)
