"""Layouts drawn at random train what one process trains, and a wrong one would be seen."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron_llama.engine.plan.buckets import BucketKind
from megatron_llama.launch.launcher import Place
from megatron_llama.model.llama import Stage
from megatron_llama.model.nn.context import local_sequence
from megatron_llama.model.positions import Positions
from megatron_llama.prove.draw import DOUBLINGS, EACH_SCHEDULE, SCHEDULES, THREE_AXES
from tools.parity import markdown_of_drawn, rows

from tests.harness import Cluster
from tests.parallel.cases import LOSS_BOUND, NORM_BOUND, STRATEGIES, Layout, Record, Reference, Trainer, merged, train, trainer
from tests.parallel.draw import COUNT, SEED, STEPS, alone, axes, draw

DRAWN = draw()
FEWER = 12
"""Layouts of a run without --all."""
TWICE = [max((layout for layout in DRAWN if layout.pp > 1 and layout.schedule == schedule), key=axes) for schedule in SCHEDULES]
"""Of each schedule the one with most axes, which is run again."""
References = Callable[[Layout], Reference]
Runs = Callable[[Layout], list[Record]]


@pytest.fixture(scope="module")
def references(cluster: Cluster) -> References:
    """The single process of every kind of model, trained once."""
    known: dict[Layout, Reference] = {}

    def look_up(layout: Layout) -> Reference:
        if layout.reference not in known:
            known[layout.reference] = alone(cluster, layout)
        return known[layout.reference]

    return look_up


@pytest.fixture(scope="module")
def runs(cluster: Cluster) -> Runs:
    """A layout's run; those that are compared with another one are kept."""
    known: dict[Layout, list[Record]] = {}

    def look_up(layout: Layout) -> list[Record]:
        records = known.get(layout) or cluster.run(layout.world_size, train, layout)
        if layout in TWICE:
            known[layout] = records
        return records

    return look_up


@pytest.mark.parametrize("seed", [SEED, SEED + 1])
def test_a_draw_keeps_its_promises(seed: int) -> None:
    drawn = draw(seed)
    assert len({layout.name for layout in drawn}) == len(drawn) == COUNT
    assert max(layout.world_size for layout in drawn) <= 2**DOUBLINGS
    assert sum(axes(layout) >= 3 for layout in drawn) >= THREE_AXES
    schedules = Counter(layout.schedule for layout in drawn if layout.pp > 1)
    assert all(schedules[name] >= EACH_SCHEDULE for name in SCHEDULES), schedules


def test_a_draw_depends_on_the_seed_alone() -> None:
    assert draw() == DRAWN and draw(SEED, 8) == draw(SEED, 8) != draw(SEED + 1, 8)


CHOICES: dict[str, tuple[object, ...]] = {
    "tp": (1, 2, 4),
    "cp": (1, 2, 4),
    "dp": (1, 2, 4),
    "pp": (1, 2, 4, 8),
    "virtual": (1, 2, 3),
    "microbatches": (1, 2, 4, 8),
    "kv_heads": (1, 2, 4),
    "strategy": STRATEGIES,
    "slots": ("default", "2", "3", "all"),
    "grad_slots": (1, 2, 3),
    "shard_size": (0, 1, 2),
    "prefetch": (0, 60_000),
    "recompute": ("none", "selective", "full"),
    "sp": (False, True),
    "tied": (False, True),
    "documents": (False, True),
}


@pytest.mark.parametrize("field", CHOICES)
def test_the_draw_meets_every_choice(field: str) -> None:
    assert {getattr(layout, field) for layout in DRAWN} == set(CHOICES[field])


def test_the_draw_meets_what_needs_two_choices() -> None:
    assert {layout.cp_comm for layout in DRAWN if layout.cp > 1} == {"all_gather", "ring"}
    assert any(layout.tp > layout.kv_heads for layout in DRAWN)
    assert any(len(set(layout.split)) > 1 for layout in DRAWN)


