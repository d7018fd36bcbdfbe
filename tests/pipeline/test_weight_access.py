"""The list of uses says what a rank reads: every pass of every schedule that reads weights, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from megatron_llama.config.schema import ModelConfig
from megatron_llama.engine.plan.specs import UnitSpec
from megatron_llama.engine.plan.weight_access import WeightAccess
from megatron_llama.model.plan.params import Partition, split_layers, stage_units, whole_model
from megatron_llama.pipeline.plan.stage_accesses import unit_weight_accesses, weight_accesses_of
from megatron_llama.schedule import Action, Op, forward_only, placement_of, schedule_named

MODEL = ModelConfig(
    vocab_size=64, hidden_size=8, intermediate_size=16, num_hidden_layers=12, num_attention_heads=2, num_key_value_heads=2, head_dim=4
)


def rank_units(partition: Partition, rank: int) -> list[tuple[UnitSpec, ...]]:
    return [stage_units(MODEL, partition, stage) for stage in partition.stages_of(rank)]


def frozen(units: Sequence[UnitSpec], *numbers: int) -> list[UnitSpec]:
    """The same units, those of these numbers without gradients."""
    return [
        replace(unit, params=tuple(replace(spec, trainable=number not in numbers) for spec in unit.params))
        for number, unit in enumerate(units)
    ]


def text(accesses: Sequence[WeightAccess]) -> str:
    return " ".join(map(str, accesses))


def test_units_count_over_the_stages_of_a_rank() -> None:
    """Three ranks, down and up, two blocks a stage: the first has the embedding at its first stage and the head at its last."""
    partition = Partition(split_layers(12, 6), (0, 1, 2, 2, 1, 0))
    assert unit_weight_accesses(rank_units(partition, 0), partition) == ({0: (0, 1, 2), 5: (3, 4, 5)}, {0: (2, 1), 5: (5, 4, 3)})
    for rank, stages in ((1, (1, 4)), (2, (2, 3))):
        forward, backward = unit_weight_accesses(rank_units(partition, rank), partition, rank=rank)
        assert forward == dict(zip(stages, [(0, 1), (2, 3)], strict=True))
        assert backward == dict(zip(stages, [(1, 0), (3, 2)], strict=True))


@pytest.mark.parametrize(
    ("without", "expected"),
    [
        ((), (5, 4, 3, 2, 1)),
        ((0,), (5, 4, 3, 2, 1)),
        ((1, 2), (5, 4, 3, 2, 1)),
        ((0, 1, 3), (5, 4, 3, 2)),
        ((0, 1, 2, 3, 4), (5,)),
        ((0, 1, 2, 3, 4, 5), ()),
    ],
)
def test_backward_ends_at_the_first_trainable_unit(without: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Frozen units after a trainable one are read: its gradient goes through them. The embedding never is."""
    model = replace(MODEL, num_hidden_layers=4)
    partition = whole_model(model)
    units = frozen(stage_units(model, partition, 0), *without)
    forward, backward = unit_weight_accesses([units], partition)
    assert forward == {0: (0, 1, 2, 3, 4, 5)} and backward == {0: expected}


def test_one_trainable_parameter_of_a_unit_is_enough() -> None:
    model = replace(MODEL, num_hidden_layers=2)
    partition = whole_model(model)
    units = frozen(stage_units(model, partition, 0), 0, 1, 2)
    first, *rest = units[1].params
    units[1] = replace(units[1], params=(replace(first, trainable=True), *rest))
    assert unit_weight_accesses([units], partition)[1] == {0: (3, 2, 1)}


def test_later_stages_hand_gradients_down() -> None:
    """The stage below may need the gradient, whatever is frozen here."""
    partition = Partition(split_layers(12, 6), (0, 1) * 3)
    units = [frozen(stage, 0, 1) for stage in rank_units(partition, 1)]
    assert unit_weight_accesses(units, partition, rank=1)[1] == {1: (1, 0), 3: (3, 2), 5: (6, 5, 4)}


def test_forward_and_input_gradients_read_weights() -> None:
    """Weight gradients and transfers do not."""
    forward, backward = {0: (0, 1), 2: (2, 3)}, {0: (1,), 2: (3, 2)}
    read = {(op, stage): text(weight_accesses_of([Action(op, stage, 7)], forward, backward)) for op in Op for stage in forward}
    assert {key: found for key, found in read.items() if found} == {
        (Op.FORWARD, 0): "F0 F1",
        (Op.FORWARD, 2): "F2 F3",
        (Op.BACKWARD, 0): "B1",
        (Op.BACKWARD, 2): "B3 B2",
        (Op.BACKWARD_INPUT, 0): "B1",
        (Op.BACKWARD_INPUT, 2): "B3 B2",
    }


def test_uses_of_whole_schedules_by_hand() -> None:
    """The order of the passes is that of the published schedules; a rank here has one block a stage, and no embedding or head."""
    schedule = schedule_named("1f1b", ranks=3, microbatches=3)
    assert text(weight_accesses_of(schedule.ranks[1], {1: (0,)}, {1: (0,)})) == "F0 F0 B0 F0 B0 B0"
    schedule = schedule_named("interleaved", ranks=2, microbatches=2, virtual=2)
    assert text(weight_accesses_of(schedule.ranks[1], {1: (0,), 3: (1,)}, {1: (0,), 3: (1,)})) == "F0 F0 F1 B1 F1 B1 B0 B0"
    schedule = schedule_named("gpipe", ranks=1, microbatches=2)
    assert text(weight_accesses_of(schedule.ranks[0], {0: (0, 1, 2)}, {0: (2, 1)})) == "F0 F1 F2 F0 F1 F2 B2 B1 B2 B1"


@pytest.mark.parametrize(("name", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)])
def test_every_unit_is_used_once_per_microbatch(name: str, virtual: int) -> None:
    """Except the embedding in backward; an evaluation has forward uses only."""
    ranks, microbatches = 3, 6
    partition = Partition(split_layers(12, ranks * virtual), placement_of(name, ranks, virtual))
    schedule = schedule_named(name, ranks=ranks, microbatches=microbatches, virtual=virtual)
    evaluation = forward_only(schedule.placement, microbatches)
    for rank in range(ranks):
        units = rank_units(partition, rank)
        forward, backward = unit_weight_accesses(units, partition, rank=rank)
        numbers = range(sum(map(len, units)))
        every = Counter({WeightAccess(number, backward=False): microbatches for number in numbers})
        assert Counter(weight_accesses_of(evaluation.ranks[rank], forward, backward)) == every
        read = [number for number in numbers if number > 0 or rank > 0]
        expected = every + Counter({WeightAccess(number, backward=True): microbatches for number in read})
        assert Counter(weight_accesses_of(schedule.ranks[rank], forward, backward)) == expected
