"""The key/value cache of generation: keys and values of the positions that a model has read, so
that only new tokens are computed."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class KVCache:
    """A pair of tensors [slots, b, n_kv, d] for each attention layer. The slot of a token is its
    position in its own sequence, and keys are kept rotated."""

    def __init__(self) -> None:
        self._layers: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def extend(
        self, layer: nn.Module, key: Tensor, value: Tensor, slots: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """Write key and value [s, b, n_kv, d] into ``slots``, int64 [s, b], and return the first
        ``length`` slots of both, which is more than any of ``slots``.

        Slots never written are zero."""
        kept = self._layers.get(layer)
        if kept is None or kept[0].shape[0] < length:
            kept = self._layers[layer] = (
                _grown(kept and kept[0], key, length),
                _grown(kept and kept[1], value, length),
            )
        rows = torch.arange(slots.shape[1], device=slots.device)
        for whole, new in zip(kept, (key, value), strict=True):
            whole[slots, rows] = new
        return kept[0][:length], kept[1][:length]

    def keep(self, rows: Tensor) -> None:
        """Drop all sequences of the batch but those at ``rows``, int64."""
        self._layers = {
            layer: (key[:, rows], value[:, rows]) for layer, (key, value) in self._layers.items()
        }


def _grown(kept: Tensor | None, new: Tensor, length: int) -> Tensor:
    # At least doubled, so that a new token does not cost a copy of all others.
    slots = length if kept is None else max(length, 2 * kept.shape[0])
    whole = new.new_zeros(slots, *new.shape[1:])
    if kept is not None:
        whole[: kept.shape[0]] = kept
    return whole