def choices(layout: Layout) -> set[tuple[str, object]]:
    """What is drawn of it, the pairs of schedule and virtual stages and of each axis with the kind of messages among it."""
    chosen = {(field, getattr(layout, field)) for field in CHOICES}
    return chosen | {("schedule", layout.schedule if layout.pp > 1 else ""), ("cp_comm", layout.cp_comm if layout.cp > 1 else "")}


def most_choices(layouts: Sequence[Layout], count: int) -> list[Layout]:
    """Those of the layouts that together meet most for what they cost: one after the other the one that adds most to those before it,
    for its passes of microbatches and a share that every layout costs."""
    taken: list[Layout] = []
    met: set[tuple[str, object]] = set()
    while len(taken) < count:
        rest = [layout for layout in layouts if layout not in taken]
        best = max(rest, key=lambda layout: len(choices(layout) - met) / (16 + layout.world_size * layout.microbatches))
        taken.append(best)
        met |= choices(best)
    return taken


SHORT = most_choices(DRAWN, FEWER)


@pytest.mark.parametrize("field", CHOICES)
def test_a_run_without_all_meets_every_choice_too(field: str) -> None:
    assert {getattr(layout, field) for layout in SHORT} == set(CHOICES[field])


def test_a_run_without_all_meets_every_schedule_and_both_ways_to_pass_keys() -> None:
    assert {layout.schedule for layout in SHORT if layout.pp > 1} == set(SCHEDULES)
    assert {layout.cp_comm for layout in SHORT if layout.cp > 1} == {"all_gather", "ring"}


@pytest.mark.parametrize("layout", [pytest.param(one, id=one.name, marks=[] if one in SHORT else [pytest.mark.long]) for one in DRAWN])
def test_drawn_layout_equals_one_process(references: References, runs: Runs, layout: Layout) -> None:
    records, reference = runs(layout), references(layout)
    assert len(records[0].losses) == STEPS
    assert all(record.losses == records[0].losses and record.norms == records[0].norms for record in records)
    row = reference.row(layout.name, records[0])
    assert row.holds, (row, layout)
    for record in records:
        assert len({records[rank].parameters for rank in record.dp_line}) == 1, (record.dp_line, layout)
    trained, single = merged(records), merged([reference.single])
    assert trained.keys() == single.keys()
    for name, weight in trained.items():
        # Adam turns a gradient that is all rounding noise into full steps, so single elements may differ, tensors may not.
        assert float((weight - single[name]).norm() / single[name].norm()) < 1e-4, (name, layout)


@pytest.mark.long
@pytest.mark.parametrize("layout", TWICE, ids=lambda layout: layout.schedule)
def test_drawn_layout_twice_is_bitwise_equal(runs: Runs, cluster: Cluster, layout: Layout) -> None:
    one, other = runs(layout), cluster.run(layout.world_size, train, layout)
    assert _bits(one) == _bits(other), layout
    left, right = merged(one), merged(other)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def _bits(records: list[Record]) -> list[tuple[tuple[float, ...], tuple[float, ...], str]]:
    return [(record.losses, record.norms, record.parameters) for record in records]


def positions_in_rank_order(run: Trainer) -> None:
    """Rotary positions as if each rank held one consecutive part of the sequence."""
    for stage in run.stages.values():
        stage.positions = _consecutive(stage)  # type: ignore[method-assign]


def _consecutive(stage: Stage) -> Callable[..., Positions]:
    correct, cp = stage.positions, stage.mesh.cp

    def positions(length: int, device: torch.device, *ids: torch.Tensor | None) -> Positions:
        own = local_sequence(torch.arange(length), cp)
        wrong = torch.zeros(length, 1, dtype=torch.int64)
        wrong[own, 0] = torch.arange(len(own)) + cp.rank * len(own)
        return correct(length, device, wrong, *ids[1:])

    return positions


