"""The key/value cache of generation: keys and values of the positions that a model has read, so
that only new tokens are computed."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class KVCache:
    """A pair of tensors [slots, b, n_kv, d] for each attention layer; keys are kept rotated.

    The slot of a token is its position in its own sequence. A layer with a window keeps no more
    than what the next token may see: the last slot is that of each sequence's last token, and
    shorter sequences begin with empty slots."""

    def __init__(self) -> None:
        self._layers: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._windows: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """The memory of all keys and values."""
        pairs = (*self._layers.values(), *self._windows.values())
        return sum(tensor.nbytes for pair in pairs for tensor in pair)

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

    def slide(
        self, layer: nn.Module, key: Tensor, value: Tensor, window: int, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the kept keys and values with the new ones, ``key`` and ``value`` [s, b, n_kv, d],
        behind them, and keep the last ``window - 1`` of each sequence.

        ``counts``, int64 [b], are the new tokens of each sequence; the rest is padding."""
        kept = self._windows.get(layer)
        if kept is not None:
            key, value = (torch.cat(pair) for pair in zip(kept, (key, value), strict=True))
        before = 0 if kept is None else len(kept[0])
        slots = min(window - 1, len(key))
        # A sequence that has not filled the slots yet keeps meaningless values in the first ones,
        # which are empty.
        places = torch.arange(slots, device=counts.device).unsqueeze(-1)
        places = (before + counts - slots + places).clamp_(min=0)
        rows = torch.arange(key.shape[1], device=counts.device)
        self._windows[layer] = (key[places, rows], value[places, rows])
        return key, value

    def keep(self, rows: Tensor) -> None:
        """Drop all sequences of the batch but those at ``rows``, int64."""
        for layers in (self._layers, self._windows):
            for layer, (key, value) in layers.items():
                layers[layer] = (key[:, rows], value[:, rows])

    def drop_last(self, tokens: int) -> None:
        """Forget the last tokens of a batch of one sequence, of which windows have forgotten none
        so far."""
        for layer, (key, value) in self._windows.items():
            self._windows[layer] = (key[: len(key) - tokens], value[: len(value) - tokens])


def _grown(kept: Tensor | None, new: Tensor, length: int) -> Tensor:
    # At least doubled, so that a new token does not cost a copy of all others.
    slots = length if kept is None else max(length, 2 * kept.shape[0])
    whole = new.new_zeros(slots, *new.shape[1:])
    if kept is not None:
        whole[: kept.shape[0]] = kept
    return whole
