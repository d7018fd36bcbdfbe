"""AdamW's moments between two updates: in fp32, in bf16, or in 8 bits.

An update computes in the master's dtype, from the kept moments, and keeps its results in fewer
bits. In 8 bits that is the block-wise dynamic quantization of Dettmers et al., "8-bit Optimizers
via Block-wise Quantization" (2022), section 2: a byte for each element says which of 256 numbers
between -1 and 1 it is, times the largest absolute value of its block. Three things are different
here:

    blocks      have ALIGN elements of one row, which no shard and no tensor-parallel rank cuts. So
                every layout keeps the same numbers.
    table       has -1 in the place of the negative number nearest to 0. The paper's has 1 alone,
                and the largest element of a block would shrink at every update if it is negative.
    rounding    is to one of the two nearest numbers of the table, in turn, so that on average over
                the steps nothing is lost. Rounded to the nearest, a second moment from which a step
                takes 5 % (or 0.1 %) would never fall where numbers lie further apart than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_llama.engine.options import BF16, EIGHT_BIT, FP32
from megatron_llama.engine.plan.buckets import ALIGN

DTYPES: Mapping[str, torch.dtype | None] = MappingProxyType(
    {FP32: None, BF16: torch.bfloat16, EIGHT_BIT: None}
)
"""The dtypes of ``PlainMoment`` by --exp-avg-dtype and --exp-avg-sq-dtype. None: that of the
master, which is wider with --fp64."""
DECADES = 7
"""Powers of ten that a table spans."""
OF_STEPS = (5**0.5 - 1) / 2
OF_ELEMENTS = 2**0.5
"""Multiples of such a number, modulo 1, fill the unit interval evenly, however many there are."""


class Moment(Protocol):
    """A moment of one shard, in its kept form."""

    @property
    def kept(self) -> Tensor | InBytes:
        """The kept tensors, for a kernel."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The kept tensors, live: [n], and [n / ALIGN] for numbers of blocks; by the names that
        follow the moment's."""

    def read(self, piece: slice) -> Tensor:
        """Return some elements in the master's dtype: the kept tensor itself, or a copy. ``piece``
        begins and ends at multiples of ALIGN."""

    def keep(self, piece: slice, values: Tensor, *, step: Tensor, skip: Tensor) -> None:
        """Keep the result of an update of the values that ``read`` returned. ``step`` counts
        updates, this one included; where ``skip`` is 1 nothing changes. Both are 0-dim."""


class PlainMoment:
    """A moment in fp32 or bf16."""

    def __init__(self, master: Tensor, dtype: torch.dtype | None) -> None:
        """Make zeros for a master [n]; None: in its dtype."""
        self._dtype = master.dtype
        self.kept = torch.zeros_like(master, dtype=dtype)
        self.tensors = {"": self.kept}

    def read(self, piece: slice) -> Tensor:
        return self.kept[piece].to(self._dtype)

    def keep(self, piece: slice, values: Tensor, *, step: Tensor, skip: Tensor) -> None:
        kept = self.kept[piece]
        # A moment that is not narrower has been updated in place. A skipped update changes no
        # value, and a value that was in bf16 is rounded to itself.
        if kept.dtype != values.dtype:
            kept.copy_(values)


@dataclass(frozen=True)
class Table:
    """The 256 numbers of a kind of moments, on a device."""

    numbers: Tensor
    """fp32 [256], ascending."""
    first: Tensor
    """uint8 [65536]: by the first 16 bits of any fp32, the place of the largest number that is not
    above any value with these bits."""

    @staticmethod
    def on(device: torch.device, *, signed: bool) -> Table:
        """Make the table on a device."""
        numbers = torch.tensor(table(signed=signed), dtype=torch.float32)
        bits = torch.arange(1 << 16, dtype=torch.int32) << 16
        # The least value with these bits: if negative, the one whose other bits are set.
        least = torch.where(bits < 0, bits | 0xFFFF, bits).view(torch.float32).nan_to_num()
        first = torch.bucketize(least, numbers, right=True).sub_(1).clamp_(0, len(numbers) - 2)
        return Table(numbers.to(device), first.to(torch.uint8).to(device))

    def below(self, values: Tensor) -> Tensor:
        """Return, for each value between -1 and 1, the place of the largest number that is not
        above it, at most the last but one: int32 [n].

        A binary search (``torch.bucketize``) takes 48 ns for an element on a CPU, this function 4:
        no two numbers have the same first 16 bits, so only two places are possible."""
        place = self.first.index_select(0, (values.view(torch.int32) >> 16) & 0xFFFF).int()
        place += self.at(place + 1) <= values
        return place.clamp_(max=len(self.numbers) - 2)

    def at(self, places: Tensor) -> Tensor:
        """Return the numbers at places of the table, fp32 [n]."""
        return self.numbers.index_select(0, places)


