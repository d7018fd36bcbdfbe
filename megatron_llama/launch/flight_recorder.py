"""torch's flight recorder: the last collectives that this process has issued on each process group,
with their numbers, sizes and whether they are done. A comparison of all ranks shows the collective
with which a hang began, and the missing ranks. It works on a GPU too, whose host goes on long after
a collective stands still. NCCL's groups and gloo's write into it, at no measurable cost. gloo's
messages between two ranks are not in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_llama.launch.hang_report import PLACES, named

BUFFER_SIZE = "TORCH_FR_BUFFER_SIZE"
"""The number of collectives that it keeps; 0 turns it off. torch reads the variable at the first
collective, and also knows it by an older name."""
_OLDER_NAME = "TORCH_NCCL_TRACE_BUFFER_SIZE"
_ENTRIES = "2000"
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""torch's functions that dump it: NCCL's, in builds for GPUs, and that of all other backends."""


@dataclass(frozen=True)
class Issued:
    """One collective of a process group."""

    number: int
    """Its place among the group's collectives, from 1."""
    operation: str
    """The backend's name of it. gloo reduces and scatters with an ``all_reduce``."""
    sizes: str
    """Type and shape of the inputs, and of the outputs where they differ."""


@dataclass(frozen=True)
class GroupNotes:
    """The collectives that one process has issued on one process group."""

    group: str
    """The name of the group, the same on all its ranks, and its backend."""
    description: str
    ranks: tuple[int, ...]
    """Its global ranks; empty if torch does not know them any more."""
    done: Issued | None
    """The last collective that is done."""
    pending: Issued | None
    """The first collective that is not done."""


def turn_on(environ: MutableMapping[str, str]) -> None:
    """Let the process groups that are made from now on record their collectives, unless the user
    has decided."""
    if _OLDER_NAME not in environ:
        environ.setdefault(BUFFER_SIZE, _ENTRIES)


def read() -> list[GroupNotes]:
    """Return the notes of each group of this process. Empty where the build has no recorder, or the
    recorder is turned off."""
    world = dist.distributed_c10d._world
    ranks_of = {
        str(name): tuple(world.pg_group_ranks[group]) for group, name in world.pg_names.items()
    }
    notes: dict[str, GroupNotes] = {}
    for name in _DUMPS:
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            for group_notes in summarize(json.loads(dump(True, False)), ranks_of):
                notes[group_notes.group] = group_notes
    return list(notes.values())


def summarize(dump: Mapping[str, Any], ranks_of: Mapping[str, tuple[int, ...]]) -> list[GroupNotes]:
    """Return the notes of a dump. ``ranks_of`` has the ranks of groups by name."""
    entries: dict[str, list[Mapping[str, Any]]] = {}
    for entry in sorted(dump.get("entries", ()), key=lambda entry: entry["record_id"]):
        if not entry["is_p2p"]:
            backend = entry["profiling_name"].partition(":")[0]
            issued = entries.setdefault(f"{entry['process_group'][0]} {backend}", [])
            # Names are numbers that begin anew when torch.distributed is initialized again.
            if issued and issued[-1]["pg_id"] != entry["pg_id"]:
                issued.clear()
            issued.append(entry)
    notes = []
    for group, issued in entries.items():
        # gloo leaves `state` at "scheduled" for ever; NCCL's watchdog sets `retired` a moment after
        # `state`.
        done = [entry for entry in issued if entry["retired"] or entry["state"] == "completed"]
        pending = [entry for entry in issued if entry not in done]
        name, description = issued[-1]["process_group"]
        notes.append(
            GroupNotes(
                group,
                "world" if description == "default_pg" else description or f"group {name}",
                ranks_of.get(name, ()),
                _issued(done[-1]) if done else None,
                _issued(pending[0]) if pending else None,
            )
        )
    return notes


