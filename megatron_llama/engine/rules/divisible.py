"""Update rules that can update a part of a shard by itself, as ``parted.py`` has them do where some
parameters of a bucket are left out of a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from megatron_llama.engine.plan.buckets import ALIGN
from megatron_llama.engine.rules.update_rule import AdamW, Shard, UpdateRule


class DivisibleRule(UpdateRule):
    """A rule whose update of an element needs nothing of the others."""

    @abstractmethod
    def divide(self, source: int, key: int, piece: slice) -> None:
        """Let ``key`` stand for some elements of ``source`` from now on, as if it were a bucket:
        its tensors are views of that one's, its numbers are copies. ``source`` is a bucket or was
        made here. ``piece`` begins and ends at multiples of ALIGN."""

    @abstractmethod
    def drop(self, key: int) -> None:
        """Forget a key of ``divide``."""


class DivisibleAdamW(AdamW, DivisibleRule):
    """AdamW on the device that has the shards, as an engine around any module needs it."""

    def divide(self, source: int, key: int, piece: slice) -> None:
        shard = self._shards[source]
        master = self._masters[source]
        first, second = self._moments[source]
        self._shards[key] = part_of_shard(shard, key, piece)
        self._masters[key] = part_of_master(master, shard, self._shards[key], piece)
        self._moments[key] = first.part(piece), second.part(piece)
        self._states[key] = part_of_state(self._states[source], piece, len(master))

    def drop(self, key: int) -> None:
        for tensors in (self._shards, self._masters, self._moments, self._states):
            del tensors[key]


def part_of_shard(shard: Shard, key: int, piece: slice) -> Shard:
    """Return some elements of a shard as one of their own, which is called ``key``."""
    return replace(
        shard,
        bucket=key,
        param_shard=shard.param_shard[piece],
        segments=tuple(
            replace(segment, in_shard=segment.in_shard - piece.start)
            for segment in shard.segments
            if piece.start <= segment.in_shard < piece.stop
        ),
    )


def part_of_master(master: Tensor, shard: Shard, part: Shard, piece: slice) -> Tensor:
    """Return the master of a part of a shard, which is the part itself if the shard is its own."""
    return part.param_shard if master is shard.param_shard else master[piece]


def part_of_state(state: Mapping[str, Tensor], piece: slice, numel: int) -> dict[str, Tensor]:
    """Return views of the state of some elements of a shard of ``numel``, and copies of its
    numbers."""
    blocks = slice(piece.start // ALIGN, piece.stop // ALIGN)
    return {
        name: tensor[piece if len(tensor) == numel else blocks] if tensor.dim() else tensor.clone()
        for name, tensor in state.items()
    }
