"""The bench of schedules: its stages, which wait instead of computing, run under the real runtime."""

from __future__ import annotations

import time

import pytest
import torch
from megatron_llama.data.loader import Batch
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from tools.bench_schedule import SCHEDULES, configuration, runtime_of

from tests.harness import Cluster

UNIT, MICROBATCHES = 0.002, 4


def seconds_of_a_step(place: Place) -> dict[str, float]:
    """Under every schedule."""
    mesh = build_mesh(configuration("zb-v", place.world_size), rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    ids, found = torch.zeros(4, 1, dtype=torch.int64), {}
    for name in SCHEDULES:
        runtime = runtime_of(name, mesh, UNIT)
        begin = time.perf_counter()
        runtime.step([Batch(ids, ids) for _ in range(MICROBATCHES)])
        found[name] = time.perf_counter() - begin
    return found


@pytest.mark.long
def test_every_schedule_waits_for_all_its_passes(cluster: Cluster) -> None:
    for found in cluster.run(2, seconds_of_a_step):
        assert found.keys() == set(SCHEDULES) and min(found.values()) >= 3 * MICROBATCHES * UNIT