def _issued(entry: Mapping[str, Any]) -> Issued:
    given = _sizes(entry["input_dtypes"], entry["input_sizes"])
    made = _sizes(entry["output_dtypes"], entry["output_sizes"])
    operation = entry["profiling_name"].partition(":")[2]
    sizes = given if made in ("", given) else f"{given} to {made}"
    return Issued(entry["collective_seq_id"], operation, sizes)


def _sizes(types: Sequence[str], shapes: Sequence[Sequence[int]]) -> str:
    if not shapes:
        return ""
    alike = all(shape == shapes[0] for shape in shapes)
    shape = "x".join(map(str, shapes[0])) or "1"
    rest = "" if len(shapes) == 1 else f" {len(shapes)} times" if alike else " and others"
    return f"{types[0] if types else 'unknown'} {shape}{rest}"


def encode(notes: Sequence[GroupNotes]) -> str:
    """Return the notes as text, for other ranks."""
    return json.dumps([asdict(note) for note in notes])


def decode(text: str | bytes) -> list[GroupNotes]:
    """Return the notes that ``encode`` was given."""

    def issued(value: Mapping[str, Any] | None) -> Issued | None:
        return None if value is None else Issued(**value)

    return [
        GroupNotes(
            note["group"],
            note["description"],
            tuple(note["ranks"]),
            issued(note["done"]),
            issued(note["pending"]),
        )
        for note in json.loads(text)
    ]


def stuck_collectives(notes: Mapping[int, Sequence[GroupNotes]]) -> list[str]:
    """Return a sentence for each collective that some ranks are in and that does not end. ``notes``
    has the notes of the ranks that answered, by global rank. Collectives that miss only ranks that
    are in no collective come first: the other collectives may wait because of these."""
    groups: dict[str, dict[int, GroupNotes]] = {}
    for rank in sorted(notes):
        for note in notes[rank]:
            groups.setdefault(note.group, {})[rank] = note
    idle = {rank for rank, mine in notes.items() if all(note.pending is None for note in mine)}
    stuck = []
    for members in groups.values():
        numbers = [note.pending.number for note in members.values() if note.pending is not None]
        if numbers:
            missing, text = _describe(min(numbers), members, set(notes))
            stuck.append((not missing, not missing <= idle, text))
    texts = [text for *_, text in sorted(stuck, key=lambda collective: collective[:2])]
    hidden = len(texts) - PLACES
    return texts[:PLACES] + ([f"{hidden} more collectives do not end"] if hidden > 0 else [])


def _describe(
    number: int, members: Mapping[int, GroupNotes], answered: set[int]
) -> tuple[set[int], str]:
    """Return the ranks that have not begun the collective of this number, and a sentence.
    ``members`` has the ranks that have issued something on its group."""
    inside: dict[str, list[int]] = {}
    missing: dict[str, list[int]] = {}
    behind = []
    some = next(iter(members.values()))
    silent = sorted(set(some.ranks) - answered)
    never = sorted(set(some.ranks) & answered - set(members))
    if never:
        missing[" (nothing yet)"] = never
    for rank, note in members.items():
        if note.pending is not None and note.pending.number == number:
            what = f"{note.pending.operation} of {note.pending.sizes}"
            inside.setdefault(what, []).append(rank)
        elif note.pending is None and note.done is not None and note.done.number < number:
            last = f" (last: {note.done.operation} {note.done.number})"
            missing.setdefault(last, []).append(rank)
        else:
            behind.append(rank)
    parts = [f"{named(ranks)} in {what}" for what, ranks in inside.items()]
    parts += [f"not {named(ranks)}{last}" for last, ranks in missing.items()]
    parts += [f"{named(behind)} behind it"] if behind else []
    parts += [f"nothing is known of {named(silent)}"] if silent else []
    differ = "; these do not fit together" if len(inside) > 1 else ""
    text = f"collective {number} of {some.description} does not end: {', '.join(parts)}{differ}"
    return {rank for ranks in missing.values() for rank in ranks}, text
