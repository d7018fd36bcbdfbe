"""Whether a process that has ended may be started again in its job.

- A *fault* is of the machine: a process that a signal has ended, a device with memory errors. The
  same run can succeed elsewhere, or once more.
- A rank *follows* when it ended because of another one: a message that failed, a watch that ended
  it. Some rank's fault is the cause, or the network.
- Everything else is *final*: wrong options, data or checkpoints, a loss that is not finite, too
  little memory, and errors of the program. They would come again.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from megatron_llama.errors import LostRankError, UserError

Kind = Literal["done", "waited", "fault", "follows", "stopped", "final"]
_MOST_CHARACTERS = 2000
"""The end of an error's text that is kept: with the rest it fits into a pipe at once."""
_BROKEN_DEVICE = re.compile(
    r"uncorrectable|\bECC\b|hardware stack error|GPU is lost|fallen off the bus|"
    r"devices? (is|are) busy or unavailable|nvlink error",
    re.IGNORECASE,
)
_BROKEN_MESSAGE = re.compile(
    r"nccl(Remote|System|Internal|UnhandledCuda)?Error|NCCL (error|communicator)|gloo|"
    r"connection (was )?(reset|closed|refused)|broken pipe|timed out waiting",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Verdict:
    """How the process of a rank has ended."""

    kind: Kind
    words: str = ""
    status: int = 1
    """The exit status of a process that came to its end."""

    @property
    def ends_job(self) -> bool:
        """Whether the job ends with it."""
        return self.kind in ("stopped", "final")


WAITED = Verdict("waited")
"""The verdict of a rank that was not needed, and had no process."""


def verdict_of_error(error: BaseException) -> Verdict:
    """Return the verdict on a process that ends with an error."""
    words = f"{type(error).__name__}: {error}"[-_MOST_CHARACTERS:]
    if isinstance(error, KeyboardInterrupt):
        return Verdict("stopped", "stopped by SIGINT")
    if isinstance(error, LostRankError | ConnectionError):
        return Verdict("follows", words)
    # Out of memory is a RuntimeError of torch, and stays final: the next try needs as much.
    if isinstance(error, UserError) or not isinstance(error, RuntimeError) or _is_memory(error):
        return Verdict("final", words)
    if _BROKEN_DEVICE.search(words):
        return Verdict("fault", words)
    if _is_of_messages(error) or _BROKEN_MESSAGE.search(words):
        return Verdict("follows", words)
    return Verdict("final", words)


def verdict_of_status(status: int, report: bytes) -> Verdict:
    """Return the verdict on a process by its wait status and its own ``report``, which is empty if
    it had no time for one."""
    if report:  # whatever came behind it is no part of the run
        return Verdict(**json.loads(report))
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return Verdict("fault", f"was killed by {name}")
    if status:
        # Only the watch ends a process so, after it has said why.
        return Verdict("follows", f"was ended by its watch (exit status {os.WEXITSTATUS(status)})")
    return Verdict("final", "ended before its run, with exit status 0")


def with_report(descriptor: int, run: Callable[[], int]) -> int:
    """Return the exit status of ``run``, or raise its error, and write the verdict on it."""
    try:
        status = run()
        verdict = Verdict("done", status=status)
        return status
    except BaseException as error:
        verdict = verdict_of_error(error)
        raise
    finally:
        os.write(descriptor, json.dumps(asdict(verdict)).encode())
        os.close(descriptor)


def _is_memory(error: RuntimeError) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def _is_of_messages(error: RuntimeError) -> bool:
    """Whether torch says that a backend or a store has failed."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and isinstance(error, distributed.DistError)
