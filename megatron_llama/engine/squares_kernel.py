"""Sums of squares of a gradient's blocks, as a Triton kernel that reads at the speed of memory.

torch gives a row to one of its reductions, and a block of ALIGN elements is too short a row for it:
it read 11 GB of gradients of an H200 at a fifth of that speed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64
"""Blocks of one program."""


@triton.jit
def _squares(blocks, sums, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < count
    place = rows.to(tl.int64)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    values = tl.load(blocks + place, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(sums + rows, tl.sum(values * values, 1), mask=inside)


def squares(blocks: Tensor) -> Tensor:
    """Return the sum of squares of each row of ``blocks``, contiguous [n, a power of two], as fp32
    [n]."""
    count, columns = blocks.shape
    sums = torch.empty(count, dtype=torch.float32, device=blocks.device)
    if count:
        _squares[(-(-count // ROWS),)](blocks, sums, count, ROWS=ROWS, COLUMNS=columns)
    return sums
