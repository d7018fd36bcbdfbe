"""Initial weights that do not depend on the parallel layout, drawn for each block of rows of each
HuggingFace tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_llama.config.schema import Config
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.model.plan.lora import LORA_B, is_adapter
from megatron_llama.model.plan.param_groups import initial_std
from megatron_llama.model.plan.params import EMBEDDING, SCORE, VOCABULARY_TENSORS, padding_idx

BLOCK_ELEMENTS = 2**20
"""Elements of a block. A rank draws whole blocks and keeps its part, so it wastes at most two
blocks per rectangle, and has one at a time in memory."""


class InitialWeights:
    """A source of HuggingFace rectangles: normal(0, std) matrices, biases of zeros, and norms that
    multiply by one. Low-rank additions start at zero: A is uniform within +- 1 / sqrt(inputs), as
    in PEFT, and B is zero. The embedding's row of the padding token is zero, as in transformers.

    Values are a pure function of (seed, tensor name, position), drawn in fp32 on the CPU. Another
    ``device`` draws other values, much faster.
    """

    def __init__(
        self,
        seed: int,
        std: float,
        device: torch.device | None = None,
        *,
        norm_weight: float = 1.0,
        groups: Sequence[str] = (),
        padding_idx: int | None = None,
    ) -> None:
        """``norm_weight`` lets a norm multiply by one: 0 with ``apply_layernorm_1p``. ``groups``:
        values of --param-group, which may give matrices another ``std``. ``padding_idx``: the
        embedding's row of the padding token, if lookups do not train it."""
        self.seed = seed
        self.std = std
        self.norm_weight = norm_weight
        self._groups = tuple(groups)
        self._padding_idx = padding_idx
        self._device = device or torch.device("cpu")

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """Write the rectangle's values into ``out``, a tensor of its size."""
        if len(rectangle.shape) == 1:
            out.fill_(0.0 if rectangle.name.endswith(".bias") else self.norm_weight)
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
        padding = self._padding_idx
        if rectangle.name == EMBEDDING and padding is not None and first <= padding < first + rows:
            out[padding - first].zero_()

    @staticmethod
    def of(config: Config, device: torch.device | None = None) -> InitialWeights:
        """Return the weights with which a run of this configuration starts."""
        model = config.model
        return InitialWeights(
            config.training.seed,
            model.initializer_range,
            device,
            norm_weight=0.0 if model.apply_layernorm_1p else 1.0,
            groups=config.optimizer.param_group,
            padding_idx=padding_idx(config),
        )

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
        std = initial_std(self._groups, rectangle.name)
        return values.normal_(0.0, self.std if std is None else std, generator=generator)


class WithAdapters:
    """Another source, with low-rank additions that are initialized as in ``InitialWeights``."""

    def __init__(self, source: Callable[[Rectangle, Tensor], None], seed: int) -> None:
        self._source = source
        self._initial = InitialWeights(seed, 0.0)

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """Write the rectangle's values into ``out``, a tensor of its size."""
        (self._initial if is_adapter(rectangle.name) else self._source)(rectangle, out)


class WithScore:
    """A source of a language model, with a score that is drawn as in ``InitialWeights``."""

    def __init__(self, source: Callable[[Rectangle, Tensor], None], seed: int, std: float) -> None:
        self._source = source
        self._initial = InitialWeights(seed, std)

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """Write the rectangle's values into ``out``, a tensor of its size."""
        (self._initial if rectangle.name == SCORE else self._source)(rectangle, out)


class ResizedEmbeddings:
    """A source of a model with fewer token ids, with more rows of embedding and head: each is the
    mean of the source's rows.

    A new token then begins as likely as the average one, and the values depend on nothing but the
    weights, whereas transformers draws the rows around that mean."""

    def __init__(self, source: Callable[[Rectangle, Tensor], None], rows: int) -> None:
        """``rows``: the number of token ids of the source."""
        self._source = source
        self._rows = rows
        self._means: dict[str, Tensor] = {}

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """Write the rectangle's values into ``out``, a tensor of its size."""
        if rectangle.name not in VOCABULARY_TENSORS:
            self._source(rectangle, out)
            return
        first, column = rectangle.offset
        count, columns = rectangle.size
        width = rectangle.shape[1]
        old = min(max(self._rows - first, 0), count)
        if old:
            known = replace(rectangle, shape=(self._rows, width), size=(old, columns))
            self._source(known, out[:old])
        if old < count:
            out[old:] = self._mean(rectangle.name, width)[column : column + columns]

    def _mean(self, name: str, width: int) -> Tensor:
        """Return the mean row [width]. It is summed row by row, so that every rank finds the same
        bits."""
        if name not in self._means:
            total = np.zeros(width)
            block = torch.empty(max(1, BLOCK_ELEMENTS // width), width, dtype=torch.float32)
            for first in range(0, self._rows, len(block)):
                rows = block[: self._rows - first]
                shape = (self._rows, width)
                self._source(Rectangle(name, shape, (first, 0), (len(rows), width), 0), rows)
                total += rows.numpy().sum(axis=0, dtype=np.float64)
            self._means[name] = torch.from_numpy(total / self._rows)
        return self._means[name]