@dataclass(frozen=True)
class Tables:
    """The tables that all moments in 8 bits on a device share."""

    signed: Table
    unsigned: Table
    offsets: Tensor
    """fp64 [ALIGN]: the start of each element's sequence of thresholds."""

    @staticmethod
    def on(device: torch.device) -> Tables:
        """Make the tables on a device."""
        offsets = torch.arange(ALIGN, dtype=torch.float64, device=device).mul_(OF_ELEMENTS)
        return Tables(Table.on(device, signed=True), Table.on(device, signed=False), offsets)

    def thresholds(self, step: Tensor) -> Tensor:
        """Return the share of the way to the next number from which on the elements of a block are
        rounded up, fp32 [ALIGN]. ``step``: see ``Moment.keep``.

        Each element has another share at every step, and over the steps all between 0 and 1 equally
        often. A value on a number of the table, up to rounding, stays there."""
        share = (step.double() * OF_STEPS + self.offsets).frac_().clamp_(1e-3, 1 - 1e-3)
        return share.to(torch.float32)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the tables."""
        tables = (self.signed, self.unsigned)
        return (self.offsets, *(t for table in tables for t in (table.numbers, table.first)))


def table(*, signed: bool) -> list[float]:
    """Return the 256 numbers of the paper's dynamic type, ascending: 0, and in each power of ten
    below 1 twice as many, evenly spaced, as in the one below it."""
    numbers = [0.0, 1.0]
    for decade in range(DECADES):
        count = 2 ** (decade if signed else decade + 1)
        top = 10.0 ** (decade + 1 - DECADES)
        for index in range(count):
            number = top * (0.1 + 0.9 * (index + 0.5) / count)
            numbers += [number, -number] if signed else [number]
    numbers.sort()
    if signed:
        numbers.remove(max(number for number in numbers if number < 0))
        numbers.insert(0, -1.0)
    return numbers


class InBytes(NamedTuple):
    """The kept tensors of a moment in 8 bits."""

    codes: Tensor
    """uint8 [n]."""
    scales: Tensor
    """fp32 [n / ALIGN]."""


class EightBitMoment:
    """A moment in 8 bits and a scale for each block, 1.0625 bytes for each element."""

    def __init__(self, master: Tensor, tables: Tables, *, signed: bool) -> None:
        """Make zeros for a master [n] in fp32. A moment that is not ``signed`` has no negative
        values, and a positive one stays positive: the weight is divided by its root."""
        self._tables = tables
        self._table = tables.signed if signed else tables.unsigned
        self._signed = signed
        self.kept = InBytes(
            torch.zeros_like(master, dtype=torch.uint8),
            torch.zeros(master.numel() // ALIGN, device=master.device),
        )
        self.tensors = {"_codes": self.kept.codes, "_scales": self.kept.scales}

    def read(self, piece: slice) -> Tensor:
        numbers = self._table.at(self.kept.codes[piece].int())
        return numbers.view(-1, ALIGN).mul_(self._scales_of(piece)).view(-1)

    def _scales_of(self, piece: slice) -> Tensor:
        """Return the scales [blocks, 1], live."""
        return self.kept.scales[piece.start // ALIGN : piece.stop // ALIGN].unsqueeze(-1)

    def keep(self, piece: slice, values: Tensor, *, step: Tensor, skip: Tensor) -> None:
        blocks = values.view(-1, ALIGN)
        scales = blocks.abs().amax(-1, keepdim=True)
        # A block of zeros has any scale.
        shares = (blocks / scales.clamp(min=torch.finfo(scales.dtype).tiny)).view(-1)
        codes = self._table.below(shares)
        low = self._table.at(codes)
        # The share of the way to the next number that each value has gone.
        way = shares.sub_(low).div_(self._table.at(codes + 1).sub_(low)).view(-1, ALIGN)
        codes += (way > self._tables.thresholds(step)).view(-1)
        if not self._signed:
            codes.clamp_(min=1).mul_(values > 0)
        skipped = skip.bool()
        kept = self.kept.codes[piece]
        kept.copy_(torch.where(skipped, kept, codes.to(torch.uint8)))
        of_blocks = self._scales_of(piece)
        of_blocks.copy_(torch.where(skipped, of_blocks, scales))


def open_moment(
    master: Tensor, kept: str, tables: Tables | None, *, signed: bool
) -> PlainMoment | EightBitMoment:
    """Return a moment of zeros for a master [n], in the form of an option. ``tables``: None if the
    shard keeps its moments in fp32 instead of 8 bits."""
    if kept == EIGHT_BIT and tables is not None:
        return EightBitMoment(master, tables, signed=signed)
    return PlainMoment(master, DTYPES[kept])
