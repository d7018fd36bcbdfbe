"""The earliest time at which a step can end, by its dependency graph: an event simulation of
integers and seconds.

Compute is a sequence of passes (half blocks, forward and backward). The link is ideal: full duplex,
no latency, one message after the other; nothing else takes time. What depends on what:

    pass        after the pass before it, when the weights it reads are there
    reduction   when the last gradient of its bucket exists; first complete, first sent
    update      with clipping when every reduction of the step is done (the norm), else when that of
                its bucket is; with Muon, when its matrices have been at their owners and are back
    gather      when the update is done and nobody reads the old content of its slot any more; the
                one that is read first, first

Whether reductions or gathers go first when both are ready is a choice: the better one counts.
Exchanges of matrices count as gathers here: what the next forward pass reads first goes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from megatron_llama.config.schema import Config
from megatron_llama.engine.plan.buckets import BucketPlan, Slot
from megatron_llama.engine.plan.muon import ITEMSIZE, muon_plan
from megatron_llama.pipeline.plan.run_engine import rank_bucket_plan

FRAME_FACTOR = 1514 / 1448
"""Bytes on the link for a byte of payload: a 1500-byte packet holds 20 of IPv4, 20 of TCP, 12 of
TCP timestamps and 1448 of payload, and has 14 of Ethernet around it, which the rate limit
counts."""


@dataclass(frozen=True)
class Pass:
    """A piece of compute. ``reads``: buckets of its weights; ``writes``: buckets it adds gradients
    to, in that order."""

    seconds: float
    reads: tuple[int, ...]
    writes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """One training step. Every other tuple has an entry for each bucket."""

    passes: tuple[Pass, ...]
    reduce_seconds: tuple[float, ...]
    gather_seconds: tuple[float, ...]
    """0: every rank updates all of the bucket, and nothing is gathered."""
    exchange_seconds: tuple[float, ...]
    """For what Muon sends to the owners of matrices and back, on average over the hosts. 0: every
    rank can update its shard by itself."""
    parameter_slots: tuple[Slot, ...]
    gradient_slots: tuple[Slot, ...]
    clip: bool


class _Message(Enum):
    REDUCTION = auto()
    EXCHANGE = auto()
    GATHER = auto()


class _Chain:
    """Steps one after the other, from weights that exist as shards only."""

    def __init__(self, plan: Plan, steps: int, *, gathers_first: bool) -> None:
        self.plan = plan
        self.steps = steps
        self.gathers_first = gathers_first
        self.passes = plan.passes * steps
        self.needs = [
            (index, bucket) for index, one in enumerate(self.passes) for bucket in one.reads
        ]
        self.before = list(self._previous_users())
        shared = {slot for slot in plan.parameter_slots if plan.parameter_slots.count(slot) > 1}
        self.in_order = bool(shared)
        """Look-ahead stops at the first bucket that has to wait: a later one would delay the one
        that is read first."""
        self.time = 0.0
        self.done = 0
        self.compute_end: float | None = None
        self.unwritten: deque[int] = deque()
        self.link_end: float | None = None
        self.message: tuple[_Message, int, int] = (_Message.GATHER, 0, 0)
        """(what, bucket, step) on the link."""
        self.version = [0] * len(plan.reduce_seconds)
        """Updates of each bucket that have been made."""
        self.held: dict[Slot, tuple[int, int]] = {}
        self.arrived: set[tuple[int, int]] = set()
        self.ahead = 0
        self.reductions: deque[tuple[int, int]] = deque()
        self.exchanges: list[tuple[int, int]] = []
        self.first_read = {bucket: index for index, bucket in reversed(self.needs)}
        """By bucket, the first pass that reads it."""
        self.users: dict[Slot, int] = {}
        """Who writes to a gradient slot, or is reduced from it."""
        self.missing = self._contributions()
        self.reduced: list[int] = []
        self.updated = 0
        """Buckets of this step."""
        self.step_ends: list[float] = []
        self.busy = 0.0
        self._keep_whole()

    def _previous_users(self) -> Iterator[int]:
        """For each need, the last pass before it that reads from the same slot; -1: none."""
        last: dict[Slot, int] = {}
        for index, bucket in self.needs:
            slot = self.plan.parameter_slots[bucket]
            yield last.get(slot, -1)
            last[slot] = index

    def _contributions(self) -> dict[int, int]:
        count: dict[int, int] = {}
        for one in self.plan.passes:
            for bucket in one.writes:
                count[bucket] = count.get(bucket, 0) + 1
        return count

    def run(self) -> list[float]:
        """The times at which the updates of every step are done."""
        while len(self.step_ends) < self.steps:
            while self._write() or self._start_pass() or self._start_message():
                pass
            ends = [end for end in (self.compute_end, self.link_end) if end is not None]
            if not ends:
                raise RuntimeError(
                    f"the plan stands still at pass {self.done} of {len(self.passes)}: "
                    f"{self.passes[self.done]}"
                )
            self.time = min(ends)
            if self.compute_end == self.time:
                self.compute_end = None
                self.unwritten.extend(self.passes[self.done].writes)
                self._end_pass_if_written()
            if self.link_end == self.time:
                self.link_end = None
                self._end_message(*self.message)
        return self.step_ends

    @property
    def _computing(self) -> bool:
        return self.compute_end is not None or bool(self.unwritten)

    def _start_pass(self) -> bool:
        if self._computing or self.done == len(self.passes):
            return False
        step = self.done // len(self.plan.passes)
        if any((bucket, step) not in self.arrived for bucket in self.passes[self.done].reads):
            return False
        self.compute_end = self.time + self.passes[self.done].seconds
        return True

    def _write(self) -> bool:
        """Put the next gradient of the pass into its slot, once the slot's last user has been
        reduced."""
        if not self.unwritten:
            return False
        bucket = self.unwritten[0]
        if self.users.setdefault(
            self.plan.gradient_slots[bucket], bucket
        ) != bucket or self._being_reduced(bucket):
            return False
        self.unwritten.popleft()
        self.missing[bucket] -= 1
        if self.missing[bucket] == 0:
            self.reductions.append((bucket, self.done // len(self.plan.passes)))
        self._end_pass_if_written()
        return True

    def _being_reduced(self, bucket: int) -> bool:
        return self.missing[bucket] == 0

    def _end_pass_if_written(self) -> None:
        if not self.unwritten:
            self.done += 1

    def _start_message(self) -> bool:
        if self.link_end is not None:
            return False
        gather = exchange = None
        if self.gathers_first or not self.reductions:
            gather = self._next_gather()
            exchange = min(self.exchanges, key=lambda one: self._first_read(*one), default=None)
        # The exchange of a step is for the weights of the next one.
        if exchange is not None and (
            gather is None
            or self._first_read(exchange[0], exchange[1] + 1) < self._first_read(*gather)
        ):
            self.exchanges.remove(exchange)
            self.message = (_Message.EXCHANGE, *exchange)
            seconds = self.plan.exchange_seconds[exchange[0]]
        elif gather is not None:
            slot = self.plan.parameter_slots[gather[0]]
            self.arrived.discard(self.held.get(slot, gather))
            self.held[slot] = gather
            self.message = (_Message.GATHER, *gather)
            seconds = self.plan.gather_seconds[gather[0]]
        elif self.reductions:
            bucket, step = self.reductions.popleft()
            self.message = (_Message.REDUCTION, bucket, step)
            seconds = self.plan.reduce_seconds[bucket]
        else:
            return False
        self.link_end = self.time + seconds
        self.busy += seconds
        return True

    def _first_read(self, bucket: int, step: int) -> int:
        return self.first_read[bucket] + step * len(self.plan.passes)

    def _next_gather(self) -> tuple[int, int] | None:
        for position in range(self.ahead, len(self.needs)):
            index, bucket = self.needs[position]
            slot = self.plan.parameter_slots[bucket]
            wanted = (bucket, index // len(self.plan.passes))
            if self.held.get(slot) == wanted:
                self.ahead += position == self.ahead
            elif self.version[bucket] >= wanted[1] and self.before[position] < self.done:
                return wanted
            elif self.in_order or wanted[1] > max(self.version):
                return None
        return None

    def _end_message(self, message: _Message, bucket: int, step: int) -> None:
        if message is _Message.GATHER:
            self.arrived.add((bucket, step))
            return
        if message is _Message.EXCHANGE:
            self._update(bucket, step)
            return
        self.missing[bucket] = self._contributions()[bucket]
        del self.users[self.plan.gradient_slots[bucket]]
        self.reduced.append(bucket)
        last = len(self.reduced) == len(self.version)
        ready = [bucket]
        if self.plan.clip:
            ready = sorted(self.reduced) if last else []
        if last:
            self.reduced.clear()
        for one in ready:
            if self.plan.exchange_seconds[one]:
                self.exchanges.append((one, step))
            else:
                self._update(one, step)

    def _update(self, bucket: int, step: int) -> None:
        self.version[bucket] = step + 1
        self.updated += 1
        if self.updated == len(self.version):
            self.updated = 0
            self.step_ends.append(self.time)
        self._keep_whole()

    def _keep_whole(self) -> None:
        """What is not sharded is there as soon as it is updated."""
        for bucket, seconds in enumerate(self.plan.gather_seconds):
            if seconds == 0:
                wanted = (bucket, self.version[bucket])
                self.held[self.plan.parameter_slots[bucket]] = wanted
                self.arrived.add(wanted)


def step_seconds(plan: Plan, steps: int) -> float:
    """Mean time of so many steps, from the start of their first gather to the end of their last
    update."""
    return (
        min(_Chain(plan, steps, gathers_first=first).run()[-1] for first in (False, True)) / steps
    )


def link_seconds(plan: Plan, steps: int) -> float:
    """Mean time of a step for which the link is busy."""
    chain = _Chain(plan, steps, gathers_first=False)
    chain.run()
    return chain.busy / steps


def plan_of(config: Config, hosts: int, *, half_block: float, bits_per_second: float) -> Plan:
    """The step of a resolved configuration of one pipeline stage. ``half_block``: seconds of its
    forward pass."""
    layout = rank_bucket_plan(config, dp=hosts)
    narrow = 2 if config.training.bf16 else 4
    wide = 2 if config.parallel.grad_reduce_in_bf16 else 4
    per_byte = (hosts - 1) / hosts * 8 * FRAME_FACTOR / bits_per_second
    sharded = layout.shards > 1
    return Plan(
        passes=_passes(layout, config.model.num_hidden_layers, half_block),
        reduce_seconds=tuple(
            b.numel * wide * per_byte * (1 if sharded else 2) for b in layout.buckets
        ),
        gather_seconds=tuple(b.numel * narrow * per_byte * sharded for b in layout.buckets),
        exchange_seconds=_exchange_seconds(layout, 8 * FRAME_FACTOR / bits_per_second),
        parameter_slots=layout.parameter_slots,
        gradient_slots=layout.gradient_slots,
        clip=bool(config.optimizer.clip_grad),
    )


def _exchange_seconds(layout: BucketPlan, per_byte: float) -> tuple[float, ...]:
    """Zeros where nothing is Muon's."""
    muon = muon_plan(layout, tp=1)
    seconds = [0.0] * len(layout.buckets)
    for matrix in muon.matrices:
        elsewhere = sum(part.length for rank, part in muon.parts(matrix) if rank != matrix.owner)
        seconds[matrix.bucket] += 2 * elsewhere * ITEMSIZE * per_byte / layout.shards
    return tuple(seconds)


def _passes(layout: BucketPlan, blocks: int, half_block: float) -> tuple[Pass, ...]:
    """Embedding and head take no time; the embedding is not read again in backward."""
    parts: dict[int, list[int]] = {}
    for bucket in layout.buckets:
        for placed in bucket.placements:
            parts.setdefault(_part(placed.spec.name, blocks), []).append(bucket.index)
    last = 2 * blocks + 1
    order = [(part, tuple(sorted(set(parts[part])))) for part in range(last + 1)]
    times = [half_block if 0 < part < last else 0.0 for part in range(last + 1)]
    forward = [Pass(times[part], buckets) for part, buckets in order]
    backward = [
        Pass(2 * times[part], buckets if part else (), buckets) for part, buckets in reversed(order)
    ]
    return (*forward, *backward)


def _part(name: str, blocks: int) -> int:
    """Where a parameter is read, in the order of the forward pass: embedding, two halves of each
    block, head."""
    words = name.split(".")
    if "layers" not in words:
        return 0 if "embed_tokens" in words else 2 * blocks + 1
    layer = int(words[words.index("layers") + 1])
    what = words[words.index("layers") + 2]
    return 1 + 2 * layer + (what in ("post_attention_layernorm", "mlp"))
