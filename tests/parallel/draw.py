"""Layouts drawn from a seed: a sample of everything that can be combined, with a floor under what is easily missed.

What may be combined is not written here again: a candidate that ``validate.check`` or the schedule refuses is drawn anew.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import get_args

from megatron_llama.distributed.launcher import Place
from megatron_llama.errors import ConfigError
from megatron_llama.plans.resolve import check
from megatron_llama.plans.schedule import ScheduleError, placement_of, schedule_named

from tests.harness import Cluster
from tests.parallel.cases import GLOBAL_BATCH_SIZE, SEQ_LENGTH, STRATEGIES, Layout, Record, Reference, Schedule, train

SEED, COUNT, STEPS = 1, 64, 5
DOUBLINGS = 3
"""At most 2**3 processes."""
THREE_AXES, EACH_SCHEDULE = 20, 8
"""At least so many of 64 have three or more axes above 1, and at least so many pipelines run each schedule."""
THREE = "three axes"
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
LAYERS = (4, 6, 8, 12, 16, 24)
BUCKETS = (1, 3_000, 20_000, 1_000_000)


@cache
def draw(seed: int = SEED, count: int = COUNT) -> tuple[Layout, ...]:
    """``count`` layouts of different names, always the same for a seed. With fewer than 64 the floors shrink in proportion."""
    chance, chosen = random.Random(seed), dict[str, Layout]()
    floors: list[Counter[str]] = [Counter({THREE: count * THREE_AXES // COUNT}), Counter(SCHEDULES * (count * EACH_SCHEDULE // COUNT))]
    while len(chosen) < count:
        layout = _candidate(chance)
        if layout is None or layout.name in chosen:
            continue
        missing = list(zip(floors, _traits(layout), strict=True))
        # The last places are kept for what is missing. Each can serve both floors, so both are always reached.
        if all(sum(floor.values()) < count - len(chosen) or floor[trait] for floor, trait in missing):
            chosen[layout.name] = layout
            for floor, trait in missing:
                floor[trait] -= min(1, floor[trait])
    return tuple(chosen.values())


def axes(layout: Layout) -> int:
    """Number of axes above 1."""
    return sum(size > 1 for size in (layout.tp, layout.cp, layout.pp, layout.dp))


def _traits(layout: Layout) -> tuple[str, str]:
    """What the layout counts for in each floor."""
    return THREE if axes(layout) >= 3 else "", layout.schedule if layout.pp > 1 else ""


def _candidate(chance: random.Random) -> Layout | None:
    doublings = chance.randint(0, DOUBLINGS)
    pp, left = 2**doublings, DOUBLINGS - doublings
    sizes: dict[str, int] = {}
    for axis in chance.sample(("tp", "cp", "dp"), 3):
        doublings = chance.randint(0, min(2, left))
        sizes[axis], left = 2**doublings, left - doublings
    layout = Layout(
        tp=sizes["tp"],
        cp=sizes["cp"],
        dp=sizes["dp"],
        pp=pp,
        virtual=chance.choice((1, 2, 3)) if pp > 1 else 1,
        sp=sizes["tp"] > 1 and chance.random() < 0.5,
        cp_comm=chance.choice(("all_gather", "ring")) if sizes["cp"] > 1 else "all_gather",
        strategy=chance.choice(STRATEGIES),
        microbatches=chance.choice((1, 2, 4, 8)),
        schedule=chance.choice(SCHEDULES) if pp > 1 else "1f1b",
        kv_heads=chance.choice((4, 2, 1)),
        recompute=chance.choice(("none", "selective", "full")),
        tied=chance.random() < 0.5,
        documents=chance.random() < 0.5,
        bucket=chance.choice(BUCKETS),
        steps=STEPS,
    )
    layout = _with_sharding(chance, layout)
    try:
        layout = _with_layers(chance, layout)
        _check(layout)
    except (ConfigError, ScheduleError):
        return None
    return layout


def _with_sharding(chance: random.Random, layout: Layout) -> Layout:
    """How parameters and gradients are buffered, and whether shards are replicated."""
    if layout.strategy == "no_shard":
        return layout
    ranks = layout.dp * layout.cp
    sizes = [size for size in (1, 2) if size < ranks]
    return replace(
        layout,
        slots=chance.choice(("default", "2", "2", "3", "all")) if layout.strategy == "optim_grads_params" else "default",
        grad_slots=chance.choice((1, 2, 3)),
        shard_size=chance.choice(sizes) if sizes and chance.random() < 0.3 else 0,
        prefetch=chance.choice((0, 0, 60_000)),
    )


def _with_layers(chance: random.Random, layout: Layout) -> Layout:
    """Give every stage some blocks: equal shares, or a split at random. Raises ScheduleError."""
    stages = len(placement_of(layout.schedule, layout.pp, layout.virtual))
    layers = chance.choice([count for count in LAYERS if stages <= count <= stages + 4])
    if stages == 1 or chance.random() < 0.5:
        return replace(layout, layers=layers)
    cuts = [0, *sorted(chance.sample(range(1, layers), stages - 1)), layers]
    return replace(layout, layers=layers, split=tuple(stop - start for start, stop in itertools.pairwise(cuts)))


def _check(layout: Layout) -> None:
    """Raises ConfigError or ScheduleError for a layout that a user could not start either."""
    config = layout.config()
    # A global batch that is too small leaves microbatches without samples, which the check refuses.
    samples = GLOBAL_BATCH_SIZE // (layout.dp * layout.microbatches)
    training = replace(config.training, seq_length=SEQ_LENGTH, train_iters=layout.steps)
    training = replace(training, micro_batch_size=samples, global_batch_size=GLOBAL_BATCH_SIZE)
    check(replace(config, training=training), layout.world_size)
    schedule_named(layout.schedule, ranks=layout.pp, microbatches=layout.microbatches, virtual=layout.virtual)


def alone(cluster: Cluster, layout: Layout) -> Reference:
    """The reference of a drawn layout, without HuggingFace: one process in fp32, and beside it one in fp64."""
    single, exact = cluster.run(2, _train_alone, layout.reference)
    return Reference(single, exact, None)


def _train_alone(place: Place, layout: Layout) -> Record:
    return train(Place(0, 1, 0), replace(layout, fp64=place.rank == 1))
