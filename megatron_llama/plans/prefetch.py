"""Which bucket of parameters is gathered when: a plan of integers that walks the list of uses.

Full-size parameters live in *slots*. A bucket always uses the same one, several buckets may share
it, and a bucket alone in its slot is *resident*. Between uses only shards exist: a use of a bucket
that its slot does not hold needs a gather. What a slot holds stays until another bucket takes it,
so the last units of a forward pass are still there for the backward pass.

One rule orders every gather: **in the order of use, and none evicts what is used sooner**.
Look-ahead stops at the first bucket that has to wait. A later one could often go at once, but its
message would delay the one that is wanted first. Because the map from buckets to slots is fixed,
looking ahead costs no gather: each slot is filled as often as its bucket changes along the list,
whatever the limit in bytes.

Why ranks cannot deadlock: what is gathered depends on the arguments and on the sequence of calls,
never on what has completed. Ranks of one data-parallel group make the same calls, so they issue the
same gathers in the same order, and each gather waits only for what was issued before it. ``invalidate``
and ``try_gather`` therefore belong at fixed points of the program.

One exception, for updates during backward: a bucket with a slot of its own may be forgotten and
offered at any time after its last use, where that is in backward, as long as all ranks offer in the
same order. Backward uses buckets in the reverse order of their first uses. An offer is accepted
only for the first round of gathers, which fits into the slots and the limit at once, and what is
still to be used then comes before the offered bucket in that round: all of it was gathered when the
last use of the bucket began. So look-ahead has come to its end, and there is room for the bucket,
now as later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence

from megatron_llama.plans.buckets import Slot
from megatron_llama.plans.weight_access import WeightAccess


class _Plan:
    """One list of uses, flattened: a *need* is one bucket of one use, a *position* its place among
    all needs."""

    def __init__(
        self, accesses: tuple[WeightAccess, ...], unit_buckets: Sequence[Sequence[int]]
    ) -> None:
        self.accesses = accesses
        self.needs: list[int] = []
        self.starts: list[int] = []
        """Position of the first need of each use."""
        for access in accesses:
            self.starts.append(len(self.needs))
            self.needs += unit_buckets[access.unit]
        self.last = {bucket: position for position, bucket in enumerate(self.needs)}
        """Position of the last need of each bucket."""

    def start(self, index: int) -> int:
        """Position of the first need of the use with this index, or of the end of the list."""
        return self.starts[index] if index < len(self.starts) else len(self.needs)


class PrefetchPlan:
    """What every slot holds or is being filled with, and what to gather next. A walk costs O(1) per
    need, amortised.

    ``prefetch_bytes``: most bytes that are gathered, or being gathered, but not yet used, beyond
    what the current use needs. None: only the slots limit. A bucket larger than a positive limit
    still goes when nothing else is ahead, or nothing would ever overlap. 0 turns looking ahead off:
    every gather waits for its use."""

    def __init__(
        self,
        *,
        slots: Sequence[Slot],
        sizes: Sequence[int],
        unit_buckets: Sequence[Sequence[int]],
        prefetch_bytes: int | None,
    ) -> None:
        """``sizes``: bytes of each full bucket. Raises ValueError where one unit needs two buckets
        of the same slot."""
        self.slots = tuple(slots)
        self.sizes = tuple(sizes)
        self.prefetch_bytes = prefetch_bytes
        self.unit_buckets = tuple(map(tuple, unit_buckets))
        self._check_units()
        self._occupants: dict[Slot, int] = {}
        self._plan = _Plan((), self.unit_buckets)
        self._entered = 0
        self._round = frozenset[int]()
        self._start = self._end = 0
        """Positions of the needs of the current use: [start, end)."""
        self._ahead = 0
        """Look-ahead. Every need from ``_start`` up to this position is in its slot, and stays
        there until its use."""
        self._reserved: dict[Slot, int] = {}
        """Last position before ``_ahead`` that needs the slot: it is free once this lies behind
        ``_start``."""
        self._unused: set[int] = set()
        """Gathered ahead, not used since."""
        self._unused_bytes = 0

    def _check_units(self) -> None:
        for unit, buckets in enumerate(self.unit_buckets):
            shared = [
                slot
                for slot, count in Counter(self.slots[bucket] for bucket in buckets).items()
                if count > 1
            ]
            if shared:
                raise ValueError(
                    f"unit {unit}: buckets {buckets} meet in slots {shared} (pool, slot), expected a slot for each"
                )

    def begin(self, accesses: Sequence[WeightAccess]) -> tuple[int, ...]:
        """Start a list of uses, a training step or an evaluation; returns the buckets to gather now
        for its first uses, in issue order. What is resident stays so. Raises RuntimeError where the
        previous list was not walked to its end."""
        self._check_walked()
        accesses = tuple(accesses)
        if accesses is not self._plan.accesses:
            self._plan = _Plan(accesses, self.unit_buckets)
            self._round = frozenset(self._first_gathers())
        self._entered = self._start = self._end = self._ahead = 0
        self._reserved.clear()
        return tuple(self._look_ahead())

    def advance(self, access: WeightAccess) -> tuple[int, ...]:
        """The next use is about to run; returns the buckets to gather now in issue order: those it
        lacks, then those of later uses. Raises RuntimeError where another use was planned."""
        plan = self._plan
        index = self._entered
        planned = plan.accesses[index] if index < len(plan.accesses) else None
        if access != planned:
            raise RuntimeError(
                f"use {index} of {len(plan.accesses)}: got {access}, expected {planned or 'the end of the list'}; passes follow the plan"
            )
        self._entered = index + 1
        self._start = plan.start(index)
        self._end = plan.start(index + 1)
        missing = tuple(self._fill_current())
        for bucket in self.unit_buckets[access.unit]:
            self._count_used(bucket)
        return missing + tuple(self._look_ahead())

    def try_gather(self, bucket: int) -> bool:
        """The engine has new weights for this bucket: are they to be gathered at once, for the next
        walk of the same list?

        True makes the bucket the occupant of its slot. That is so for those that ``begin`` would
        gather into empty slots, once the rest of the present list is in place and no use of it
        reads this slot. A bucket that is refused is gathered by ``begin`` or ``advance`` later.
        Raises RuntimeError where the slot holds this bucket: ``invalidate`` comes first."""
        if self.holds(bucket):
            raise RuntimeError(
                f"bucket {bucket} is offered while slot {self.slots[bucket]} holds it: forget the old weights first"
            )
        if (
            bucket not in self._round
            or self.gathers_to_come
            or not self._fits(bucket)
            or self._still_read(bucket)
        ):
            return False
        self._occupy(bucket, ahead=True)
        return True

    def invalidate(self, bucket: int) -> None:
        """The weights of one bucket changed. Raises RuntimeError where the present list still uses
        it."""
        if self._plan.last.get(bucket, -1) >= self._end:
            at = f"{self._entered} of {len(self._plan.accesses)} uses"
            raise RuntimeError(
                f"bucket {bucket} changes after {at}: a later one still reads it; update after the last"
            )
        if self.holds(bucket):
            self._count_used(bucket)
            del self._occupants[self.slots[bucket]]

    def holds(self, bucket: int) -> bool:
        """Whether the slot of a bucket holds it, or is being filled with it."""
        return self._occupants.get(self.slots[bucket]) == bucket

    def occupant(self, slot: Slot) -> int | None:
        """The bucket that a slot holds or is being filled with."""
        return self._occupants.get(slot)

    @property
    def gathers_to_come(self) -> bool:
        """Whether look-ahead has not come to the end of the list."""
        return self._ahead < len(self._plan.needs)

    def _check_walked(self) -> None:
        if self._entered < len(self._plan.accesses):
            at = f"{self._entered} of {len(self._plan.accesses)} uses"
            following = self._plan.accesses[self._entered]
            raise RuntimeError(
                f"a new list of uses begins after {at}: {following} is still to come; walk a list to its end"
            )

    def _fill_current(self) -> Iterator[int]:
        """Gather what the current use lacks. Nothing is in the way: look-ahead has not come past
        it, so no later use has a claim."""
        while self._ahead < self._end:
            bucket = self._plan.needs[self._ahead]
            if not self.holds(bucket):
                self._occupy(bucket, ahead=False)
                yield bucket
            self._claim(bucket)

    def _look_ahead(self) -> Iterator[int]:
        """Gather for later uses, in their order, up to the first that has to wait."""
        while self.gathers_to_come:
            bucket = self._plan.needs[self._ahead]
            if not self.holds(bucket):
                if not self._free(self.slots[bucket]) or not self._fits(bucket):
                    return
                self._occupy(bucket, ahead=True)
                yield bucket
            self._claim(bucket)

    def _claim(self, bucket: int) -> None:
        self._reserved[self.slots[bucket]] = self._ahead
        self._ahead += 1

    def _free(self, slot: Slot) -> bool:
        """Neither the current use reads the slot nor a use before the next one that look-ahead
        comes to."""
        return self._reserved.get(slot, -1) < self._start

    def _still_read(self, bucket: int) -> bool:
        """Whether another bucket in this slot is read by the current use or by a later one of the
        list. By its own uses the offered bucket is not held up: its weights would not have changed
        before the last of them was done."""
        return self.occupant(self.slots[bucket]) is not None and not self._free(self.slots[bucket])

    def _fits(self, bucket: int) -> bool:
        limit = self.prefetch_bytes
        return (
            limit is None
            or self._unused_bytes + self.sizes[bucket] <= limit
            or (limit > 0 and not self._unused)
        )

    def _occupy(self, bucket: int, *, ahead: bool) -> None:
        evicted = self._occupants.get(self.slots[bucket])
        if evicted is not None:
            self._count_used(evicted)
        self._occupants[self.slots[bucket]] = bucket
        if ahead:
            self._unused.add(bucket)
            self._unused_bytes += self.sizes[bucket]

    def _count_used(self, bucket: int) -> None:
        if bucket in self._unused:
            self._unused.remove(bucket)
            self._unused_bytes -= self.sizes[bucket]

    def _first_gathers(self) -> Iterator[int]:
        """What ``begin`` would gather for this list if every slot were empty."""
        taken: dict[Slot, int] = {}
        total = 0
        limit = self.prefetch_bytes
        for bucket in dict.fromkeys(self._plan.needs):
            total += self.sizes[bucket]
            fits = limit is None or total <= limit or (limit > 0 and not taken)
            if not fits or self.slots[bucket] in taken:
                return
            taken[self.slots[bucket]] = bucket
            yield bucket


def gathers(
    prefetch: PrefetchPlan,
    accesses: Sequence[WeightAccess],
    frozen: Container[int] = (),
    steps: int = 2,
) -> Counter[int]:
    """How often each bucket is gathered in the last of ``steps``; times ``sizes``: bytes. From the
    second step on all are equal.

    A step: begin, every use, update of all weights but the ``frozen`` ones, offers in forward
    order. Walks ``prefetch``, so give it one of its own."""
    accesses = tuple(accesses)
    order = dict.fromkeys(
        bucket for access in accesses for bucket in prefetch.unit_buckets[access.unit]
    )
    trained = [bucket for bucket in order if bucket not in frozen]
    count: Counter[int] = Counter()
    for _ in range(steps):
        count = Counter(prefetch.begin(accesses))
        for access in accesses:
            count.update(prefetch.advance(access))
        for bucket in trained:
            prefetch.invalidate(bucket)
        count.update(bucket for bucket in trained if prefetch.try_gather(bucket))
    return count
