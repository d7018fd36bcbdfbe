"""Update rules that can update a part of a shard by itself, as ``parted.py`` has them do where some
parameters of a bucket are left out of a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from copy import copy
from dataclasses import replace

from torch import Tensor

from megatron_llama.engine.plan.buckets import ALIGN
from megatron_llama.engine.rules.moments import EightBitMoment, InBytes, Moment, PlainMoment
from megatron_llama.engine.rules.registry import RuleInputs
from megatron_llama.engine.rules.update_rule import AdamW, Shard, UpdateRule, UpdateRules


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
        self._moments[key] = _part_of_moment(first, piece), _part_of_moment(second, piece)
        self._states[key] = part_of_state(self._states[source], piece, len(master))

    def drop(self, key: int) -> None:
        for tensors in (self._shards, self._masters, self._moments, self._states):
            del tensors[key]


def adamw_rules(inputs: RuleInputs) -> UpdateRules:
    """Build AdamW on the device for all buckets."""
    rule = DivisibleAdamW(inputs.options.groups)
    return UpdateRules([rule] * len(inputs.bucket_plan.buckets), [rule])


def _part_of_moment(moment: Moment, piece: slice) -> Moment:
    """Return some elements as a moment of their own in the same memory."""
    part = copy(moment)
    if isinstance(part, EightBitMoment):
        blocks = slice(piece.start // ALIGN, piece.stop // ALIGN)
        part.kept = InBytes(part.kept.codes[piece], part.kept.scales[blocks])
        part.tensors = {"_codes": part.kept.codes, "_scales": part.kept.scales}
    elif isinstance(part, PlainMoment):
        part.kept = part.kept[piece]
        part.tensors = {"": part.kept}
    return part


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
