"""Batches that all ranks have, and signals that all ranks heed: nobody starts a step alone."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Self

import torch
from torch import Tensor

from megatron_llama.checkpoint.storage_paths import local_folder
from megatron_llama.data.loader import Batch, BatchLoader
from megatron_llama.data.upload import Upload
from megatron_llama.distributed.comm.collectives import Pending
from megatron_llama.distributed.comm.object_collectives import (
    all_reduce_max,
    raise_error_on_all_ranks,
)
from megatron_llama.distributed.mesh import Axis
from megatron_llama.errors import DataError

GO, SAVE, STOP, FAILED = range(4)
"""What ranks agree on; the largest counts."""
SAVE_NOW = "save-now"
"""A file of this name in the folder of checkpoints asks for one."""


class Interrupts:
    """SIGTERM and SIGINT become a wish to stop after the current step, a second SIGINT stops at
    once; SIGUSR1 and the file ``save-now`` in ``folder`` become a wish to save."""

    def __init__(
        self, folder: str | None = None, *, minutes: float = 0.0, since: float = 0.0
    ) -> None:
        """``folder``: where to look for the file; None on ranks that leave that to another.
        ``minutes``, unless 0: after ``since``, a time of ``time.monotonic``, that is a wish to
        stop."""
        self._file = local_folder(folder) / SAVE_NOW if folder is not None else None
        self._stop = self._save = False
        self.why = "a signal"
        """What asks for the stop, as far as this rank knows."""
        self._deadline = since + 60 * minutes if minutes else math.inf
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._save = True
            return
        if self._stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._stop = True

    def stop(self) -> None:
        """This rank wants to stop after the current step."""
        self._stop = True

    def wish(self) -> int:
        """GO, SAVE or STOP. A wish to save is told once."""
        if self._file is not None and self._file.exists():
            self._file.unlink(missing_ok=True)
            self._save = True
        if not self._stop and time.monotonic() > self._deadline:
            self._stop = True
            self.why = "--exit-duration-in-mins"
        save = self._save
        self._save = False
        return STOP if self._stop else SAVE if save else GO


class Prefetcher:
    """Reads the next step's batches while the current one runs, brings them to the device, and
    agrees with the other ranks that everybody has theirs.

    The agreement (one small integer over the host's backend) is posted with the read and looked at
    a step later, so it costs nothing; a bad sample on one rank is everybody's error before anybody
    starts the step.
    """

    def __init__(
        self,
        loader: BatchLoader,
        world: Axis,
        interrupts: Interrupts,
        *,
        first_sample: int,
        device: torch.device,
    ) -> None:
        self._loader = loader
        self._world = world
        self._interrupts = interrupts
        self._upload = Upload(device)
        self._batches: Sequence[Batch] = ()
        self._error: DataError | None = None
        self._agreement: tuple[Tensor, Pending]
        self._agreed: int | None = None
        self._read(first_sample)

    def _read(self, sample: int) -> None:
        self._batches = ()
        self._error = None
        try:
            self._batches = self._upload.send(self._loader.microbatches(sample))
        except DataError as error:
            self._error = error
        wish = self._interrupts.wish()
        self._agreement = all_reduce_max(FAILED if self._error else wish, self._world)
        self._agreed = None

    def take(self, *, following: int) -> Sequence[Batch]:
        """The batches of this step; starts reading those of the step that begins at sample
        ``following``.

        Raises DataError on every rank if any rank's batches could not be read."""
        self._world.recorder.doing = "reading samples"
        batches = self._batches
        error = self._error
        if self.agreed() == FAILED:
            raise_error_on_all_ranks(error, self._world)
        self._upload.wait()
        self._read(following)
        return batches

    def restart(self, first_sample: int) -> None:
        """The next step begins at another sample than was announced. On all ranks."""
        self.agreed()
        self._read(first_sample)

    def agreed(self) -> int:
        """What some rank was asked for before this step: GO, SAVE, STOP or FAILED. The same answer
        on every rank."""
        if self._agreed is None:
            status, pending = self._agreement
            pending.wait()
            self._agreed = int(status)
        return self._agreed
