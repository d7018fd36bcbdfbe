"""The columns of one shard under ZenFlow: how they are packed, updated and kept.

A flat shard holds rows, and parts of rows, of several matrices; a column of such a matrix is one
input channel. Some columns are *hot* (ZenFlow's important, or selected, columns) and live packed on
the device (``HotColumns``). The others are *cold* and live on the host (``ColdColumns``), where
their gradients accumulate until the next update. Columns have been updated different numbers of
times, so each has a bias correction of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.options import UpdateOptions
from megatron_llama.engine.plan.buckets import ALIGN, Segment, align_up
from megatron_llama.engine.rules.bias_correction import bias_corrections
from megatron_llama.engine.rules.update_rule import adamw_step

ROWS_OF = 1 << 16
"""Elements that are worked on at once where an operation takes two or three passes on the host:
they stay in the cache of a core."""
CACHED = 1 << 15
"""The same for AdamW, which takes more passes over more tensors: six times as many elements stay in
the cache of a core."""
AT_ONCE = 1 << 22
"""Elements that are worked on at once where an operation allocates temporary memory on the device,
which no plan counts."""
HOST = torch.device("cpu")
State = tuple[Tensor, Tensor, Tensor]
"""Weights, first and second moments, all of one shape."""


def in_rows(rows: int, columns: int) -> Iterator[slice]:
    """Yield slices of a matrix's rows, each of at most AT_ONCE elements (or one row)."""
    step = max(1, AT_ONCE // max(1, columns))
    return (slice(low, low + step) for low in range(0, rows, step))


# Packing


@dataclass(frozen=True)
class Block:
    """A rectangle of a matrix inside a shard: ``rows`` x ``cols`` elements of the shard from
    ``start``, which are the columns from ``col`` of matrix number ``matrix``."""

    matrix: int
    start: int
    rows: int
    col: int
    cols: int

    def view(self, shard: Tensor) -> Tensor:
        """Return its place in a shard, [rows, cols]."""
        return shard[self.start : self.start + self.rows * self.cols].view(self.rows, self.cols)

    def row_views(self, shard: Tensor) -> Iterator[Tensor]:
        """Yield its place in a shard, some rows at a time."""
        view = self.view(shard)
        return (view[rows] for rows in in_rows(self.rows, self.cols))

    def of(self, columns: Tensor) -> Tensor:
        """Return the part of a vector over the matrix's columns that belongs to it, [cols]."""
        return columns[self.col : self.col + self.cols]


def blocks_of(segment: Segment, matrix: int) -> Iterator[Block]:
    """Cut a segment into at most three blocks: the tail of a row, whole rows, the head of a row.
    ``matrix`` is the number that they carry."""
    return (Block(matrix, *place) for place in segment.blocks())


@dataclass(frozen=True)
class PackedBlock:
    """Some columns of one block, and their place in the packed vector."""

    block: Block
    columns: Tensor
    """Numbers of these columns within the block, int64 [c], increasing."""
    start: int
    every: bool
    """Whether these are all columns of the block."""

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, c]."""
        return self.block.rows, self.columns.numel()

    def place(self, packed: Tensor) -> Tensor:
        """Return its elements in a packed vector, [rows, c]."""
        rows, columns = self.shape
        return packed[self.start : self.start + rows * columns].view(rows, columns)

    def view(self, shard: Tensor) -> Tensor:
        """Return the place of the whole block in a shard."""
        return self.block.view(shard)

    def values(self, by_matrix: Sequence[Tensor]) -> Tensor:
        """Return the values of these columns from a vector over the columns of each matrix,
        [c]."""
        return self.block.of(by_matrix[self.block.matrix])[self.columns]


class Packing:
    """Some columns of the matrices in one shard as one vector: block after block, row by row."""

    def __init__(
        self, blocks: Iterable[Block], masks: Sequence[Tensor], device: torch.device
    ) -> None:
        """``masks`` says for each matrix which columns are packed: bool over its columns, on the
        host."""
        self.blocks: list[PackedBlock] = []
        self.numel = 0
        """Packed elements."""
        for block in blocks:
            columns = block.of(masks[block.matrix]).nonzero().flatten()
            if columns.numel():
                every = columns.numel() == block.cols
                self.blocks.append(PackedBlock(block, columns.to(device), self.numel, every))
                self.numel += block.rows * columns.numel()

    @property
    def padded(self) -> int:
        """The size of a vector for it in which no element is in the tail that fused kernels round
        differently."""
        return align_up(self.numel, ALIGN)

    def values(self, by_matrix: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the values of the packed columns, [c] for each block, from a vector over the
        columns of each matrix."""
        return tuple(block.values(by_matrix) for block in self.blocks)

    def pack(self, shard: Tensor, packed: Tensor) -> None:
        """Copy the columns out of a shard, into the dtype of ``packed``."""
        for block in self.blocks:
            place = block.place(packed)
            view = block.view(shard)
            if block.every:
                place.copy_(view)
                continue
            for rows in in_rows(*block.shape):
                place[rows].copy_(view[rows].index_select(1, block.columns))

    def unpack(self, packed: Tensor, shard: Tensor) -> None:
        """Copy the columns back, into the dtype of ``shard``. Everything else stays."""
        for block in self.blocks:
            place = block.place(packed)
            view = block.view(shard)
            if block.every:
                view.copy_(place)
                continue
            for rows in in_rows(*block.shape):
                view[rows].index_copy_(1, block.columns, place[rows].to(shard.dtype))


