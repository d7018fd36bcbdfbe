"""The walk over a list of deciders: the rank that decides, the others meanwhile, and refusals.

Neighbours in the list with the same ``By`` are one group:

                 rank 0                            every other rank
RANK_0           decides the group in its order    waits
                 one message: what was filled      takes it
                 or: the refusal                   raises it, too, and says nothing
EACH_RANK        decides                           decides
                 all: whether any has refused      the same error, which names the first that has
ALL_TOGETHER     as the decider says               as the decider says
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from megatron_llama.engine.comm.object_collectives import on_rank0, raise_on_all_ranks
from megatron_llama.errors import UserError
from megatron_llama.train.setup.draft import By, Decider, Draft, Need


def decide(draft: Draft, deciders: Iterable[Decider]) -> Draft:
    """Return the draft with all fields that the deciders fill. Collective over the world of
    ``draft.processes``. Raises UserError, the same on every rank."""
    for by, neighbours in groupby(deciders, key=lambda decider: decider.by):
        group = tuple(neighbours)
        if by is By.RANK_0:
            draft = _by_rank_0(draft, group)
        elif by is By.EACH_RANK:
            draft = _by_each_rank(draft, group)
        else:
            draft = _in_turn(draft, group)
    return draft


def _by_rank_0(draft: Draft, group: Sequence[Decider]) -> Draft:
    names = {"missing", *(name for decider in group for name in decider.fills)}

    def filled() -> dict[str, Any]:
        decided = _in_turn(draft, group)
        return {name: getattr(decided, name) for name in names}

    # Files of large checkpoints take long, so a rank that reads them must not count as hanging.
    world = draft.processes.world
    with world.recorder.outside_steps("what rank 0 decides"):
        # If rank 0 refuses, its error is raised here on every rank. Rank 0 prints it; the others
        # leave silently, and no earlier than rank 0 (``train/api/common/report.py``).
        return replace(draft, **on_rank0(filled, world))


def _by_each_rank(draft: Draft, group: Sequence[Decider]) -> Draft:
    # A rank that has refused waits here for the others, so that none of them waits for it later.
    with raise_on_all_ranks(draft.processes.world):
        draft = _in_turn(draft, group)
    return draft


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
