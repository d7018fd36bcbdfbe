"""Layouts drawn at random train what one process trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import pytest
import torch
from megatron_llama.prove.draw import SCHEDULES

from tests.harness import Cluster
from tests.parallel.cases import LOSS_BOUND, NORM_BOUND, STRATEGIES, Layout, Record, Reference, merged, train
from tests.parallel.draw import STEPS, alone, axes, draw
from tests.parallel.test_sharding import bits
from tools import parity

DRAWN = draw()
TRAINED = 16
"""Layouts that --all trains. All of them: --soak, and ``tools/parity.py --random``."""
References = Callable[[Layout], Reference]
Runs = Callable[[Layout], list[Record]]


@pytest.fixture(scope="module")
def references(cluster: Cluster) -> References:
    """The single process of every kind of model, trained once."""
    trained = cache(partial(alone, cluster))
    return lambda layout: trained(layout.reference)


@pytest.fixture(scope="module")
def runs(cluster: Cluster) -> Runs:
    """A layout's run; those that are compared with another one are kept."""
    kept = cache(lambda layout: cluster.run(layout.world_size, train, layout))
    return lambda layout: kept(layout) if layout in TWICE else kept.__wrapped__(layout)


CHOICES: dict[str, tuple[object, ...]] = {
    "tp": (1, 2, 4), "cp": (1, 2, 4), "dp": (1, 2, 4), "pp": (1, 2, 4, 8), "virtual": (1, 2, 3), "microbatches": (1, 2, 4, 8),
    "kv_heads": (1, 2, 4), "strategy": STRATEGIES, "slots": ("default", "2", "3", "all"), "grad_slots": (1, 2, 3), "shard_size": (0, 1, 2),
    "prefetch": (0, 60_000), "recompute": ("none", "selective", "full"), "sp": (False, True), "tied": (False, True),
    "documents": (False, True),
}


def choices(layout: Layout) -> set[tuple[str, object]]:
    """What is drawn of it, the schedule, how keys are passed on, and what two choices make together."""
    chosen = {(field, getattr(layout, field)) for field in CHOICES}
    if layout.pp > 1:
        chosen |= {("schedule", layout.schedule), ("tied ends", layout.tied), ("uneven", len(set(layout.split)) > 1)}
        chosen |= {("recomputed stages", layout.recompute), ("ways of stages", layout.strategy)}
    if layout.cp > 1:
        chosen |= {("keys", (layout.cp_comm, layout.documents))}
    return chosen | {("shared heads", layout.tp > layout.kv_heads), ("rounds", (layout.strategy, layout.microbatches > 1))}


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


CHOSEN = most_choices(DRAWN, TRAINED)
TWICE = [max((layout for layout in CHOSEN if layout.pp > 1 and layout.schedule == schedule), key=axes) for schedule in SCHEDULES]
"""Of each schedule the one with most axes, which is run again."""


def test_what_is_trained_meets_every_choice_and_all_that_two_make_together() -> None:
    for field, options in CHOICES.items():
        assert {getattr(layout, field) for layout in CHOSEN} == set(options), field
    assert set().union(*map(choices, CHOSEN)) == set().union(*map(choices, DRAWN))


@pytest.mark.long
@pytest.mark.parametrize("layout", [pytest.param(one, id=one.name, marks=[] if one in CHOSEN else [pytest.mark.soak]) for one in DRAWN])
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
    assert bits(one) == bits(other), layout
    left, right = merged(one), merged(other)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.long
def test_the_tool_prints_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["parity.py", "--random", "--seed", "5", "--count", "2"])
    assert parity.main() == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "2 layouts drawn from seed 5"
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]
    assert [line[0] for line in lines[2:]] == [*(layout.name for layout in draw(5, 2)), "**largest of 2**"]
    assert all(float(line[1]) < LOSS_BOUND and float(line[2]) < NORM_BOUND for line in lines[2:4])