@dataclass(frozen=True)
class ColumnSet:
    """The hot columns of one shard, or its cold ones."""

    on_device: Packing
    """With its indices on the device."""
    on_host: Packing
    """The same with its indices on the host."""
    counts: tuple[Tensor, ...]
    """For each block of the packing, how often its columns had been updated when they were
    selected, [c] on the host."""
    common_count: int | None
    """The number of updates of all of them, if they have one in common."""

    @staticmethod
    def of(
        blocks: Sequence[Block],
        masks: Sequence[Tensor],
        counts: Sequence[Tensor],
        device: torch.device,
    ) -> ColumnSet:
        """``masks`` and ``counts`` have for each matrix a vector over its columns, on the host."""
        on_host = Packing(blocks, masks, HOST)
        on_device = on_host if devices.is_host(device) else Packing(blocks, masks, device)
        own_counts = on_host.values(counts)
        distinct = {int(count) for own in own_counts for count in torch.unique(own).tolist()}
        common_count = distinct.pop() if len(distinct) == 1 else None
        return ColumnSet(on_device, on_host, own_counts, common_count)


# AdamW over columns


def adamw_equal_counts(
    state: State,
    grad: Tensor,
    steps: Tensor,
    options: UpdateOptions,
    *,
    scale: Tensor,
    skip: Tensor | None,
    lr: float,
    decay: float,
) -> None:
    """AdamW in place with ``grad / scale``, where all elements have been updated ``steps`` times
    (0-dim fp32; counted up unless skipped)."""
    moments = {"exp_avg": state[1], "exp_avg_sq": state[2], "step": steps}
    adamw_step(state[0], grad, moments, options, decay=decay, scale=scale, skip=skip, lr=lr)


def adamw_columns(
    state: State,
    grad: Tensor,
    corrections: tuple[Tensor, Tensor],
    options: UpdateOptions,
    *,
    lr: float,
    decay: float,
) -> State:
    """AdamW over [rows, c] with bias corrections for each column [c]. Returns the new values as new
    tensors."""
    weight, first, second = state
    first = first.lerp(grad, 1.0 - options.adam_beta1)
    second = (second * options.adam_beta2).addcmul_(grad, grad, value=1.0 - options.adam_beta2)
    root = second.sqrt().div_(corrections[1]).add_(options.adam_eps)
    return (
        (weight * (1.0 - lr * decay)).addcdiv_(first / corrections[0], root, value=-lr),
        first,
        second,
    )


