"""Initial weights that do not depend on the parallel layout: they are drawn for each block of rows
of each HuggingFace tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_llama.plans.params import LORA_B, Rectangle, is_adapter

BLOCK_ELEMENTS = 2**20
"""Elements of a block. A rank draws whole blocks and keeps its part, so it wastes at most two
blocks per rectangle, and has one at a time in memory."""


class InitialWeights:
    """A source of HuggingFace rectangles: normal(0, std) matrices, and vectors of ones. Low-rank
    additions start at zero: A is uniform within +- 1 / sqrt(inputs), as in PEFT, and B is zero.

    Values are a pure function of (seed, tensor name, position), drawn in fp32 on the CPU. On
    another ``device`` they are other values, drawn much faster.
    """

    def __init__(self, seed: int, std: float, device: torch.device | None = None) -> None:
        self.seed = seed
        self.std = std
        self._device = device or torch.device("cpu")

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """Write the rectangle's values into ``out``, a tensor of its size."""
        if len(rectangle.shape) == 1:
            out.fill_(1.0)
            return
        if f".{LORA_B}." in rectangle.name:
            out.zero_()
            return
        first, column = rectangle.offset
        rows, columns = rectangle.size
        per_block = max(1, BLOCK_ELEMENTS // rectangle.shape[1])
        for block in range(first // per_block, (first + rows - 1) // per_block + 1):
            start = max(first, block * per_block)
            stop = min(first + rows, (block + 1) * per_block)
            values = self._block(rectangle, block, per_block)[
                start - block * per_block : stop - block * per_block
            ]
            out[start - first : stop - first].copy_(values[:, column : column + columns])

    def _block(self, rectangle: Rectangle, block: int, per_block: int) -> Tensor:
        rows, columns = rectangle.shape
        digest = hashlib.blake2b(
            f"{self.seed}/{rectangle.name}/{block}".encode(), digest_size=8
        ).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest, "little") >> 1)
        values = torch.empty(
            min(per_block, rows - block * per_block),
            columns,
            dtype=torch.float32,
            device=self._device,
        )
        if is_adapter(rectangle.name):
            return values.uniform_(-(columns**-0.5), columns**-0.5, generator=generator)
        return values.normal_(0.0, self.std, generator=generator)


class WithAdapters:
    """Another source, with low-rank additions that are initialized as ``InitialWeights`` does."""

    def __init__(self, source: Callable[[Rectangle, Tensor], None], seed: int) -> None:
        self._source = source
        self._initial = InitialWeights(seed, 0.0)

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """Write the rectangle's values into ``out``, a tensor of its size."""
        (self._initial if is_adapter(rectangle.name) else self._source)(rectangle, out)
