"""The positions of a microbatch for attention: rotary tables, and which positions are one
document."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_llama.config.schema import ModelConfig
from megatron_llama.engine.mesh import Axis
from megatron_llama.model.continuation import Continuation
from megatron_llama.model.nn.context import local_sequence
from megatron_llama.model.nn.documents import Documents, SplitDocuments
from megatron_llama.model.nn.rotary import Rotary

if TYPE_CHECKING:
    from megatron_llama.model.nn.chunked import Chunks


@dataclass(frozen=True)
class Positions:
    """The positions of a microbatch, as attention needs them.

    ``cos`` and ``sin`` [s, 1 or b, 1, r / 2] are those of this rank's positions, r the dims of a
    head that rotate; sliding layers use the ``sliding_`` ones if there are any. Documents are
    ``SplitDocuments`` with context parallelism. With a continuation the mask is bool [b, 1, s,
    length], and None when nothing was read before; it has no window."""

    cos: Tensor
    sin: Tensor
    mask: Tensor | None = None
    documents: Documents | SplitDocuments | None = None
    continuation: Continuation | None = None
    sliding_cos: Tensor | None = None
    sliding_sin: Tensor | None = None
    chunks: Chunks | None = None
    """Of a model with chunks."""


class Rotaries:
    """The rotary frequencies of a model's layers."""

    def __init__(self, config: ModelConfig, cp: Axis) -> None:
        self.plain = Rotary.of(config)
        self._sliding = Rotary.of_sliding_layers(config)
        self._cp = cp
        self._model = config

    def positions(
        self, length: int, device: torch.device, position_ids: Tensor | None, lengths: Tensor | None
    ) -> Positions:
        """Make the tables for a whole sequence of ``length`` positions from 0, or for given ids
        [s, b]; with context parallelism those of this rank's part only.

        ``lengths``, int64 [b], are those of the whole sequences, on which some rotary scalings
        depend; by default each sequence ends behind the largest of its ids."""
        ids = position_ids
        if ids is None:
            ids = torch.arange(length, device=device).unsqueeze(-1)
        if self.plain.depends_on_length and lengths is None:
            lengths = ids.amax(0) + 1
        own_ids = local_sequence(ids, self._cp)
        cos, sin = self.plain.table(own_ids, lengths)
        positions = Positions(cos, sin)
        if self._model.attention_chunk_size:
            from megatron_llama.model.nn.chunked import Chunks  # which few models have

            chunks = Chunks(self._model, own_ids, restarts=position_ids is not None)
            return replace(positions, chunks=chunks)
        if self._sliding is None:
            return positions
        sliding_cos, sliding_sin = self._sliding.table(own_ids)
        return replace(positions, sliding_cos=sliding_cos, sliding_sin=sliding_sin)