def adamw_columns_(
    state: State,
    grad: Tensor,
    corrections: tuple[Tensor, Tensor],
    options: UpdateOptions,
    *,
    lr: float,
    decay: float,
) -> None:
    """The same in place and with the same bits, some rows at a time, so that intermediate results
    stay in the cache, as they would in one fused kernel."""
    rows = max(1, CACHED // grad.shape[1])
    root_buffer = torch.empty_like(grad[:rows])
    step_buffer = torch.empty_like(grad[:rows])
    for low in range(0, grad.shape[0], rows):
        chunk = slice(low, low + rows)
        weight = state[0][chunk]
        first = state[1][chunk]
        second = state[2][chunk]
        new = grad[chunk]
        root = root_buffer[: len(new)]
        step = step_buffer[: len(new)]
        first.lerp_(new, 1.0 - options.adam_beta1)
        second.mul_(options.adam_beta2).addcmul_(new, new, value=1.0 - options.adam_beta2)
        torch.sqrt(second, out=root).div_(corrections[1]).add_(options.adam_eps)
        weight.mul_(1.0 - lr * decay).addcdiv_(
            torch.div(first, corrections[0], out=step), root, value=-lr
        )


# The two kinds of columns


class HotColumns:
    """Weights and moments of the hot columns of one shard: packed on the device, in fp32 whatever
    the model computes in, and updated at every step."""

    def __init__(
        self,
        columns: ColumnSet,
        *,
        decay: float,
        options: UpdateOptions,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.columns = columns
        self._options = options
        self._decay = decay
        size = columns.on_device.padded
        self.state: State = (
            torch.zeros(size, dtype=dtype, device=device),
            torch.zeros(size, dtype=dtype, device=device),
            torch.zeros(size, dtype=dtype, device=device),
        )
        self.steps = torch.zeros((), dtype=torch.float32, device=device)
        """Updates since the columns were selected: on the device, because only the device knows
        which steps were skipped."""
        self._counts = [count.to(device) for count in columns.counts]

    def step(
        self,
        grad: Tensor,
        param_shard: Tensor,
        buffer: Tensor,
        *,
        scale: Tensor,
        skip: Tensor,
        lr: float,
    ) -> None:
        """Update the columns with their part of the gradient shard, and write them into
        ``param_shard`` in the compute dtype. ``buffer`` takes the packed gradient, in the dtype of
        the state."""
        packing = self.columns.on_device
        self.steps += 1.0 - skip
        if packing.numel == 0:
            return
        packed = buffer[: packing.padded]
        # The padding is updated too. With zero gradients its weights and moments stay zero.
        packed[packing.numel :].zero_()
        packing.pack(grad, packed)
        if self.columns.common_count is not None:
            # The kernel adds one to the count unless it skips, so the count is that of before.
            adamw_equal_counts(
                self.state,
                packed,
                self.steps + self.columns.common_count - (1.0 - skip),
                self._options,
                scale=scale,
                skip=skip,
                lr=lr,
                decay=self._decay,
            )
        else:
            self._step_columns(packed.div_(scale), skip, lr)
        packing.unpack(self.state[0], param_shard)

    def _step_columns(self, grad: Tensor, skip: Tensor, lr: float) -> None:
        """Update with a bias correction for each column. The host does not know whether the step is
        skipped: the update is computed, and ``torch.where`` drops it."""
        for block, before in zip(self.columns.on_device.blocks, self._counts, strict=True):
            corrections = bias_corrections(before + self.steps, self._options, grad.dtype)
            places = [block.place(packed) for packed in (*self.state, grad)]
            for rows in in_rows(*block.shape):
                *old, new_grad = (place[rows] for place in places)
                new = adamw_columns(
                    (old[0], old[1], old[2]),
                    new_grad,
                    corrections,
                    self._options,
                    lr=lr,
                    decay=self._decay,
                )
                for tensor, values in zip(old, new, strict=True):
                    tensor.copy_(torch.where(skip > 0, tensor, values))

    def load(self, host_state: State) -> None:
        """Take the columns' state from that of the whole shard on the host."""
        packing = self.columns.on_host
        for packed, whole in zip(self.state, host_state, strict=True):
            buffer = torch.zeros(packing.padded, dtype=packed.dtype)
            packing.pack(whole, buffer)
            packed.copy_(buffer)

    def store(self, host_state: State) -> None:
        """Write the columns' state into that of the whole shard on the host."""
        for packed, whole in zip(self.state, host_state, strict=True):
            self.columns.on_host.unpack(packed.cpu(), whole)


@dataclass
class AccumulatedGradient:
    """The cold gradients of one update interval."""

    total: Tensor
    """Sum of the clipped gradients, packed, in the dtype of the master."""
    steps: int = 0
    """Gradients in the sum: those of skipped steps are left out."""
    since: int | None = None
    """Steps that were done before the first of its gradients; None: it has none."""

    def add(self, grads: Tensor, scale: Tensor, *, skip: bool) -> None:
        """Add the packed gradient of one step, divided by ``scale`` (0-dim on the host)."""
        if skip:
            return
        self.steps += 1
        for low in range(0, grads.numel(), ROWS_OF):
            grad = grads[low : low + ROWS_OF]
            place = self.total[low : low + grad.numel()]
            converted = grad.to(place.dtype)
            # The first gradient overwrites, so that nothing has to be zeroed.
            if self.steps == 1:
                torch.div(converted, scale, out=place)
            else:
                place.add_(converted / scale)


@dataclass(frozen=True)
class MinorityColumns:
    """Cold columns that have been updated more or less often than most."""

    majority_count: int
    """How often most cold elements had been updated when the columns were selected."""
    packing: Packing
    """The other columns."""
    counts: tuple[Tensor, ...]
    """For each block of the packing, how often its columns had been updated, [c]."""

    @staticmethod
    def of(
        blocks: Sequence[Block], masks: Sequence[Tensor], counts: Sequence[Tensor]
    ) -> MinorityColumns:
        """``masks`` and ``counts`` have for each matrix a vector over its columns, on the host."""
        elements = Counter[int]()
        for block in blocks:
            here = block.of(counts[block.matrix])[block.of(masks[block.matrix])]
            values, columns = torch.unique(here, return_counts=True)
            for count, number in zip(values.tolist(), columns.tolist(), strict=True):
                elements[int(count)] += number * block.rows
        # The larger of two counts with as many elements, so that the choice is the same on every
        # rank and in every run.
        majority = max(elements, key=lambda count: (elements[count], count), default=0)
        others = [mask & (count != majority) for mask, count in zip(masks, counts, strict=True)]
        packing = Packing(blocks, others, HOST)
        return MinorityColumns(majority, packing, packing.values(counts))


class ColdColumns:
    """Weights and moments of one shard on the host, and the accumulated gradients of its cold
    columns.

    Only cold columns cross the bus: their gradients at every step, packed, in the dtype of the
    wire, and their weights once an update interval, in the compute dtype. The state on the host is
    that of the whole shard, so that one fused call serves it. An update also writes into the places
    of hot columns there, which does not matter: they are written back from the device before they
    are read."""

    def __init__(
        self, state: State, totals: Sequence[Tensor], *, decay: float, options: UpdateOptions
    ) -> None:
        """``state`` has three tensors [n]; ``totals`` has one tensor [n] for each interval that may
        be pending, 1 or 2."""
        self.state = state
        self.accumulated = [AccumulatedGradient(total) for total in totals]
        self.updates = 0
        """Updates of the cold columns since they were selected."""
        self._options = options
        self._decay = decay
        self._minority = MinorityColumns(0, Packing((), (), HOST), ())

    def select(
        self, blocks: Sequence[Block], masks: Sequence[Tensor], counts: Sequence[Tensor]
    ) -> None:
        """Take other columns: ``masks`` says which are cold, ``counts`` how often they have been
        updated."""
        self._minority = MinorityColumns.of(blocks, masks, counts)
        self.updates = 0

    def update(self, number: int, packing: Packing, buffer: Tensor, lr: float) -> None:
        """Update the cold columns with the mean of accumulated gradient ``number``, which is empty
        then. ``packing`` is theirs; ``buffer`` [n] takes the gradient of the whole shard."""
        accumulated = self.accumulated[number]
        steps = accumulated.steps
        accumulated.steps = 0
        self.updates += steps > 0
        if steps == 0 or packing.numel == 0:
            return
        grad = buffer[: self.state[0].numel()].zero_()
        packing.unpack(accumulated.total, grad)
        # One fused call on the whole shard counts for the majority. The state of the others is
        # computed before it and written over its result.
        minority = self._update_minority(grad, steps, lr)
        adamw_equal_counts(
            self.state,
            grad,
            torch.tensor(float(self._minority.majority_count + self.updates - 1)),
            self._options,
            scale=torch.tensor(float(steps)),
            skip=None,
            lr=lr,
            decay=self._decay,
        )
        for whole, packed in zip(self.state, minority, strict=True):
            self._minority.packing.unpack(packed, whole)

    def _update_minority(self, grad: Tensor, steps: int, lr: float) -> list[Tensor]:
        """Return the new state of the minority columns, packed."""
        packing = self._minority.packing
        *state, mean = (tensor.new_empty(packing.numel) for tensor in (*self.state, grad))
        for whole, packed in zip((*self.state, grad), (*state, mean), strict=True):
            packing.pack(whole, packed)
        mean.div_(steps)
        for block, counts in zip(packing.blocks, self._minority.counts, strict=True):
            places = tuple(block.place(packed) for packed in state)
            adamw_columns_(
                (places[0], places[1], places[2]),
                block.place(mean),
                bias_corrections(counts + self.updates, self._options, grad.dtype),
                self._options,
                lr=lr,
                decay=self._decay,
            )
        return state
