"""Batches that all ranks have, and signals that all ranks heed: nobody starts a step alone."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Self

from torch import Tensor

from megatron_llama.comm.agreement import largest, raise_together
from megatron_llama.comm.collectives import Pending
from megatron_llama.data.loader import Batch, BatchLoader
from megatron_llama.errors import DataError
from megatron_llama.mesh import Axis

GO, STOP, FAILED = 0, 1, 2


class Interrupts:
    """SIGTERM and SIGINT become a wish to stop after the current step; a second SIGINT stops at once."""

    def __init__(self) -> None:
        self.wanted = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.wanted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.wanted = True


class Feed:
    """Reads the next step's batches while the current one runs, and agrees with the other ranks that everybody has theirs.

    The agreement (one small integer over the host's backend) is posted with the read and looked at a step later, so it
    costs nothing; a bad sample on one rank is everybody's error before anybody starts the step.
    """

    def __init__(self, loader: BatchLoader, world: Axis, interrupts: Interrupts, *, first_sample: int) -> None:
        self._loader, self._world, self._interrupts = loader, world, interrupts
        self._batches: Sequence[Batch] = ()
        self._error: DataError | None = None
        self._agreement: tuple[Tensor, Pending]
        self._stop: bool | None = None
        self._read(first_sample)

    def _read(self, sample: int) -> None:
        self._batches, self._error = (), None
        try:
            self._batches = self._loader.microbatches(sample)
        except DataError as error:
            self._error = error
        status = FAILED if self._error else STOP if self._interrupts.wanted else GO
        self._agreement, self._stop = largest(status, self._world), None

    def take(self, *, following: int) -> Sequence[Batch]:
        """The batches of this step; starts reading those of the step that begins at sample ``following``.

        Raises DataError on every rank if any rank's batches could not be read."""
        batches, error, status = self._batches, self._error, self._status()
        if status == FAILED:
            raise_together(error, self._world)
        self._read(following)
        return batches

    def _status(self) -> int:
        status, pending = self._agreement
        if self._stop is None:
            pending.wait()
            self._stop = int(status) == STOP
        return int(status)

    def stop_agreed(self) -> bool:
        """Whether some rank was asked to stop. The same answer on every rank."""
        self._status()
        return bool(self._stop)
