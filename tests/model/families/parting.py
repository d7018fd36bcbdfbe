"""Where a layout and one process part, and whether right runs can: at a token that stands between two experts within rounding. It goes to
either, and from there two right runs differ by far more than rounding.

One process trains again and sends that token where the layout did. Then all of the layout's losses and norms must be within their bounds
again: nothing is forgiven but the choice of this token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from megatron_llama.launch.launcher import Place
from megatron_llama.model.nn.moe.block import Gate
from megatron_llama.model.nn.moe.routing import Routing, _Choice
from megatron_llama.pipeline.router_losses import RoutedRuntime
from torch import Tensor, nn

from tests.harness import Cluster
from tests.model.families.twins import SECONDS, FamilyLayout
from tests.parallel.cases import Record, Reference, Row, record, trainer

ROUNDING = 3e-5
"""How far the logits of two experts may be apart for a token that goes to either. They have passed up to twenty updates, in which AdamW makes
full steps of gradients that are rounding alone."""
MOVES = 3
"""Tokens that may have been sent elsewhere in one run."""


@dataclass(frozen=True)
class Move:
    """A token that is sent to another expert."""

    step: int
    block: int
    """Among those with experts."""
    left: int
    taken: int

    def __str__(self) -> str:
        return f"step {self.step + 1}, {self.block + 1}. block with experts, expert {self.taken} for {self.left}"


@dataclass(frozen=True)
class Loads:
    """A run, and the experts of its tokens."""

    record: Record
    counts: Tensor
    """[steps, blocks with experts, experts]: tokens of the global batch."""
    gaps: tuple[float, ...]
    """How far the logits of the two experts of each move were apart."""


class _Mover:
    """Sends of the tokens that would leave an expert for another one, if only that was as probable, the one that is nearest to it."""

    def __init__(self) -> None:
        self.moves: list[Move] = []
        """Those of the present step."""
        self.gaps: dict[Move, float] = {}

    def attach(self, block: int, gate: nn.Module) -> None:
        """To the router of a block."""
        gate.register_forward_hook(partial(self._choose, block))

    def _choose(self, block: int, gate: Gate, _: object, routing: Routing) -> Routing:
        for move in self.moves:
            if move.block == block:
                routing = self._moved(move, gate, routing)
        return routing

    def _moved(self, move: Move, gate: Gate, routing: Routing) -> Routing:
        last = gate.rule.top_k - 1
        ordered = routing.logits.detach().sort(dim=-1, descending=True)
        is_between = (ordered.indices[:, last] == move.left) & (ordered.indices[:, last + 1] == move.taken)
        gaps = torch.where(is_between, ordered.values[:, last] - ordered.values[:, last + 1], torch.inf)
        gap, token = gaps.min(0)
        self.gaps[move] = gap.item()
        if not is_between.any():
            return routing
        raised = torch.zeros_like(routing.logits)
        # More than the gap: of equal logits torch.topk might choose the old expert.
        raised[token, move.taken] = 2.0 * gap + 1e-6
        logits = routing.logits + raised
        experts, weights, probabilities = _Choice.apply(logits, gate.rule)  # type: ignore[no-untyped-call]
        return Routing(experts, weights, logits, probabilities)


def train_counting(place: Place, layout: FamilyLayout, moves: Sequence[Move] = ()) -> Loads:
    """Train, and count the tokens of experts. ``moves``: of one process with one microbatch, which has all tokens at once."""
    run = trainer(place, layout)
    assert isinstance(run.runtime, RoutedRuntime)
    mover = _Mover()
    gates = [module for stage in run.stages.values() for module in stage.modules() if isinstance(module, Gate)]
    for block, gate in enumerate(gates if moves else []):
        mover.attach(block, gate)
    steps, counts = [], []
    for index in range(layout.steps):
        mover.moves = [move for move in moves if move.step == index]
        steps.append(run.step(layout.first + index))
        counts.append(run.runtime._routed.routers(run.runtime.sums)[:, 2:].clone())
    return Loads(record(run, steps), torch.stack(counts).round().to(torch.int64), tuple(mover.gaps[move] for move in moves))


def explained(cluster: Cluster, layout: FamilyLayout, expected: Reference, row: Row, rounding: float = ROUNDING) -> Row:
    """The row of a layout that exceeds its bound: against one process in which the same tokens go to other experts, where these stand
    between two within ``rounding``; or as it is. Its name says which. Such a row has no distance to transformers, which does not move
    them. ``layout`` begins with the text of ``expected``."""
    if not layout.model.num_experts:
        return row
    own: Loads = cluster.run(layout.world_size, train_counting, layout, timeout=SECONDS)[0]
    moves: list[Move] = []
    single: Loads = cluster.run(1, train_counting, layout.reference, timeout=SECONDS)[0]
    while len(moves) < MOVES:
        move = _first_move(own.counts, single.counts)
        if isinstance(move, str):
            return replace(row, name=f"{row.name}, {move}")
        moves.append(move)
        single = cluster.run(1, train_counting, layout.reference, moves, timeout=SECONDS)[0]
        gap = single.gaps[-1]
        if gap > rounding:
            return replace(row, name=f"{row.name}, another expert, but not by rounding: {move}, logits {gap:.0e} apart")
        moved = replace(expected, single=single.record, hf=None).row(row.name, own.record)
        moved = replace(moved, loss_rounding=row.loss_rounding, norm_rounding=row.norm_rounding)
        if moved.holds:
            words = "; ".join(f"{one}, logits {gap:.0e} apart" for one, gap in zip(moves, single.gaps, strict=True))
            return replace(moved, name=f"{row.name}, against one process that moves a token: {words}")
    return replace(row, name=f"{row.name}, more than {MOVES} tokens have other experts")


def _first_move(own: Tensor, single: Tensor) -> Move | str:
    """The token that a layout was the first to send to another expert than one process did; or why there is none."""
    differences = own - single
    places = differences.abs().sum(-1).nonzero()
    if not len(places):
        return "though all experts have as many tokens as in one process"
    step, block = places[0].tolist()
    difference = differences[step, block]
    if int(difference.abs().sum()) != 2:
        return f"several tokens have other experts from step {step + 1}"
    return Move(step, block, int(difference.argmin()), int(difference.argmax()))
