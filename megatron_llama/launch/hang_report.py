"""Sentences that say where ranks are, made from the notes in their ``Recorder``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_llama.engine.comm.recorder import Recorder, Wait
from megatron_llama.schedule import Action

PLACES = 6
"""The number of places that are named, each with its ranks. Further places are counted."""


def hang_report(recorder: Recorder) -> str:
    """Say where a rank is: ``backward 3 of stage 1 (iteration 17), waiting for message from rank 2
    on pp``."""
    doing = recorder.doing
    if isinstance(doing, Action):
        doing = f"{doing.op.value.replace('_', ' ')} {doing.microbatch} of stage {doing.stage}"
    moment = (
        f"evaluation at iteration {recorder.iteration}"
        if recorder.evaluating
        else f"iteration {recorder.iteration}"
    )
    text = f"{doing} ({moment})"
    mine = waiting(recorder)
    if mine is None:
        return text
    what = mine.what
    text += f", waiting for {what}"
    # A wait with a name of the engine ("gradients") is for results of other threads, so the waits
    # of those threads say more.
    waits = recorder.waits.copy().values()
    others = ", ".join(str(wait.what) for wait in waits if not wait.computes)
    if isinstance(what, str) and others:
        text += f" ({others})"
    elif isinstance(what, str) and recorder.issued is not None:
        issued = recorder.issued
        last = f"{issued[1]} on {issued[0]}" if isinstance(issued, tuple) else str(issued)
        text += f" (last sent: {last})"
    return text


def waiting(recorder: Recorder) -> Wait | None:
    """Return the wait that the rank is in; None if it does not wait. In the backward pass on a
    device this is a wait of autograd's thread, for which the loop's thread waits inside of
    torch."""
    waits = recorder.waits.copy().values()
    return next((wait for wait in waits if wait.computes), None)


def grouped(places: Mapping[int, str], one: str, many: str) -> list[str]:
    """Return sentences like ``ranks 0, 1, 3 are in ...``, one for each place, that of the lowest
    rank first. ``one`` and ``many`` are the verb for one rank and for several."""
    ranks_at: dict[str, list[int]] = {}
    for rank in sorted(places):
        ranks_at.setdefault(places[rank], []).append(rank)
    shown = list(ranks_at.items())[:PLACES]
    hidden = list(ranks_at.values())[PLACES:]
    sentences = [
        f"{named(ranks)} {many if len(ranks) > 1 else one} in {place}" for place, ranks in shown
    ]
    left = sum(map(len, hidden))
    return sentences + ([f"{left} more ranks elsewhere"] if left else [])


def named(ranks: Sequence[int]) -> str:
    """Name ranks, given in ascending order: ``rank 3`` or ``ranks 0, 2-5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"
