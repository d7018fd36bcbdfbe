"""Values of some ranks, on the first of them."""

from __future__ import annotations

import torch
from megatron_llama.engine.comm.gathering import gather_from
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh

from tests.harness import Cluster
from tests.parallel.cases import Layout

PAIRS = ((2, 0), (3, 1))


def gathered(place: Place) -> list[list[str] | None]:
    """Two groups at the same time, each with its last rank first; then all, with values of other lengths."""
    world = build_mesh(Layout(dp=4).config(), rank=place.rank, world_size=4, device=torch.device("cpu")).world
    own = str(place.rank) * 10 ** (2 * place.rank)
    pair = next(ranks for ranks in PAIRS if place.rank in ranks)
    return [gather_from(pair, own, world), gather_from(range(4), own, world), gather_from([place.rank], own, world)]


def test_only_the_first_rank_has_the_values_of_its_ranks_in_their_order(cluster: Cluster) -> None:
    own = [str(rank) * 10 ** (2 * rank) for rank in range(4)]
    assert cluster.run(4, gathered) == [
        [None, own, [own[0]]],
        [None, None, [own[1]]],
        [[own[2], own[0]], None, [own[2]]],
        [[own[3], own[1]], None, [own[3]]],
    ]