def documents_forgotten(run: Trainer) -> None:
    """Attention crosses documents."""
    for stage in run.stages.values():
        stage.positions = _without_documents(stage)  # type: ignore[method-assign]


def _without_documents(stage: Stage) -> Callable[..., Positions]:
    correct = stage.positions
    return lambda length, device, position_ids, document_ids, documents: correct(length, device, position_ids)


def _mistake(run: Trainer, change: Callable[[BucketKind], BucketKind]) -> None:
    buckets = (replace(bucket, kind=change(bucket.kind)) for bucket in run.optimizer.bucket_plan.buckets)
    run.optimizer.bucket_plan = replace(run.optimizer.bucket_plan, buckets=tuple(buckets))


def shared_heads_not_summed(run: Trainer) -> None:
    """Each copy of a key/value head keeps the gradient through its own queries."""
    _mistake(run, lambda kind: replace(kind, partial_grad=kind.partial_grad and not kind.decay))


def norms_not_summed(run: Trainer) -> None:
    """Each rank keeps the gradient of norms through its part of the sequence."""
    _mistake(run, lambda kind: replace(kind, partial_grad=kind.partial_grad and kind.decay))


def tied_ends_not_summed(run: Trainer) -> None:
    """Embedding and head each keep their own gradient."""
    _mistake(run, lambda kind: replace(kind, tied=False))


def nothing_wrong(run: Trainer) -> None:
    """The control of the control."""


def train_with(place: Place, layout: Layout, mistake: Callable[[Trainer], None]) -> Record:
    """Like ``train``, with a mistake built in."""
    run = trainer(place, layout)
    mistake(run)
    steps = [run.step(index) for index in range(layout.steps)]
    return Record(tuple(loss.item() for loss, _ in steps), tuple(norm.item() for _, norm in steps))


MISTAKES: list[tuple[Layout, Callable[[Trainer], None]]] = [
    (Layout(cp=2), positions_in_rank_order),
    (Layout(cp=4, cp_comm="ring"), positions_in_rank_order),
    (Layout(cp=2, cp_comm="ring", documents=True), documents_forgotten),
    (Layout(tp=2, kv_heads=1), shared_heads_not_summed),
    (Layout(tp=4, kv_heads=2, sp=True), shared_heads_not_summed),
    (Layout(tp=2, sp=True), norms_not_summed),
    (Layout(pp=2, tied=True), tied_ends_not_summed),
]


@pytest.mark.long
@pytest.mark.parametrize(("layout", "mistake"), MISTAKES, ids=lambda value: getattr(value, "__name__", None) or value.name)
def test_a_mistake_exceeds_the_bounds(references: References, cluster: Cluster, layout: Layout, mistake: Callable[[Trainer], None]) -> None:
    layout = replace(layout, steps=STEPS)
    right, wrong = (
        references(layout).row(layout.name, cluster.run(layout.world_size, train_with, layout, how)[0]) for how in (nothing_wrong, mistake)
    )
    assert right.holds, right
    # By far: a smaller mistake of the same kind would be seen too.
    assert max(wrong.loss / wrong.loss_bound, wrong.norm / wrong.norm_bound) > 10, wrong


@pytest.mark.long
def test_the_tool_prints_the_drawn_table(cluster: Cluster) -> None:
    assert_table(markdown_of_drawn(rows(cluster, draw(5, 2), alone)))


@pytest.mark.long
def test_the_tool_prints_the_drawn_table_by_itself() -> None:
    tool = Path(__file__).parents[2] / "tools" / "parity.py"
    command = [sys.executable, tool, "--random", "--seed", "5", "--count", "2"]
    assert_table(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def assert_table(text: str) -> None:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert [line[0] for line in lines[2:]] == [*(layout.name for layout in draw(5, 2)), "**largest of 2**"]
    assert all(float(line[1]) < LOSS_BOUND and float(line[2]) < NORM_BOUND for line in lines[2:4])
