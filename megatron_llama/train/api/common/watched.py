"""How a rank leaves the others. On a GPU ``destroy_process_group`` waits until all issued work has
run. Work that was issued together with a rank that is gone never runs, so it waits until the
backend's timeout. Therefore the way to leave depends on the reason:

- The end of the command, and an error that all ranks raise (rank 0 prints it): all have issued the
  same, so the process group is destroyed, and the other ranks leave, too.
- An error of this rank alone: it is printed, with a traceback if no user should see it; the alarm
  tells the others that this rank has failed; the process group is aborted.
- A message that fails, or comes late, because another rank is gone or stuck: the error names that
  rank; the alarm is set; the process group is aborted.
- Control-C: the process group is aborted, and the others find out.
- The launcher is gone: the rank ends at once, whatever it is doing.

torchrun sends SIGTERM to all ranks of a machine as soon as one of them has ended, so a rank first
says what it has to say.

The error is printed first, since later steps may take long, or hang. The watch stays until this
rank has left, so it ends a rank that hangs while it leaves: after the timeout, or seconds after the
alarm.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from types import FrameType
from typing import TYPE_CHECKING

from megatron_llama.errors import LostRankError, UserError
from megatron_llama.train.api.common.report import print_error, print_traceback

if TYPE_CHECKING:
    from megatron_llama.launch.launcher import Place
    from megatron_llama.launch.watch import Diagnosis, Watch

PRINTED = "printed above, before this rank left the others"
"""The note of an error that has been printed."""


@contextmanager
def watched(place: Place, timeout: float = inf) -> Iterator[Watch]:
    """Run a section in which this process works with others, and leave them at its end as listed
    above. The yielded watch is for ``init_mesh``, which starts it. A program's own process group
    (``Place.joined``) stays: this process leaves only groups that were made in the section, and has
    no watch.

    The death of a rank, or a wait of more than ``timeout`` seconds, becomes a LostRankError on
    every other rank that names the rank to blame, or ends the process where that is impossible. An
    error that no user should see is printed, if there are other processes, and marked with the note
    ``PRINTED``."""
    from megatron_llama.engine.comm.recorder import Recorder
    from megatron_llama.launch.orphan import following_launcher
    from megatron_llama.launch.watch import Watch

    watch = Watch(place, Recorder(), timeout)
    with following_launcher(watch.end_alone):
        if place.world_size == 1:
            yield watch
        else:
            with _among_others(watch, place, timeout):
                yield watch


@contextmanager
def _among_others(watch: Watch, place: Place, timeout: float) -> Iterator[None]:
    """Do the work of ``watched``, where there are other processes."""
    from megatron_llama.engine.comm.groups import leave_group, present_groups

    kept = present_groups() if place.joined else ()
    together = False
    try:
        yield
        together = True
    except UserError as error:
        together = error.everywhere
        print_error(error)
        if not together:
            with _last_words():
                watch.end_silent(watch.diagnose())
        raise
    except Exception as error:
        alone = _is_of_this_rank(error)
        if alone:
            print_traceback(error)
        with _last_words():
            diagnosis = watch.diagnose()
            blamed = _blamed(diagnosis, place.rank, timeout)
            if blamed is not None and not alone:
                print_error(blamed)
                watch.recorder.tell(str(blamed))
            watch.end_silent(diagnosis)
        if blamed is not None and not alone:
            raise blamed from error
        if place.joined and not alone:
            # A message has failed in a group without a watch: some rank has left it.
            do = "look at what the other ranks raised"
            raise LostRankError(
                "another rank", got=f"an error ({error})", expected="all ranks at work", do=do
            ) from error
        if not alone:
            print_traceback(error)
        error.add_note(PRINTED)
        raise
    finally:
        watch.recorder.enter("the end")
        with watch.recorder.waiting("what is under way"):
            leave_group(abort=not together, kept=kept)
        watch.stop(ended=together)


@contextmanager
def _last_words() -> Iterator[None]:
    """Delay SIGTERM until the end of the section, which comes in seconds: the watch waits no longer
    for the other ranks."""
    before = signal.getsignal(signal.SIGTERM)
    # Python allows no handler in another thread, and cannot restore one that it has not made.
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    signal.signal(signal.SIGTERM, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if heard:
            signal.raise_signal(signal.SIGTERM)


def _is_of_this_rank(error: Exception) -> bool:
    """Whether an error certainly has nothing to do with other ranks. A failed message is a
    RuntimeError without a class of its own."""
    import torch

    own = torch.OutOfMemoryError, torch.AcceleratorError
    return not isinstance(error, RuntimeError) or isinstance(error, own)


def _blamed(diagnosis: Diagnosis | None, rank: int, timeout: float) -> LostRankError | None:
    """Return the error that blames a rank other than ``rank``, this one; None if none is to
    blame."""
    if diagnosis is None:
        return None
    expected = "all ranks at work"
    if diagnosis.silent:
        where = ", ".join(map(str, diagnosis.silent))
        do = (
            "look at what that rank printed last and at its machine; resume with "
            f"--load{diagnosis.places}"
        )
        return LostRankError(f"rank {where}", got="no answer", expected=expected, do=do)
    if diagnosis.stuck:
        got = f"no progress for {timeout:g} s (--distributed-timeout-minutes): {diagnosis.reason}"
        do = f"look at what the ranks that stopped were doing; resume with --load{diagnosis.places}"
        return LostRankError("the run", got=got, expected=expected, do=do)
    if diagnosis.failed not in (None, rank):
        do = f"look at what that rank printed; resume with --load{diagnosis.places}"
        return LostRankError(f"rank {diagnosis.failed}", got="an error", expected=expected, do=do)
    return None
