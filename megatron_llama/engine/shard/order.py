"""The order in which a model uses its weights: recorded in the first step, compared in the next
ones.

While nobody knows the order, all ranks say before each access what they are about to do, and go on
if it is the same. So a rank that takes another way is named by all ranks, and nobody waits for it.
Once the order of a step is known, each rank compares its accesses with it, and nothing is sent. A
rank that finds another access raises before it sends anything, and its peers hear why
(``peers.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_llama.engine.comm.object_collectives import all_gather_float
from megatron_llama.engine.counting import GradientRounds
from megatron_llama.engine.plan.weight_access import WeightAccess
from megatron_llama.engine.shard.peers import OrderError, Peers

END_OF_BACKWARD = -1
STEP = -2
DISCARD = -3
REDUCTION = -4
"""What ranks agree on beside accesses. ``REDUCTION - n`` is the reduction of bucket n."""


@dataclass(frozen=True)
class StepPlan:
    """What a recorded step has done, as the next ones will."""

    accesses: tuple[WeightAccess, ...]
    rounds: GradientRounds


class AccessOrder:
    """The accesses of the step that is under way."""

    def __init__(
        self, names: Sequence[str], buckets: Sequence[str], peers: Peers, *, static: bool
    ) -> None:
        """``names`` are those of the units, ``buckets`` those of the buckets; with ``static`` every
        step of as many microbatches does what the first of them did."""
        self._names = names
        self._buckets = buckets
        self._peers = peers
        self.static = static
        self._plans: dict[int, StepPlan] = {}
        """By the number of microbatches."""
        self._microbatches = 0
        self._successors: dict[WeightAccess | None, int] = {}
        """The unit that followed each access when it came last."""
        self._made: list[WeightAccess] = []
        self._last: WeightAccess | None = None
        self._whole = True
        """Whether no forward pass of this step was broken off."""
        self.plan: StepPlan | None = None
        """The plan of this step; None while it is recorded."""
        self.position = 0
        """How many accesses of the plan have been made."""
        self._repeated = 0
        """How many of them have been made since the last forward pass that was broken off, if that
        is less."""

    def begin_step(self, microbatches: int) -> StepPlan | None:
        """Start a step. Returns its plan if a step of as many microbatches has been recorded."""
        self._microbatches = microbatches
        self.plan = self._plans.get(microbatches)
        self._made = []
        self._last = None
        self._whole = True
        self.position = 0
        self._repeated = 0
        return self.plan

    def enter(self, access: WeightAccess) -> bool:
        """Compare the next access with the plan, or with those of the other ranks. Returns whether
        it is the plan's next. Raises OrderError."""
        if self.plan is None:
            self.agree(2 * access.unit + access.backward)
            self._note(access)
            self._made.append(access)
            return False
        accesses = self.plan.accesses
        planned = accesses[self._repeated] if self._repeated < len(accesses) else None
        if access != planned:
            raise self._another_way(self._described(access), planned)
        # A pass that was broken off may come again: what it gathered then is not gathered twice.
        self._repeated += 1
        if self._repeated <= self.position:
            return False
        self.position = self._repeated
        return True

    def _another_way(self, got: str, planned: WeightAccess | None) -> OrderError:
        rank = f"rank {self._peers.axis.rank}, " if self._peers.axis.size > 1 else ""
        do = (
            "run evaluation under torch.no_grad(), call engine.discard() after passes that no step "
            "uses, or shard(static_order=False) for a model that takes another way each time"
        )
        if planned is None:
            got = f"{got} for backward pass {self._microbatches + 1}"
            expected = f"the end of the step after microbatches={self._microbatches}"
            do = f"call engine.step() after so many backward passes; {do}"
        else:
            expected = self._described(planned)
        error = OrderError(
            f"{rank}access {self._repeated} of the step",
            got=got,
            expected=f"{expected} as in the first step",
            do=do,
        )
        # No collective could say it: the others are on their way to a gather.
        if self._peers.axis.size > 1:
            self._peers.leave(str(error))
        return error

    def break_off(self, position: int) -> None:
        """A forward pass that began at this position has ended with an error. It may be repeated
        from there. A step that is recorded is no plan for others any more."""
        self._whole = False
        self._repeated = position

    def expected_after(self, access: WeightAccess) -> int | None:
        """Return the unit that will probably follow an access that is in no plan."""
        if access in self._successors:
            return self._successors[access]
        # Nearly all models run in the order in which they register; a wrong guess costs one gather.
        neighbour = access.unit + (-1 if access.backward else 1)
        return neighbour if 0 <= neighbour < len(self._names) else None

    def _note(self, access: WeightAccess) -> None:
        if self._last is not None:
            # Kept over steps: without a plan the last step is the best guess.
            self._successors[self._last] = access.unit
        self._last = access

    def agree(self, code: int) -> None:
        """Make sure that all ranks are at the same point, of which ``code`` is the number.
        Collective while there is no plan, and for ``DISCARD``; else it does nothing. Raises
        OrderError on all ranks."""
        if self._peers.axis.size == 1 or (self.plan is not None and code != DISCARD):
            return
        with self._peers.explained():
            codes = [int(code_of_rank) for code_of_rank in all_gather_float(code, self._peers.axis)]
        if len(set(codes)) > 1:
            # All ranks have all codes, so all raise the same error, and nobody waits for it.
            by_code: dict[int, list[int]] = {}
            for rank, code_of_rank in enumerate(codes):
                by_code.setdefault(code_of_rank, []).append(rank)
            ways = "; ".join(
                f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: "
                f"{self._point(code_of_rank)}"
                for code_of_rank, ranks in by_code.items()
            )
            raise OrderError(
                f"access {len(self._made)} of the step",
                got=f"different ones ({ways})",
                expected="the same on all ranks",
                do="let every rank run the same units in the same order (a unit that some rank "
                "does not need still has to run there) and use the same parameters in them, or "
                "shard(find_unused=True)",
            )

    def end_step(self, rounds: Callable[[], GradientRounds]) -> bool:
        """The step has ended: keep what it did as the plan of the next ones. Returns whether this
        is the first plan."""
        # A step in which a pass was broken off has accesses that no other step has.
        if self.plan is not None or not self.static or not self._whole:
            return False
        self._plans[self._microbatches] = StepPlan(tuple(self._made), rounds())
        return len(self._plans) == 1

    def accesses_until(self, position: int) -> Sequence[WeightAccess]:
        """Return the accesses of the plan that have not been made, up to a position."""
        return () if self.plan is None else self.plan.accesses[self.position : position]

    @property
    def expected(self) -> str | None:
        """The next access of the plan, in words; None at its end, and without a plan."""
        if self.plan is None or self.position == len(self.plan.accesses):
            return None
        return self._described(self.plan.accesses[self.position])

    def _point(self, code: int) -> str:
        if code == END_OF_BACKWARD:
            return "the end of a backward pass"
        if code == STEP:
            return "engine.step()"
        if code == DISCARD:
            return "engine.discard()"
        if code <= REDUCTION:
            return f"the next gradients after those of {self._buckets[REDUCTION - code]}"
        return self._described(WeightAccess(code // 2, bool(code % 2)))

    def _described(self, access: WeightAccess) -> str:
        return f"{'backward' if access.backward else 'forward'} of {self._names[access.unit]}"
