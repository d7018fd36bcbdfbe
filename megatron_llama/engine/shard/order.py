"""The order in which a model uses its weights: recorded in the first step, compared in the next
ones.

While the order is unknown, all ranks say before each access what they are about to do, and go on if
it is the same. So all ranks name a rank that takes another way, and none waits for it. Once the
order of a step is known, each rank compares its accesses with it, and nothing is sent. A rank that
finds another access raises before it sends anything, and its peers hear why (``peers.py``).

All else that ranks do together is said in the same way: what an evaluation gathers, state dicts,
``gathered``. A step says that it begins and waits for no answer: ranks that begin the same step
need none, and whoever does something else waits for all answers before it sends anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from zlib import crc32

from megatron_llama.engine.counting import GradientRounds
from megatron_llama.engine.plan.weight_access import WeightAccess
from megatron_llama.engine.shard.peers import OrderError, Peers
from megatron_llama.engine.shard.positions import in_words

END_OF_BACKWARD = -1
STEP = -2
DISCARD = -3
TRAINING = -4
EVALUATION = -5
MODEL_STATE = -6
OPTIMIZER_STATE = -7
LOADING = -8
GATHERED = -9
END_OF_GATHERED = -10
INITIALIZE = -11
BUFFERS = -12
REQUIRES_GRAD = -13
REDUCTION = -14
"""Codes on which ranks agree beside accesses. ``REDUCTION - n`` is the reduction of bucket n."""
IN_STEPS = (END_OF_BACKWARD, STEP, DISCARD, BUFFERS)
WORDS = MappingProxyType(
    {
        END_OF_BACKWARD: "the end of a backward pass in step {}",
        STEP: "engine.step() of step {}",
        DISCARD: "engine.discard() in step {}",
        TRAINING: "the first forward pass of step {}",
        EVALUATION: "evaluation pass {}",
        MODEL_STATE: "the model's state_dict() before step {}",
        OPTIMIZER_STATE: "the optimizer's state_dict() before step {}",
        LOADING: "engine.load_state_dict() before step {}",
        GATHERED: "engine.gathered() before step {}",
        END_OF_GATHERED: "the end of engine.gathered() before step {}",
        INITIALIZE: "engine.initialize() before step {}",
        BUFFERS: "rank 0's buffers for a forward pass of step {}",
        REQUIRES_GRAD: "other trained parameters from step {} on",
    }
)


@dataclass(frozen=True)
class StepPlan:
    """The accesses and rounds of a recorded step, which the next ones repeat."""

    accesses: tuple[WeightAccess, ...]
    rounds: GradientRounds


class AccessOrder:
    """The accesses of the step that is under way."""

    def __init__(
        self,
        names: Sequence[str],
        buckets: Sequence[str],
        peers: Peers,
        *,
        static: bool,
        finds_unused: bool,
    ) -> None:
        """``names`` are those of the units, ``buckets`` those of the buckets; with ``static`` every
        step of as many microbatches does what the first of them did. ``finds_unused`` says whether
        ranks may leave out different parameters, for messages."""
        self._names = names
        self._buckets = buckets
        self._peers = peers
        self.static = static
        self._finds_unused = finds_unused
        self._plans: dict[tuple[int, frozenset[str]], StepPlan] = {}
        """By the number of microbatches, and the trainable parameters that are frozen."""
        self._frozen: frozenset[str] = frozenset()
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
        self.made = 0
        """How many planned accesses and ends of steps there have been, of all steps."""
        self.steps = 0
        """How many steps have come to their end."""
        self._evaluations = 0
        """How many evaluation passes have begun."""
        self._doing: tuple[int, int] | None = None
        """The code of what this rank has begun last, and the number of its step or evaluation
        pass. Replaced as a whole: a thread reads it."""

    def begin_step(self, microbatches: int) -> StepPlan | None:
        """Start a step. Returns its plan if a step of as many microbatches has been recorded."""
        self._microbatches = microbatches
        self.plan = self._plans.get((microbatches, self._frozen))
        self._made = []
        self._last = None
        self._whole = True
        self.position = 0
        self._repeated = 0
        # Nobody waits here: what a plan has is safe, and its peers may be behind.
        numbers = self._numbers(TRAINING, microbatches)
        self._peers.begin_meeting(numbers, self._compare)
        return self.plan

    def agree_to_freeze(self, names: frozenset[str]) -> None:
        """Make sure that all ranks freeze these parameters from now on, and no others. Collective.
        Raises OrderError on all ranks."""
        self._peers.meet(self._numbers(REQUIRES_GRAD, fingerprint(names)), self._compare)
        self._frozen = names

    def begin_evaluation(self) -> None:
        """An evaluation pass begins."""
        self._evaluations += 1
        self._doing = EVALUATION, self._evaluations

    def enter(self, access: WeightAccess) -> bool:
        """Compare the next access with the plan, or with those of the other ranks. Returns whether
        it is the plan's next. Raises OrderError."""
        if self.plan is None:
            self.agree(_code(access))
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
        self.made += 1
        self._doing = _code(access), self.steps + 1
        return True

    def enter_in_evaluation(self, access: WeightAccess) -> None:
        """Agree on an access of an evaluation that may gather something. Collective."""
        self.agree(_code(access, evaluation=True))

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

    def shorten(self, passes: int) -> None:
        """The step under way ends after so many backward passes, fewer than it was begun with.
        Raises OrderError in the middle of a pass, as far as the plan shows it."""
        if self.plan is not None:
            accesses = self.plan.accesses
            if self.position * self._microbatches != len(accesses) * passes:
                raise self._another_way("the end of the step", accesses[self._repeated])
            self.plan = StepPlan(accesses[: self.position], self.plan.rounds)
        self._microbatches = passes

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

    def agree_unplanned(self, code: int) -> None:
        """Agree as ``agree`` while there is no plan; with one do nothing."""
        if self.plan is None:
            self.agree(code)

    def agree(self, code: int) -> None:
        """Make sure that all ranks are at the same point, of which ``code`` is the number.
        Collective. Raises OrderError on all ranks."""
        # A planned step may be anywhere between its accesses; ``discard`` brings ranks together.
        place = 0 if code == DISCARD else self.position
        self._peers.meet(self._numbers(code, place), self._compare, discards=code == DISCARD)

    def _numbers(self, code: int, place: int) -> tuple[int, int, int]:
        """Return what this rank says of what it is about to do: its code, how far the planned step
        has come, and a number for messages."""
        evaluates = code == EVALUATION or (code >= 0 and bool(code & 2))
        number = self._evaluations if evaluates else self.steps + 1
        self._doing = code, number
        return code, place, number

    def _compare(self, by_rank: Sequence[tuple[int, ...]]) -> OrderError | None:
        """Return the error for what the ranks are about to do; None: the same."""
        if len({(code, place) for code, place, _ in by_rank}) == 1:
            return None
        codes = {code for code, _, _ in by_rank}
        if codes == {REQUIRES_GRAD}:
            return OrderError(
                "requires_grad_",
                got=f"other trained parameters than on rank 0 on {_unlike_first(by_rank)}",
                expected="the same on all ranks",
                do="freeze and train the same parameters on all ranks",
            )
        words = {
            rank: self._point(code, number)
            + (f" with microbatches={place}" if codes == {TRAINING} else "")
            + (f" after {place} accesses of it" if len(codes) == 1 and code != TRAINING else "")
            for rank, (code, place, number) in enumerate(by_rank)
        }
        in_step = all(_is_in_step(code) for code in codes)
        where = f"access {len(self._made)} of the step" if in_step else "the ranks"
        do = (
            "let every rank run the same units in the same order (a unit that some rank does not "
            "need still has to run there)"
            + (
                ""
                if self._finds_unused
                else " and use the same parameters in them, or shard(find_unused=True)"
            )
            if in_step
            else "give every rank the same number of batches, of evaluation too, and let it run "
            "the same units; call state_dict(), gathered() and the model on all ranks, not under "
            "`if rank == 0`"
        )
        # All ranks have said it to all, so all raise the same error, and none waits.
        error = OrderError(
            where,
            got=f"different ones ({in_words(words)})",
            expected="the same on all ranks",
            do=do,
        )
        if TRAINING in codes:
            # But a rank that begins a step has not waited for what the others say.
            self._peers.leave(str(error))
        return error

    def end_step(self, rounds: Callable[[], GradientRounds]) -> bool:
        """The step has ended: keep what it did as the plan of the next ones. Returns whether this
        is the first plan."""
        # A step in which a pass was broken off has accesses that no other step has.
        if self.plan is not None or not self.static or not self._whole:
            return False
        made = StepPlan(tuple(self._made), rounds())
        self._plans[self._microbatches, self._frozen] = made
        return len(self._plans) == 1

    def close_step(self) -> None:
        """The passes of the step have ended: ``engine.step`` begins."""
        self.position = 0
        self.made += 1
        self.steps += 1
        self._doing = STEP, self.steps

    def forget(self) -> None:
        """The passes of the step have been thrown away."""
        self.position = 0

    def accesses_until(self, position: int) -> Sequence[WeightAccess]:
        """Return the accesses of the plan that have not been made, up to a position."""
        return () if self.plan is None else self.plan.accesses[self.position : position]

    @property
    def expected(self) -> str | None:
        """The next access of the plan, in words; None at its end, and without a plan."""
        if self.plan is None or self.position == len(self.plan.accesses):
            return None
        return self._described(self.plan.accesses[self.position])

    @property
    def words(self) -> str:
        """What this rank has begun last."""
        return "shard()" if self._doing is None else self._point(*self._doing)

    def _point(self, code: int, number: int) -> str:
        if code in WORDS:
            return WORDS[code].format(number)
        if code <= REDUCTION:
            return f"the next gradients after those of {self._buckets[REDUCTION - code]}"
        access = self._described(WeightAccess(code // 4, bool(code & 1)))
        return f"{access} in {'evaluation pass' if code & 2 else 'step'} {number}"

    def _described(self, access: WeightAccess) -> str:
        return f"{'backward' if access.backward else 'forward'} of {self._names[access.unit]}"


def fingerprint(names: frozenset[str]) -> int:
    """Return a number by which ranks compare what they freeze."""
    return crc32(",".join(sorted(names)).encode())


def _unlike_first(by_rank: Sequence[tuple[int, ...]]) -> str:
    ranks = [rank for rank, said in enumerate(by_rank) if said[1] != by_rank[0][1]]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _code(access: WeightAccess, *, evaluation: bool = False) -> int:
    """Return the code of an access."""
    return 4 * access.unit + 2 * evaluation + access.backward


def _is_in_step(code: int) -> bool:
    """Whether a code is of something inside of a training step."""
    return code in IN_STEPS or code <= REDUCTION or (code >= 0 and not code & 2)
