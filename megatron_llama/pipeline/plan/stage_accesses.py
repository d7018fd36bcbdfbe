"""The weight accesses of a pipeline rank: one list, made from the actions of its schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megatron_llama.config.schema import Config
from megatron_llama.engine.plan.specs import UnitSpec
from megatron_llama.engine.plan.weight_access import WeightAccess
from megatron_llama.model.plan.params import Partition, partition_of
from megatron_llama.model.plan.run_params import rank_units
from megatron_llama.schedule import Action, Op


def rank_weight_accesses(
    config: Config, actions: Iterable[Action], *, rank: int
) -> tuple[WeightAccess, ...]:
    """Return the weight accesses of one pipeline rank of a resolved configuration in a list of its
    actions."""
    return weight_accesses_of(
        actions,
        *unit_weight_accesses(rank_units(config, rank=rank), partition_of(config), rank=rank),
    )


def weight_accesses_of(
    actions: Iterable[Action],
    forward: Mapping[int, Sequence[int]],
    backward: Mapping[int, Sequence[int]],
) -> tuple[WeightAccess, ...]:
    """Return the weight accesses of one rank. ``forward`` and ``backward`` have for each of its
    stages the units in the order in which a pass reads them (``unit_weight_accesses``). A weight
    gradient reads activations only, and transfers read no weight: neither is an access."""
    found: list[WeightAccess] = []
    for action in actions:
        if action.op is Op.FORWARD:
            found += [WeightAccess(unit, backward=False) for unit in forward[action.stage]]
        elif action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            found += [WeightAccess(unit, backward=True) for unit in backward[action.stage]]
    return tuple(found)


def unit_weight_accesses(
    units: Sequence[Sequence[UnitSpec]], partition: Partition, *, rank: int = 0
) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]:
    """Return ``forward`` and ``backward`` of ``weight_accesses_of`` for one pipeline rank.
    ``units`` are those of each of its stages, as ``rank_units`` returns them.

    Backward leaves out the units that it does not read: the embedding, whose gradient needs only
    the token ids, and the first blocks of the model up to the first trainable parameter, because no
    gradient goes that far down."""
    forward = {}
    backward = {}
    first = 0
    for stage, specs in zip(partition.stages_of(rank), units, strict=True):
        numbers = tuple(range(first, first + len(specs)))
        unread = max(1, _leading_frozen_units(specs)) if stage == 0 else 0
        forward[stage] = numbers
        backward[stage] = numbers[unread:][::-1]
        first += len(specs)
    return forward, backward


def _leading_frozen_units(specs: Sequence[UnitSpec]) -> int:
    """Return the number of units before the first with a trainable parameter."""
    return next(
        (index for index, unit in enumerate(specs) if any(spec.trainable for spec in unit.params)),
        len(specs),
    )
