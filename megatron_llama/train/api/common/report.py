"""The output of errors for the user of a command."""

from __future__ import annotations

import signal
import sys
import traceback

from megatron_llama.errors import UserError
from megatron_llama.launch.launcher import is_launched, launched_rank, tell_torchrun


def print_error(error: UserError) -> None:
    """Print an error as one message, unless it was printed, or rank 0 prints it for all ranks."""
    rank = launched_rank()
    if error.printed or (rank != "0" and error.everywhere):
        return
    error.printed = True
    on_rank = "" if rank == "0" else f" on rank {rank}"
    print(f"error{on_rank}: {error}", file=sys.stderr, flush=True)
    tell_torchrun(str(error))


def await_rank0(error: UserError) -> None:
    """Wait until this process is asked to end, at most ten seconds, if rank 0 prints the error for
    all ranks. torchrun, and srun with --kill-on-bad-exit, end every process as soon as one has
    ended, and rank 0 too before it has printed."""
    if is_launched() and launched_rank() != "0" and error.everywhere:
        ends = signal.SIGTERM, signal.SIGINT
        signal.pthread_sigmask(signal.SIG_BLOCK, ends)
        signal.sigtimedwait(ends, 10.0)


def print_traceback(error: Exception) -> None:
    """Print an error that no user should see, with its traceback."""
    traceback.print_exception(error)
    sys.stderr.flush()
    tell_torchrun("".join(traceback.format_exception_only(error)).strip())
