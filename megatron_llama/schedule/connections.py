"""NCCL's transport model: the first use of a link waits, with the host, for the other end's first
use.

A process group of NCCL has no communicator when it is made. An unbatched ``isend`` or ``irecv``
looks for one under the key "lower rank:higher rank" (``ProcessGroupNCCL::pointToPoint`` in
torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, torch 2.11 to 2.13). Where there is none, it makes
one of these two ranks: the higher rank waits in the store for the id that the lower one writes, and
``ncclCommInitRank`` returns when both have come. Then NCCL connects each direction at its first
message (``NCCL_RUNTIME_CONNECT`` in src/init.cc), which again waits on the host for both. Only a
process group that was bound to a device (``device_id``) sends its messages over one communicator of
all its ranks, one after the other, pairs that have nothing to do with each other included; this
package does not bind them.

Everything later is only issued: operations of one communicator run in the order of their issue, and
streams wait for them. Each link has a communicator of its own, used in one direction, so NCCL's
streams follow the replay of ``replay.py``, once the hosts have issued everything. This module
proves that the hosts do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from megatron_llama.schedule.actions import (
    RECEIVES,
    SENDS,
    Action,
    Link,
    Op,
    Schedule,
    ScheduleError,
    StagePlacement,
    link_of,
)


def connection_order(placement: StagePlacement) -> tuple[Link, ...]:
    """Return every link that training or evaluation with this placement uses, in the order in which
    all ranks connect them: pairs of ranks that begin with an even rank, then those that begin with
    an odd one, then the wrap-around."""
    links: set[Link] = set()
    for here, following in pairwise(placement):
        if here != following:
            links |= {(Op.SEND_FORWARD, here, following), (Op.SEND_BACKWARD, following, here)}

    def position(link: Link) -> tuple[int, int, int, bool, int]:
        op, sender, receiver = link
        lower, higher = sorted((sender, receiver))
        # Pairs of one round have no rank in common, so they connect at the same time.
        turn = lower % 2 if higher == lower + 1 else 2
        return turn, lower, higher, op is Op.SEND_BACKWARD, sender

    return tuple(sorted(links, key=position))


def prove_first_uses(schedule: Schedule, connected: Sequence[Link]) -> None:
    """Prove that no first use of a link waits forever if each rank first connects its links of
    ``connected``, in that order, and then walks its actions. Raises ScheduleError naming the ranks
    and where they wait."""
    programs = [
        [
            *((link, "the connections at the start") for link in connected if rank in link[1:]),
            *_first_uses(schedule, rank, connected),
        ]
        for rank in range(len(schedule.ranks))
    ]
    cursors = [0] * len(programs)

    def heads() -> list[Link | None]:
        return [
            program[cursor][0] if cursor < len(program) else None
            for program, cursor in zip(programs, cursors, strict=True)
        ]

    meeting = True
    while meeting:
        meeting = False
        for link in set(heads()) - {None}:
            assert link is not None
            _op, sender, receiver = link
            at = heads()
            if at[sender] == at[receiver] == link:
                cursors[sender] += 1
                cursors[receiver] += 1
                meeting = True
    stuck = [
        _waiter(rank, *program[cursors[rank]])
        for rank, program in enumerate(programs)
        if cursors[rank] < len(program)
    ]
    if stuck:
        raise ScheduleError(
            f"{schedule.name}: deadlock in the first uses of communicators: {'; '.join(stuck)}"
        )


def _first_uses(schedule: Schedule, rank: int, connected: Sequence[Link]) -> list[tuple[Link, str]]:
    """Return the links that a rank uses without a connection, with the first action of each."""
    kinds: dict[tuple[Op, int], Action] = {}
    for action in schedule.ranks[rank]:
        kinds.setdefault((action.op, action.stage), action)
    uses: dict[Link, str] = {}
    for action in kinds.values():
        if action.op in SENDS or action.op in RECEIVES:
            uses.setdefault(link_of(action, schedule.placement), str(action))
    return [(link, where) for link, where in uses.items() if link not in connected]


def _waiter(rank: int, link: Link, where: str) -> str:
    op, sender, receiver = link
    peer = receiver if rank == sender else sender
    what = "gradients" if op is Op.SEND_BACKWARD else "activations"
    return f"rank {rank} at {where} waits for rank {peer} (link for {what}, {sender} to {receiver})"
