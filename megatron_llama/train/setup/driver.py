"""The walk over a list of deciders: the rank that decides, the others meanwhile, and refusals.

Neighbours in the list with the same ``By`` are one group. Between two deciders ``ALL_TOGETHER``,
which send messages of their own, the ranks exchange two messages, however many groups there are:

1. Rank 0 decides all groups in their order. It tells the others what the groups ``RANK_0`` have
   filled.
2. The others decide the groups ``EACH_RANK``, and take rank 0's fields for the groups ``RANK_0``.
3. All ranks tell each other whether they have refused, and in which group. The first group in
   which any rank has refused counts: all raise its error.

So the error is that of ranks which agree after each group, and a job of thousands of processes does
not wait for as many messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from megatron_llama.engine.comm.object_collectives import (
    all_gather_object,
    broadcast_object,
    common_error,
)
from megatron_llama.errors import UserError
from megatron_llama.train.setup.draft import By, Decider, Draft, Need


def decide(draft: Draft, deciders: Iterable[Decider]) -> Draft:
    """Return the draft with all fields that the deciders fill. Collective over the world of
    ``draft.processes``. Raises UserError, the same on every rank."""
    for together, neighbours in groupby(deciders, key=lambda item: item.by is By.ALL_TOGETHER):
        draft = (_in_turn if together else _apart)(draft, tuple(neighbours))
    return draft


def _apart(draft: Draft, deciders: Sequence[Decider]) -> Draft:
    """Return the draft after deciders that send no messages."""
    groups = [(by, tuple(group)) for by, group in groupby(deciders, key=lambda item: item.by)]
    world = draft.processes.world
    filled: list[dict[str, Any]] = []
    """The fields of each group ``RANK_0`` that rank 0 has decided."""
    refusal: tuple[int, UserError] | None = None
    # Files of large checkpoints take long, so a rank that reads them must not count as hanging.
    with world.recorder.outside_steps("what rank 0 decides"):
        if world.rank == 0:
            draft, refusal = _walk(draft, groups, filled, decides=True)
        filled = broadcast_object(filled, world)
    if world.rank != 0:
        draft, refusal = _walk(draft, groups, filled, decides=False)
    # A rank that has refused waits here for the others, so that none of them waits for it later.
    told = all_gather_object((refusal, draft.shown), world)
    refusals = [(rank, *refused) for rank, (refused, _) in enumerate(told) if refused is not None]
    if refusals:
        first = min(group for _, group, _ in refusals)
        _raise(
            groups[first][0],
            [(rank, error) for rank, group, error in refusals if group == first],
            world.size,
        )
    return replace(draft, seen=tuple(shown for _, shown in told))


def _walk(
    draft: Draft,
    groups: Sequence[tuple[By, Sequence[Decider]]],
    filled: list[dict[str, Any]],
    *,
    decides: bool,
) -> tuple[Draft, tuple[int, UserError] | None]:
    """Return the draft after the groups until one refuses, and that one with its error. A rank that
    ``decides`` appends to ``filled``; another one takes the fields from there, as far as they go.
    """
    known = iter(filled)
    for number, (by, group) in enumerate(groups):
        if by is By.RANK_0 and not decides:
            fields = next(known, None)
            if fields is None:
                return draft, None  # rank 0 has refused here, or before
            draft = replace(draft, **fields)
            continue
        try:
            draft = _in_turn(draft, group)
        except UserError as error:
            return draft, (number, error)
        if by is By.RANK_0:
            names = {"missing", *(name for decider in group for name in decider.fills)}
            filled.append({name: getattr(draft, name) for name in names})
    return draft, None


def _raise(by: By, failed: Sequence[tuple[int, UserError]], size: int) -> None:
    """Raise the error of a group on this rank, as all others do."""
    if by is By.EACH_RANK and size > 1:
        raise common_error(failed, size)
    ((_, error), *_) = failed
    # Rank 0 prints its refusal; the others leave silently, and no earlier than rank 0
    # (``train/api/common/report.py``).
    error.everywhere = by is By.RANK_0 or error.everywhere
    raise error


def _in_turn(draft: Draft, group: Sequence[Decider]) -> Draft:
    """Return the draft after all deciders of a group. Raises UserError with the refusals of all
    neighbours that fill nothing: fields that are filled after a refusal may be wrong."""
    refused: list[UserError] = []
    for decider in group:
        if refused and decider.fills:
            break
        try:
            draft = decider.decide(draft)
        except UserError as error:
            if decider.needs is Need.MACHINE and not draft.processes.are_here:
                draft = replace(draft, missing=(*draft.missing, str(error)))
                continue
            refused.append(error)
            if decider.fills:
                break
    if refused:
        raise _one_error(refused)
    return draft


def _one_error(refused: Sequence[UserError]) -> UserError:
    """Return the only error, or one error with the text of all."""
    if len(refused) == 1:
        return refused[0]
    return type(refused[0])("\n".join(map(str, refused)))
