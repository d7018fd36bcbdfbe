"""The order in which buckets of parameters are gathered: a plan of integers that walks the list of
weight accesses.

Whole parameters live in *slots*. A bucket always uses the same slot, several buckets may share one,
and a bucket alone in its slot stays unsharded. Otherwise only shards exist between accesses: an
access to a bucket that its slot does not hold needs a gather. A slot keeps its contents until
another bucket takes it, so the last units of a forward pass are still there for the backward pass.

One rule orders all gathers: **in the order of access, and none evicts a bucket that is accessed
sooner**. Prefetching stops at the first bucket that has to wait. A later bucket could often go at
once, but its message would delay the one that is needed first. The map from buckets to slots is
fixed, so prefetching costs no gather: each slot is filled as often as its bucket changes along the
list, whatever the limit in bytes.

Why ranks cannot deadlock: gathers depend on the arguments and on the sequence of calls, never on
what has completed. The ranks of a data-parallel group make the same calls, so they issue the same
gathers in the same order, and each gather waits only for earlier ones. ``invalidate`` and
``try_gather`` therefore have to be called at fixed points of the program.

There is one exception, for updates during backward. A bucket with a slot of its own may be
invalidated and gathered at any time after its last access, if that access is in backward, as long
as all ranks call ``try_gather`` in the same order. The proof: backward accesses buckets in the
reverse order of their first accesses. ``try_gather`` accepts a bucket only for the first round of
gathers, which fits into the slots and the limit at once. The buckets that backward has still to
access come before this bucket in that round, so all had been gathered when the last access of the
bucket began. Prefetching has then come to its end, and there is room for the bucket, now as later.

An access that is in no list (``access_unplanned``: the first step of a user's model, evaluation)
takes the slots that it needs, whatever they hold. A list that is being walked goes on afterwards
and gathers the evicted buckets again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from megatron_llama.engine.plan.buckets import BucketPlan, Slot
from megatron_llama.engine.plan.weight_access import WeightAccess


class _AccessList:
    """One list of accesses, flattened. A *need* is one bucket of one access; its *position* is its
    place among all needs."""

    def __init__(
        self, accesses: tuple[WeightAccess, ...], unit_buckets: Sequence[Sequence[int]]
    ) -> None:
        self.accesses = accesses
        self.needs: list[int] = []
        self.starts: list[int] = []
        """Position of the first need of each access."""
        for access in accesses:
            self.starts.append(len(self.needs))
            self.needs += unit_buckets[access.unit]
        self.last = {bucket: position for position, bucket in enumerate(self.needs)}
        """Position of the last need of each bucket."""

    def start(self, index: int) -> int:
        """Return the position of the first need of the access with this index, or the end."""
        return self.starts[index] if index < len(self.starts) else len(self.needs)


class PrefetchPlan:
    """The contents of every slot, present or arriving, and the gathers to come. A walk costs O(1)
    for each need, amortised.

    ``prefetch_bytes`` limits the bytes that are gathered, or being gathered, but not yet accessed,
    beyond what the current access needs. None: only the slots limit. 0: nothing is prefetched, and
    every gather waits for its access."""

    def __init__(
        self,
        *,
        slots: Sequence[Slot],
        sizes: Sequence[int],
        unit_buckets: Sequence[Sequence[int]],
        prefetch_bytes: int | None,
    ) -> None:
        """``sizes`` has the bytes of each whole bucket. Raises ValueError if one unit needs two
        buckets of the same slot."""
        self.slots = tuple(slots)
        self.sizes = tuple(sizes)
        self.prefetch_bytes = prefetch_bytes
        self.unit_buckets = tuple(map(tuple, unit_buckets))
        self._check_units()
        self._occupants: dict[Slot, int] = {}
        self._list = _AccessList((), self.unit_buckets)
        self._entered = 0
        """Accesses that have begun."""
        self._first_round = frozenset[int]()
        self._start = 0
        """Position of the first need of the current access."""
        self._end = 0
        """Position behind its last need."""
        self._reached = 0
        """The position up to which prefetching has come. Every need from ``_start`` up to this
        position is in its slot, and stays there until its access."""
        self._reserved: dict[Slot, int] = {}
        """For each slot, the last position before ``_reached`` that needs it. The slot is free
        once that position lies behind ``_start``."""
        self._prefetched: set[int] = set()
        """Buckets that have been gathered and not accessed since."""
        self._prefetched_bytes = 0

    def _check_units(self) -> None:
        for unit, buckets in enumerate(self.unit_buckets):
            shared = [
                slot
                for slot, count in Counter(self.slots[bucket] for bucket in buckets).items()
                if count > 1
            ]
            if shared:
                raise ValueError(
                    f"unit {unit}: buckets {buckets} meet in slots {shared} (pool, slot), "
                    f"expected a slot for each"
                )

    def begin(self, accesses: Sequence[WeightAccess]) -> tuple[int, ...]:
        """Start a list of accesses (a training step or an evaluation). Returns the buckets to
        gather now, in the order of issue. Buckets that are unsharded stay so. Raises RuntimeError
        if the previous list was not walked to its end."""
        self._check_walked()
        accesses = tuple(accesses)
        # By identity: the same tuple comes in every step, and its first round is computed once.
        if accesses is not self._list.accesses:
            self._list = _AccessList(accesses, self.unit_buckets)
            self._first_round = frozenset(self._first_gathers())
        self._entered = 0
        self._start = 0
        self._end = 0
        self._reached = 0
        self._reserved.clear()
        return tuple(self._prefetch())

    def advance(self, access: WeightAccess) -> tuple[int, ...]:
        """Begin the next access. Returns the buckets to gather now, in the order of issue: those
        that it lacks, then those of later accesses. Raises RuntimeError if another access was
        planned."""
        accesses = self._list.accesses
        index = self._entered
        planned = accesses[index] if index < len(accesses) else None
        if access != planned:
            raise RuntimeError(
                f"access {index} of {len(accesses)}: got {access}, "
                f"expected {planned or 'the end of the list'}; passes follow the plan"
            )
        self._entered = index + 1
        self._start = self._list.start(index)
        self._end = self._list.start(index + 1)
        missing = tuple(self._fill_current())
        for bucket in self.unit_buckets[access.unit]:
            self._stop_counting(bucket)
        return missing + tuple(self._prefetch())

    def access_unplanned(self, unit: int, following: int | None = None) -> tuple[int, ...]:
        """Begin an access that is in no list. Returns the buckets to gather now, in the order of
        issue: those that it lacks, then those that the unit ``following`` lacks, which is expected
        next, up to the first whose slot this access reads or that exceeds the limit.

        The walk of the present list may continue: the next ``advance`` gathers the evicted buckets
        again."""
        own = self.unit_buckets[unit]
        launched = []
        for bucket in own:
            if not self.holds(bucket):
                self._occupy(bucket, prefetched=False)
                launched.append(bucket)
            self._stop_counting(bucket)
        read = {self.slots[bucket] for bucket in own}
        for bucket in () if following is None else self.unit_buckets[following]:
            if not self.holds(bucket):
                # In order or not at all, as with a list.
                if self.slots[bucket] in read or not self._within_limit(bucket):
                    break
                self._occupy(bucket, prefetched=True)
                launched.append(bucket)
        if launched:
            self._forget_evicted()
        return tuple(launched)

    def _forget_evicted(self) -> None:
        """Set prefetching back to the first bucket that an access outside of the list has evicted
        and that a later access of the list needs."""
        for position in range(self._end, self._reached):
            if not self.holds(self._list.needs[position]):
                self._reached = position
                self._reserved = {
                    self.slots[bucket]: number
                    for number, bucket in enumerate(self._list.needs[:position])
                    if number >= self._start
                }
                return

    def abandon(self) -> None:
        """End the present list: no later access of it will come. Gathered buckets stay."""
        needs = len(self._list.needs)
        self._entered = len(self._list.accesses)
        self._start = needs
        self._end = needs
        self._reached = needs
        self._reserved.clear()

    def try_gather(self, bucket: int) -> bool:
        """Return whether to gather a bucket, which has new values, at once for the next walk of the
        same list; if not, ``begin`` or ``advance`` gathers it later.

        The answer is yes, and the bucket takes its slot, for buckets that ``begin`` would gather
        into empty slots, once the rest of the present list is in place and no access of it reads
        this slot. Raises RuntimeError if the slot holds this bucket: call ``invalidate`` first."""
        if self.holds(bucket):
            raise RuntimeError(
                f"bucket {bucket} is to be gathered while slot {self.slots[bucket]} holds it: "
                f"invalidate the old weights first"
            )
        if (
            bucket not in self._first_round
            or self.gathers_to_come
            or not self._within_limit(bucket)
            or self._still_read(bucket)
        ):
            return False
        self._occupy(bucket, prefetched=True)
        return True

    def invalidate(self, bucket: int) -> None:
        """Note that the values of a bucket change: its slot holds it no longer. Raises RuntimeError
        if the present list still accesses it."""
        if self._list.last.get(bucket, -1) >= self._end:
            at = f"{self._entered} of {len(self._list.accesses)} accesses"
            raise RuntimeError(
                f"bucket {bucket} changes after {at}: a later one still reads it; "
                f"update after the last"
            )
        if self.holds(bucket):
            # The bucket no longer waits to be read, so it must not count in the limit.
            self._stop_counting(bucket)
            del self._occupants[self.slots[bucket]]

    def holds(self, bucket: int) -> bool:
        """Whether the slot of a bucket holds it, or is being filled with it."""
        return self._occupants.get(self.slots[bucket]) == bucket

    def occupant(self, slot: Slot) -> int | None:
        """Return the bucket that a slot holds or is being filled with."""
        return self._occupants.get(slot)

    @property
    def gathers_to_come(self) -> bool:
        """Whether prefetching has not come to the end of the list."""
        return self._reached < len(self._list.needs)

    def _check_walked(self) -> None:
        if self._entered < len(self._list.accesses):
            at = f"{self._entered} of {len(self._list.accesses)} accesses"
            following = self._list.accesses[self._entered]
            raise RuntimeError(
                f"a new list of accesses begins after {at}: {following} is still to come; "
                f"walk a list to its end"
            )

    def _fill_current(self) -> Iterator[int]:
        """Gather the buckets that the current access lacks. Their slots are free: prefetching has
        not come past it, so no later access has reserved a slot."""
        while self._reached < self._end:
            bucket = self._list.needs[self._reached]
            if not self.holds(bucket):
                self._occupy(bucket, prefetched=False)
                yield bucket
            self._reserve(bucket)

    def _prefetch(self) -> Iterator[int]:
        """Gather for later accesses, in their order, up to the first that has to wait for its slot
        or for room in the limit."""
        while self.gathers_to_come:
            bucket = self._list.needs[self._reached]
            if not self.holds(bucket):
                # No later bucket instead: its message would delay this one, which is needed first.
                if not self._is_free(self.slots[bucket]) or not self._within_limit(bucket):
                    return
                self._occupy(bucket, prefetched=True)
                yield bucket
            self._reserve(bucket)

    def _within_limit(self, bucket: int) -> bool:
        """Whether a bucket may be prefetched under the limit in bytes. A bucket larger than a
        positive limit still goes if no other is prefetched, because otherwise no gather would ever
        overlap."""
        limit = self.prefetch_bytes
        return (
            limit is None
            or self._prefetched_bytes + self.sizes[bucket] <= limit
            or (limit > 0 and not self._prefetched)
        )

    def _reserve(self, bucket: int) -> None:
        self._reserved[self.slots[bucket]] = self._reached
        self._reached += 1

    def _is_free(self, slot: Slot) -> bool:
        """Whether no access reads the slot, from the current one to the last before the next
        prefetch."""
        return self._reserved.get(slot, -1) < self._start

    def _still_read(self, bucket: int) -> bool:
        """Whether another bucket in this slot is read by the current access or by a later one. The
        bucket's own accesses do not count: its values would not have changed before the last of
        them."""
        slot = self.slots[bucket]
        return self.occupant(slot) is not None and not self._is_free(slot)

    def _occupy(self, bucket: int, *, prefetched: bool) -> None:
        evicted = self._occupants.get(self.slots[bucket])
        if evicted is not None:
            self._stop_counting(evicted)
        self._occupants[self.slots[bucket]] = bucket
        if prefetched:
            self._prefetched.add(bucket)
            self._prefetched_bytes += self.sizes[bucket]

    def _stop_counting(self, bucket: int) -> None:
        """Stop counting a bucket in the limit: it is accessed, evicted or invalid."""
        if bucket in self._prefetched:
            self._prefetched.remove(bucket)
            self._prefetched_bytes -= self.sizes[bucket]

    def _first_gathers(self) -> Iterator[int]:
        """Yield the buckets that ``begin`` would gather for this list if every slot were empty."""
        taken: dict[Slot, int] = {}
        total = 0
        limit = self.prefetch_bytes
        for bucket in dict.fromkeys(self._list.needs):
            total += self.sizes[bucket]
            fits = limit is None or total <= limit or (limit > 0 and not taken)
            if not fits or self.slots[bucket] in taken:
                return
            taken[self.slots[bucket]] = bucket
            yield bucket


def prefetch_plan_of(
    bucket_plan: BucketPlan, sizes: Sequence[int], prefetch_bytes: int
) -> PrefetchPlan:
    """Return the plan of gathers. ``prefetch_bytes``: 0 for no limit."""
    return PrefetchPlan(
        slots=bucket_plan.parameter_slots,
        sizes=sizes,
        unit_buckets=bucket_plan.unit_buckets,
        prefetch_bytes=prefetch_bytes or None,
    )
