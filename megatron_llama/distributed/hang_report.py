"""Sentences that say where ranks are, made of the notes that each has in its ``Recorder``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_llama.distributed.recorder import Recorder
from megatron_llama.plans.schedule import Action

PLACES = 6
"""Ranks at the same place are named together; more places than this are counted."""


def hang_report(recorder: Recorder, thread: int) -> str:
    """Where the rank is whose loop runs in ``thread``, for example ``backward 3 of stage 1
    (iteration 17), waiting for message from rank 2 on pp``."""
    waits = dict(recorder.waits)
    doing = recorder.doing
    if isinstance(doing, Action):
        doing = f"{doing.op.value.replace('_', ' ')} {doing.microbatch} of stage {doing.stage}"
    moment = (
        f"evaluation at iteration {recorder.iteration}"
        if recorder.evaluating
        else f"iteration {recorder.iteration}"
    )
    text = f"{doing} ({moment})"
    mine = waits.pop(thread, None)
    if mine is None:
        return text
    what, _ = mine
    text += f", waiting for {what}"
    # A wait that has a name of the engine ("gradients") is for what other threads bring, so their
    # waits say more.
    others = ", ".join(str(other) for other, _ in waits.values())
    if isinstance(what, str) and others:
        text += f" ({others})"
    elif isinstance(what, str) and recorder.issued is not None:
        issued = recorder.issued
        last = f"{issued[1]} on {issued[0]}" if isinstance(issued, tuple) else str(issued)
        text += f" (last sent: {last})"
    return text


def waited(recorder: Recorder, thread: int, now: float) -> float | None:
    """Seconds for which ``thread`` has been waiting; None if it is not."""
    mine = recorder.waits.get(thread)
    return now - mine[1] if mine is not None else None


def grouped(places: Mapping[int, str], one: str, many: str) -> list[str]:
    """Sentences like ``ranks 0, 1, 3 are in ...``, one for each place, that of the lowest rank
    first. ``one`` and ``many`` are the verb for one rank and for several."""
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
