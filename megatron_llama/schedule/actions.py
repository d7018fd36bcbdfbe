"""The actions of a pipeline rank, and the tensors that travel between ranks.

A *stage* is a chunk of consecutive layers; ``placement`` has the pipeline rank of each. With 2
ranks and 2 chunks per rank, interleaved, the placement is (0, 1, 0, 1): rank 0 runs stages 0 and 2.
Tensors between neighbouring stages of one rank are handed over without a transfer. A *link* is one
direction of the flow from one rank to another, such as the activations from rank 0 to rank 1: its
messages, of whichever stages, arrive in the order sent.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from megatron_llama.errors import ConfigError

StagePlacement = tuple[int, ...]
"""The pipeline rank of each stage."""


class ScheduleError(ConfigError):
    """A schedule cannot be built from these options, is incomplete, out of order, or would
    deadlock."""


class Op(enum.Enum):
    """The operation of an action. Activations (FORWARD) flow to the next stage, gradients
    (BACKWARD) to the previous one."""

    RECV_FORWARD = "recv_forward"
    FORWARD = "forward"
    SEND_FORWARD = "send_forward"
    RECV_BACKWARD = "recv_backward"
    BACKWARD = "backward"
    """Compute input and weight gradients together."""
    BACKWARD_INPUT = "backward_input"
    """Compute only the input's gradient, which the previous stage waits for."""
    BACKWARD_WEIGHT = "backward_weight"
    """Compute the weight gradients that BACKWARD_INPUT left out. They may come at any later time,
    and so fill the bubbles of the zero-bubble schedules."""
    SEND_BACKWARD = "send_backward"

    # Enum hashes a member's name, in Python, and actions are looked up a million times in a long
    # schedule. Members are singletons, so their identity is enough.
    __hash__ = object.__hash__

    @property
    def letter(self) -> str:
        """The papers' letter for a pass: F, B or W; empty for a send or a receive."""
        return {
            Op.FORWARD: "F",
            Op.BACKWARD: "B",
            Op.BACKWARD_INPUT: "B",
            Op.BACKWARD_WEIGHT: "W",
        }.get(self, "")


RECEIVES = (Op.RECV_FORWARD, Op.RECV_BACKWARD)
SENDS = (Op.SEND_FORWARD, Op.SEND_BACKWARD)
WHOLE = (Op.FORWARD, Op.BACKWARD)
SPLIT = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


class Action(NamedTuple):
    """An operation on one microbatch at one stage. A tuple, because long schedules have a million
    of them."""

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op.value}(stage {self.stage}, microbatch {self.microbatch})"


@dataclass(frozen=True)
class Schedule:
    """The actions of every pipeline rank, in the order in which the rank walks them."""

    name: str
    microbatches: int
    placement: StagePlacement
    """Pipeline rank of each stage."""
    ranks: tuple[tuple[Action, ...], ...]
    passes: tuple[Op, ...]
    """The passes of each microbatch at each stage: WHOLE, SPLIT, or FORWARD alone."""

    @property
    def stages(self) -> int:
        """The number of stages of the whole pipeline."""
        return len(self.placement)

    @property
    def virtual(self) -> int:
        """The number of stages of each rank."""
        return len(self.placement) // len(self.ranks)


def receive_of(action: Action, placement: StagePlacement) -> Action | None:
    """Return the receive that must come before this pass; None if its input is made here."""
    op = receive_before(action.op, action.stage, placement)
    return Action(op, action.stage, action.microbatch) if op is not None else None


def send_of(action: Action, placement: StagePlacement) -> Action | None:
    """Return the send that must come after this pass; None if its output stays on this rank."""
    op = send_after(action.op, action.stage, placement)
    return Action(op, action.stage, action.microbatch) if op is not None else None


def receive_before(op: Op, stage: int, placement: StagePlacement) -> Op | None:
    """Return the receive's kind for a pass at ``stage``; ``receive_of`` without a microbatch."""
    if op is Op.FORWARD:
        return Op.RECV_FORWARD if _elsewhere(stage, stage - 1, placement) else None
    if op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        return Op.RECV_BACKWARD if _elsewhere(stage, stage + 1, placement) else None
    return None


def send_after(op: Op, stage: int, placement: StagePlacement) -> Op | None:
    """Return the send's kind after a pass at ``stage``; ``send_of`` without a microbatch."""
    if op is Op.FORWARD:
        return Op.SEND_FORWARD if _elsewhere(stage, stage + 1, placement) else None
    if op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        return Op.SEND_BACKWARD if _elsewhere(stage, stage - 1, placement) else None
    return None


def _elsewhere(stage: int, neighbour: int, placement: StagePlacement) -> bool:
    return 0 <= neighbour < len(placement) and placement[neighbour] != placement[stage]


def other_end(action: Action) -> Action:
    """Return the receive that belongs to a send, or the send that belongs to a receive."""
    if action.op is Op.SEND_FORWARD:
        return Action(Op.RECV_FORWARD, action.stage + 1, action.microbatch)
    if action.op is Op.RECV_FORWARD:
        return Action(Op.SEND_FORWARD, action.stage - 1, action.microbatch)
    if action.op is Op.SEND_BACKWARD:
        return Action(Op.RECV_BACKWARD, action.stage - 1, action.microbatch)
    return Action(Op.SEND_BACKWARD, action.stage + 1, action.microbatch)


Link = tuple[Op, int, int]
"""(SEND_FORWARD or SEND_BACKWARD, sending rank, receiving rank)."""


def link_of(action: Action, placement: StagePlacement) -> Link:
    """Return the link that a send or a receive uses."""
    send, receive = (
        (action, other_end(action)) if action.op in SENDS else (other_end(action), action)
    )
    return send.op, placement[send.stage], placement[receive.stage]


def with_transfers(passes: list[Action], placement: StagePlacement) -> Iterator[Action]:
    """Insert the sends and receives that the passes need.

    A send comes right after the pass that produces its tensor. A receive is posted one pass before
    the one that needs it: the transfer for F1 is posted before F0 and runs while F0 computes."""
    kinds = {(op, stage) for op, stage, _ in passes}
    before = {kind: receive_before(*kind, placement) for kind in kinds}
    after = {kind: send_after(*kind, placement) for kind in kinds}
    receives = [before[op, stage] for op, stage, _ in passes]
    if passes and receives[0] is not None:
        yield Action(receives[0], *passes[0][1:])
    for action, op, following in zip(
        passes, [*receives[1:], None], [*passes[1:], None], strict=True
    ):
        if op is not None and following is not None:
            yield Action(op, *following[1:])
        yield action
        send = after[action.op, action.stage]
        if send is not None:
            yield Action(send, action.stage, action.microbatch)


def backward_comes_next(actions: Sequence[Action], last: int) -> bool:
    """Whether each forward pass of stage ``last`` is followed, among this rank's passes, by the
    whole backward pass of the same microbatch. Then the loss may be computed in chunks, which
    writes the gradient of the head's weight in the forward pass, into a slot that no other pass may
    use before that backward pass."""
    passes = [action for action in actions if action.op in (Op.BACKWARD, *SPLIT)]
    return all(
        after.op is Op.BACKWARD
        and (after.stage, after.microbatch) == (before.stage, before.microbatch)
        for before, after in pairwise(passes)
        if before.op is Op.FORWARD and before.stage == last
    )
