"""Batches that are read one step ahead, and requests to save or to stop that every rank follows at
the same step."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType, MappingProxyType, TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from megatron_llama.checkpoint.storage_paths import local_folder
from megatron_llama.data.loader import Batch, BatchLoader
from megatron_llama.data.upload import Upload
from megatron_llama.engine.comm.collectives import Pending
from megatron_llama.engine.comm.object_collectives import all_reduce_max, raise_error_on_all_ranks
from megatron_llama.engine.mesh import Axis
from megatron_llama.errors import DataError, UserError

CONTINUE, SAVE, RETURN, STOP, ASKED, TERMINATED, INTERRUPTED, FAILED = range(8)
"""A request to a rank, or FAILED if its batches could not be read. The largest value of all ranks
counts. RETURN asks to go back to a checkpoint, because a save in the background has found values
that are not finite. ASKED is a STOP by a callback, TERMINATED one by SIGTERM, INTERRUPTED one by
SIGINT."""
SIGNALS: Mapping[int, signal.Signals] = MappingProxyType(
    {TERMINATED: signal.SIGTERM, INTERRUPTED: signal.SIGINT}
)
"""The signals behind the last two requests to stop."""
STOPS = (STOP, ASKED, *SIGNALS)
"""Requests that end the run after the current step."""
ONE_SIGNAL_SECONDS = 0.5
"""A SIGINT that comes so soon after another one is the same."""
SAVE_NOW = "save-now"
"""A file of this name in the folder of checkpoints asks for a checkpoint."""


class Interrupts:
    """Requests to this rank from outside. SIGTERM and SIGINT ask to stop after the current step,
    and a second SIGINT stops at once. SIGUSR1 and the file ``save-now`` ask for a checkpoint.

    Signals are heard between ``listen`` and the end of the context, which may begin earlier, so
    that it ends after everything that a run closes."""

    def __init__(
        self, folder: str | None = None, *, minutes: float = 0.0, since: float = 0.0
    ) -> None:
        """``folder``: where to look for the file; None on ranks that leave that to another.
        ``minutes``, unless 0: the run is asked to stop this long after ``since``, a time of
        ``time.monotonic``."""
        self._file = local_folder(folder) / SAVE_NOW if folder is not None else None
        self._stop = CONTINUE
        self._interrupted = 0.0
        self._saves_asked = 0
        self._saves_passed_on = 0
        """The number of saves that ``request`` has passed on to other ranks."""
        self._saves_done = 0
        self._return = False
        self._deadline = since + 60 * minutes if minutes else math.inf
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        return self

    def listen(self) -> None:
        """Handle signals from here on."""
        # In another thread the program handles signals itself: Python allows no handler there.
        here = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) if here else ():
            self._previous[number] = signal.signal(number, self._on_signal)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._saves_asked += 1
        elif number == signal.SIGTERM:
            self._stop = max(self._stop, TERMINATED)
        elif self._stop != INTERRUPTED:
            self._stop = INTERRUPTED
            self._interrupted = time.monotonic()
        # Slurm sends a signal to a keeper and to this process, to which the keeper hands it on.
        elif time.monotonic() - self._interrupted > ONE_SIGNAL_SECONDS:
            raise KeyboardInterrupt

    def stop(self) -> None:
        """Ask to stop after the current step, from this rank."""
        self._stop = max(self._stop, STOP)

    def ask_to_stop(self) -> None:
        """Ask to stop after the current step, for a callback."""
        self._stop = max(self._stop, ASKED)

    def ask_to_save(self) -> None:
        """Ask for a checkpoint."""
        self._saves_asked += 1

    def saved(self) -> None:
        """Forget the checkpoint requests that ``request`` has passed on: the run has saved."""
        self._saves_done = self._saves_passed_on

    def ask_to_return(self) -> None:
        """Ask for a return to a checkpoint, from this rank."""
        self._return = True

    def returned(self) -> None:
        """Forget that this rank has asked for a return: the run has returned."""
        self._return = False

    @property
    def stopped_by(self) -> signal.Signals | None:
        """The signal by which this rank was asked to stop, if it was one."""
        return SIGNALS.get(self._stop)

    def reason(self, request: int) -> str:
        """Return the cause of a ``request`` to stop, which may be that of another rank."""
        if request in SIGNALS:
            return SIGNALS[request].name
        if request == ASKED:
            return "a callback"
        due = time.monotonic() > self._deadline
        return "--exit-duration-in-mins" if due else "a save that failed"

    def request(self) -> int:
        """Return this rank's request: CONTINUE, SAVE, RETURN, or one of STOPS. A request to save or
        to return stays until the run has fulfilled it: a request to another rank at the same step
        may come first."""
        if self._file is not None and self._file.exists():
            self._file.unlink(missing_ok=True)
            self._saves_asked += 1
        if time.monotonic() > self._deadline:
            self.stop()
        if self._stop:
            return self._stop
        if self._return:
            return RETURN
        self._saves_passed_on = self._saves_asked
        return SAVE if self._saves_asked > self._saves_done else CONTINUE


class BackgroundCheck(Protocol):
    """A comparison of a run's files with their sums while it trains."""

    @property
    def problem(self) -> UserError | None:
        """The problem of a file, as soon as it is known."""


class Prefetcher:
    """Reads the next step's batches while the current one runs, brings them to the device, and
    checks that every rank has its own.

    An all-reduce of one small integer over the host's backend starts when the batches have been
    read, and is waited for one step later, so it costs nothing. If one rank cannot read a sample,
    all ranks raise its error before any of them starts the step.
    """

    def __init__(
        self,
        loader: BatchLoader,
        world: Axis,
        interrupts: Interrupts,
        *,
        first_sample: int,
        device: torch.device,
        checks: Sequence[BackgroundCheck] = (),
    ) -> None:
        """``checks``: a file that one of them finds damaged counts as one that cannot be read."""
        self._checks = checks
        self._loader = loader
        self._world = world
        self._interrupts = interrupts
        self._upload = Upload(device)
        self._batches: Sequence[Batch] = ()
        self._error: UserError | None = None
        self._all_reduce: tuple[Tensor, Pending]
        self._request: int | None = None
        self._read(first_sample)

    def _read(self, sample: int) -> None:
        self._batches = ()
        self._error = None
        try:
            self._batches = self._upload.send(self._loader.microbatches(sample))
        except DataError as error:
            self._error = error
        for check in self._checks:
            self._error = check.problem or self._error
        request = self._interrupts.request()
        self._all_reduce = all_reduce_max(FAILED if self._error else request, self._world)
        self._request = None

    def take(self, *, next_sample: int) -> Sequence[Batch]:
        """Return the batches of this step, and read those of the step that begins at
        ``next_sample``. Raises UserError on every rank if any rank could not read its batches, or
        has found damage in a file."""
        self._world.recorder.enter("reading samples")
        batches = self._batches
        error = self._error
        if self.agreed_request() == FAILED:
            raise_error_on_all_ranks(error, self._world)
        self._upload.wait()
        self._read(next_sample)
        return batches

    def restart(self, first_sample: int) -> None:
        """Read the batches of the next step anew, from another sample. Collective."""
        self.agreed_request()
        self._read(first_sample)

    def agreed_request(self) -> int:
        """Return the largest request to any rank before this step, or FAILED; the same on every
        rank."""
        if self._request is None:
            largest, pending = self._all_reduce
            pending.wait()
            self._request = int(largest)
        return self._request
