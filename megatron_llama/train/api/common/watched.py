"""How a rank leaves the others. On a GPU ``destroy_process_group`` waits until everything that was
issued has run, and what was issued together with a rank that is gone never does: it waits until the
backend's timeout. So it matters how a rank has come to its end.

- The end of the command, and an error that all ranks raise (rank 0 prints it): all have issued the
  same, so the process group is destroyed, and the other ranks leave, too.
- An error of this rank alone: it is printed, with a traceback if no user should see it; the alarm
  tells the others that this rank has failed; the process group is aborted.
- A message that fails, or comes late, because another rank is gone or stuck: the error names that
  rank; the alarm is set; the process group is aborted.
- Control-C: the process group is aborted, and the others find out.
- The launcher is gone: the rank ends at once, whatever it is doing.

torchrun sends SIGTERM to all ranks of a machine as soon as one of them has ended. What a rank has
to say comes first.

Nothing comes before the error: what follows may take long, or hang. The watch stays until this rank
has left, so it ends a rank that hangs in leaving: after the timeout, or seconds after the alarm.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from types import FrameType
from typing import TYPE_CHECKING

from megatron_llama.errors import ClusterError, UserError
from megatron_llama.train.api.common.report import print_error, print_traceback

if TYPE_CHECKING:
    from megatron_llama.launch.launcher import Place
    from megatron_llama.launch.watch import Diagnosis, Watch

PRINTED = "printed above, before this rank left the others"
"""The note of an error that has been printed."""


@contextmanager
def watched(place: Place, timeout: float = inf) -> Iterator[Watch]:
    """A section in which this process works with others. At its end it leaves them, as the list
    above says. The watch that it yields is for ``init_mesh``, which starts it. The process group
    that a program has made (``Place.joined``) stays: this process leaves the groups that were made
    in the section, and nothing watches it.

    The death of a rank, and a wait of more than ``timeout`` seconds, becomes a ClusterError that
    names the rank to blame, on every other rank, or ends the process where that is not possible. An
    error that no user should see is printed, if there are other processes, and has a note that says
    so (``PRINTED``)."""
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
    """``watched``, where there are other processes."""
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
            found = watch.diagnose()
            blamed = _blamed(found, place.rank, timeout)
            if blamed is not None and not alone:
                print_error(blamed)
                watch.recorder.tell(str(blamed))
            watch.end_silent(found)
        if blamed is not None and not alone:
            raise blamed from error
        if place.joined and not alone:
            # A message has failed in a group that nobody watches: some rank has left it.
            do = "look at what the other ranks raised"
            raise ClusterError(
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
    """A section that SIGTERM ends only behind its end, which comes in seconds: the watch waits no
    longer for what other ranks say."""
    before = signal.getsignal(signal.SIGTERM)
    # Python allows no handler in another thread, and cannot put back one that it has not made.
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
    """Whether an error certainly has nothing to do with other ranks. A message that fails is a
    RuntimeError without a class of its own."""
    import torch

    own = torch.OutOfMemoryError, torch.AcceleratorError
    return not isinstance(error, RuntimeError) or isinstance(error, own)


def _blamed(found: Diagnosis | None, rank: int, timeout: float) -> ClusterError | None:
    """The error that blames another rank than ``rank``, this one; None if none is to blame."""
    if found is None:
        return None
    expected = "all ranks at work"
    if found.silent:
        where = ", ".join(map(str, found.silent))
        do = (
            "look at what that rank printed last and at its machine; resume with "
            f"--load{found.places}"
        )
        return ClusterError(f"rank {where}", got="no answer", expected=expected, do=do)
    if found.stuck:
        got = f"no progress for {timeout:g} s (--distributed-timeout-minutes): {found.reason}"
        do = f"look at what the ranks that stopped were doing; resume with --load{found.places}"
        return ClusterError("the run", got=got, expected=expected, do=do)
    if found.failed not in (None, rank):
        do = f"look at what that rank printed; resume with --load{found.places}"
        return ClusterError(f"rank {found.failed}", got="an error", expected=expected, do=do)
    return None
