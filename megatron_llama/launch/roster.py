"""Which of the processes that came to a meeting train, and as which ranks.

All of them read the same roster and decide by it alone, so nothing has to be agreed on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain

from megatron_llama.launch.launcher import Place
from megatron_llama.launch.verdict import Verdict


@dataclass(frozen=True)
class Member:
    """A process of the launcher that came to a meeting."""

    rank: int
    """Its rank by the launcher, for its whole life."""
    machine: str
    slot: int
    """Its local rank by the launcher: the number of its device."""
    faults: int
    """How often its rank has ended by a fault of its own."""


@dataclass(frozen=True)
class Arrival:
    """What a process says when it comes: who it is, and how its rank has ended."""

    member: Member
    verdict: Verdict

    def line(self) -> str:
        """Return it as a line of JSON."""
        return json.dumps([asdict(self.member), asdict(self.verdict)])

    @staticmethod
    def read(line: str) -> Arrival:
        """Return what ``line`` says."""
        member, verdict = json.loads(line)
        return Arrival(Member(**member), Verdict(**verdict))


@dataclass(frozen=True)
class Roster:
    """The result of a meeting."""

    members: tuple[Member, ...]
    """Those who came in time, in the order of their ranks by the launcher."""
    count: int
    """How many of them train. 0: the job ends."""
    reasons: tuple[str, ...] = field(default=())
    """Why the job was interrupted, each time."""
    lost: tuple[int, ...] = ()
    """Those who were at the meeting before, and did not come."""
    end: str = ""
    """Why the job ends, beside ``reasons``; empty for an end that its rank has explained."""

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: bytes) -> Roster:
        """Return the roster that ``text`` describes."""
        values = json.loads(text)
        members = tuple(Member(**member) for member in values.pop("members"))
        reasons, lost = tuple(values.pop("reasons")), tuple(values.pop("lost"))
        return Roster(members, reasons=reasons, lost=lost, **values)


@dataclass(frozen=True)
class Seat:
    """The part of a process in a roster."""

    place: Place
    slots: tuple[int, ...]
    """The slots of all ranks of its machine, by local rank."""


def cause(arrivals: Sequence[Arrival]) -> Arrival | None:
    """Return the arrival whose verdict explains the others: a final one before a fault, a fault
    before those who follow."""
    order = ("final", "stopped", "fault", "follows")
    blamed = [arrival for arrival in arrivals if arrival.verdict.kind in order]
    return min(
        blamed, key=lambda each: (order.index(each.verdict.kind), each.member.rank), default=None
    )


def reason(why: Arrival | None, lost: Sequence[int]) -> str:
    """Return words for an interruption: its cause, and who is lost."""
    words = f"no sign of rank {', '.join(map(str, lost))}" if lost else ""
    # A rank that only follows says less than the loss of those whom it followed.
    if why is None or (lost and why.verdict.kind == "follows"):
        return words
    blamed = f"rank {why.member.rank}: {why.verdict.words}"
    return f"{blamed}; {words}" if words else blamed


def seats(
    members: Sequence[Member], count: int, group: int, address: str, port: int
) -> dict[int, Seat]:
    """Return the seats of the ``count`` members that train, by their ranks of the launcher.
    ``group``: neighbouring ranks that should be on one machine (tp). ``address`` and ``port``: of
    the job's store.

    Members with faults are left out first, and machines with few members: a group that spans
    machines is slow."""
    by_machine: dict[str, list[Member]] = {}
    for member in members:
        by_machine.setdefault(member.machine, []).append(member)
    first_machine = members[0].machine
    best_first = sorted(
        by_machine.values(),
        key=lambda there: (sum(m.faults for m in there), -len(there), there[0].rank),
    )
    candidates = chain.from_iterable(
        sorted(there, key=lambda member: (member.faults, member.slot)) for there in best_first
    )
    chosen: dict[str, list[Member]] = {}
    for member in list(candidates)[:count]:
        chosen.setdefault(member.machine, []).append(member)
    # The store's machine knows itself by an address that may lead nowhere else: rank 0 is there if
    # it can be.
    machines = sorted(
        chosen, key=lambda name: (name != first_machine, len(chosen[name]) % group != 0, name)
    )
    seated: dict[int, Seat] = {}
    for number, name in enumerate(machines):
        here = sorted(chosen[name], key=lambda member: member.slot)
        slots = tuple(member.slot for member in here)
        for local, member in enumerate(here):
            place = Place(
                len(seated), count, local, address, port, local_world_size=len(here), machine=number
            )
            seated[member.rank] = Seat(place, slots)
    return seated
