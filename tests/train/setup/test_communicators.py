"""The communicators of a plan, against those that ``build_mesh`` makes of an imagined GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron_llama.config.schema import Config
from megatron_llama.engine.mesh import Mesh
from megatron_llama.train.setup import auto
from megatron_llama.train.setup.communicators import (
    LOW_LATENCY,
    LOW_LATENCY_128,
    SIMPLE,
    communicators,
    describe_communicators,
    most_communicators,
    total_bytes,
)
from megatron_llama.train.setup.processes import Processes, RankDevice

from tests.launch.test_communicators import GRIDS, built, group_of, spread
from tests.launch.test_mesh import AXES, Case

OF_A_RING = 2 * (SIMPLE + LOW_LATENCY + LOW_LATENCY_128)
SHARED = Case(dp=8, strategy="optim_grads_params").config
DIVIDED = replace(SHARED, parallel=replace(SHARED.parallel, expert_model_parallel_size=2))
EXCHANGED = replace(DIVIDED, parallel=replace(DIVIDED.parallel, expert_model_parallel_size=4, moe_token_dispatcher_type="alltoall"))
TWO_LEVELS = replace(SHARED, parallel=replace(SHARED.parallel, data_parallel_shard_size=4))
BY_HEADS = [(spread(Case(cp=4, tp=2).config, comm), 8, 1) for comm in ("a2a", "a2a+p2p")]


@pytest.mark.parametrize(("config", "world", "pp"), [*((case.config, case.world_size, case.pp) for case in GRIDS), (SHARED, 8, 1), (TWO_LEVELS, 8, 1), (DIVIDED, 8, 1), (EXCHANGED, 8, 1), *BY_HEADS])
def test_the_plan_has_what_the_mesh_makes(config: Config, world: int, pp: int) -> None:
    """Group for group on every pipeline rank, with as many pairs as its links."""
    for rank in range(0, world, world // pp):
        mesh, asked = built(config, rank, world)
        groups: dict[object, tuple[str, int]] = {}
        for name in (*AXES, "dp_shard", "dp_replica"):
            axis = getattr(mesh, name)
            if axis is not None and axis.group is not None:
                groups.setdefault(axis.group, (name, axis.size))
        for axis in (mesh.ep, *(() if mesh.experts is None else mesh.experts.all)):
            if axis is not None and axis.group is not None:
                groups.setdefault(axis.group, (axis.name, axis.size))
        names = {group_of(axis).group_name: axis.name for axis in (mesh.cp, mesh.cp_heads, mesh.ep) if axis is not None and axis.size > 1}
        planned = communicators(config, world, mesh.pp.rank)
        assert {axis.axis: axis.ranks for axis in planned} == {"world": world, **dict(groups.values())}
        # Before an exchange a rank has met each other one, both ways.
        exchanging = {axis.axis: axis.links for axis in planned if axis.axis in ("cp", "cp_heads", "ep")}
        for use in (use for use in asked.uses if use.operation == "all_to_all"):
            assert exchanging[names[use.group]] == 2 * (len(use.ranks) - 1)
        messages = {(use.group, frozenset(use.ranks)) for use in asked.uses if use.operation == "message"}
        for axis in planned:
            if not axis.collective:
                name = group_of(getattr(mesh, axis.axis)).group_name
                assert axis.count == sum(group == name for group, _ in messages), (axis, messages)


def test_what_nccl_takes_for_them() -> None:
    """By hand: two rings of 16 channels beside that of all ranks, which has one; and messages of a pipeline with four."""
    config = Case(pp=4, dp=2).config
    first, second = (communicators(config, 8, rank) for rank in (0, 1))
    assert total_bytes(first) == OF_A_RING * (1 + 16 + 16) + 4 * SIMPLE * 2
    assert total_bytes(second) == OF_A_RING * (1 + 16 + 16) + 4 * SIMPLE * 4
    assert most_communicators(config, 8) == second and communicators(Case().config, 1, 0) == ()
    assert describe_communicators(second) == "7 of a rank on GPUs: world 8, dp 2, dp_gather 2, pp 2 pairs, pp_backward 2 pairs; NCCL takes about 670.4 MiB"


@pytest.mark.parametrize(("host", "share"), [(True, 0.9), (False, 0.5)])
def test_auto_leaves_room_for_them_on_gpus(host: bool, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they take half of a device."""
    config = Case(dp=8).config
    memory = 2 * total_bytes(most_communicators(config, 8))
    given: list[int] = []
    monkeypatch.setattr(auto, "decide", lambda config, world, memory: given.append(memory))
    auto.decide_on_devices(config, Processes(Mesh.single().world, 8, (RankDevice("it", host, memory, 8, 0),)))
    assert given == [pytest.approx(memory * share / 0.9)]
