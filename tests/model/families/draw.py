"""Layouts of a family's model drawn from a seed, with losses of its routers: those of ``tests/parallel/draw.py``, of which the trainer's own
check says what a family can have."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import asdict, replace
from itertools import pairwise

from megatron_llama.schedule import placement_of

from tests.harness import Cluster
from tests.model.families import twins
from tests.model.families.twins import TWINS, Z_LOSS, FamilyLayout
from tests.parallel import draw as plain
from tests.parallel.cases import LOSS_BOUND, Layout, Reference

COUNT = 24
"""Layouts of each family."""
POOL = 6
"""Times as many are drawn, of which those are taken that have most of what those before them have least."""
TEXTS = 4
"""Texts that are tried."""
BALANCES = ("seq_aux_loss", "global_aux_loss", "hf_aux_loss")


def draw(family: str, seed: int, count: int = COUNT) -> tuple[FamilyLayout, ...]:
    """Different ones that run, always the same for a seed."""
    chance = random.Random(f"{family} {seed}")
    pool: list[FamilyLayout] = []
    while len(pool) < POOL * count:
        layout = _candidate(chance, family)
        if layout is not None and layout not in pool and plain.runs(layout):
            pool.append(layout)
    taken: Counter[tuple[str, object]] = Counter()
    chosen = []
    for _ in range(count):
        best = max(pool, key=lambda layout: sum(1 / (1 + taken[choice]) for choice in choices(layout)))
        pool.remove(best)
        chosen.append(best)
        taken.update(choices(best))
    return tuple(chosen)


def reference(cluster: Cluster, layout: FamilyLayout) -> Reference:
    """What a layout is compared with, over text of which every token has the same experts in fp32 as in fp64 and in transformers, if there is
    such: a token that stands between two goes to either by rounding, and nothing could be compared afterwards."""
    for first in range(layout.first, layout.first + TEXTS * layout.steps, layout.steps):
        found = replace(twins.reference(cluster, replace(layout, first=first)), first=first)
        row = found.row("", found.single)
        if row.loss_bound == LOSS_BOUND and row.holds:
            break
    return found


def choices(layout: FamilyLayout) -> list[tuple[str, object]]:
    """The value of each field that is drawn; None where it changes nothing."""
    fields = ("tp", "cp", "pp", "dp", "ep", "virtual", "microbatches", "recompute", "balance")
    kinds: dict[str, object] = {name: getattr(layout, name) for name in fields}
    kinds |= {"schedule": layout.schedule if layout.pp > 1 else None, "keys": layout.cp_comm if layout.cp > 1 else None}
    kinds |= {"strategy": layout.strategy if layout.dp * layout.cp > 1 else None, "z-loss": layout.z_loss > 0, "split": layout.split != ()}
    kinds |= {"alltoall": layout.exchange if layout.ep > 1 else None, "shards": layout.shard_size if _shards(layout) else None}
    return [*kinds.items()]


def _candidate(chance: random.Random, family: str) -> FamilyLayout | None:
    layout, model = plain.candidate(chance), TWINS[family].ours
    stages = 0 if layout is None else len(placement_of(layout.schedule, layout.pp, layout.virtual))
    if layout is None or stages > model.num_hidden_layers + 2:
        return None
    plain_fields = ("layers", "kv_heads", "tied", "documents", "steps", "offload")
    kept = {name: getattr(Layout(), name) for name in plain_fields}
    losses = {"balance": chance.choice(("none", "none", *BALANCES)), "z_loss": chance.choice((0.0, 0.0, Z_LOSS))}
    split = _split(chance, stages, model.num_hidden_layers)
    drawn = FamilyLayout(**(asdict(layout) | kept | losses | {"family": family, "split": split}))
    if model.num_experts:
        drawn = replace(drawn, sp=drawn.tp > 1, tp_comm="0", ep=chance.choice((1, 2, 4)))
    return _divided(chance, drawn) if drawn.ep > 1 else drawn


def _divided(chance: random.Random, layout: FamilyLayout) -> FamilyLayout:
    """The layout with a way in which tokens travel to their experts, and shards that it can have beside divided experts."""
    sizes = [size for size in (layout.ep, 2 * layout.ep) if size < layout.dp * layout.cp and _shards(layout)]
    return replace(layout, exchange=chance.random() < 0.5, shard_size=chance.choice((0, *sizes)))


def _shards(layout: FamilyLayout) -> bool:
    """Whether ranks share what they have of parameters, gradients or states."""
    return layout.dp * layout.cp > 1 and layout.strategy != "no_shard"


def _split(chance: random.Random, stages: int, layers: int) -> tuple[int, ...]:
    """Blocks of each stage: equal shares, or any, of which the first and the last may be none."""
    if stages == 1 or (layers % stages == 0 and chance.random() < 0.5):
        return ()
    cuts = [0, *sorted(chance.sample(range(1, layers + 2), stages - 1)), layers + 2]
    first, *middle, last = (stop - start for start, stop in pairwise(cuts))
    return first - 1, *middle, last - 1
