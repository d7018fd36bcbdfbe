"""Which process this is, as launchers say it, and who its neighbours are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from megatron_llama.config.schema import Config, ModelConfig, ParallelConfig
from megatron_llama.engine.comm.groups import close_mesh
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.errors import ClusterError
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh, placement_warnings
from torch.distributed import distributed_c10d

from tests.harness import Cluster

AXES = ("tp", "kv", "cp", "cp_heads", "cp_keys", "dp", "dp_gather", "pp", "pp_backward", "pp_return", "pp_backward_return", "embedding")


@dataclass(frozen=True)
class Case:
    """A grid, and what is trained on it."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    kv_heads: int = 8
    strategy: str = "optim"
    tied: bool = False
    schedule: str = "1f1b"
    virtual: int = 1
    groups: dict[str, int] = field(default_factory=dict)
    """Communicators of each axis, on all ranks together."""

    @property
    def config(self) -> Config:
        parallel = ParallelConfig(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            context_parallel_size=self.cp,
            data_parallel_sharding_strategy=self.strategy,
            pipeline_schedule=self.schedule,
            virtual_pipeline_model_parallel_size=self.virtual,
        )
        model = ModelConfig(num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=self.kv_heads, tie_word_embeddings=self.tied)
        return Config(model=model, parallel=parallel)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp


@dataclass(frozen=True)
class Found:
    """One rank's place on every axis: its position and the ranks of the axis."""

    axes: dict[str, tuple[int, tuple[int, ...]]]
    own_groups: int
    all_groups: int
    data: tuple[int, int]


def build(place: Place, case: Case) -> Found:
    before = distributed_c10d._world.group_count
    mesh = build_mesh(case.config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    assert mesh.dp_gather.group is mesh.dp_shard.group, "one communicator: messages keep their order"
    assert (mesh.rank, mesh.world.rank, mesh.world.size) == (place.rank, place.rank, place.world_size)
    own = len(distributed_c10d._world.pg_map) - (place.world_size > 1)
    made = distributed_c10d._world.group_count - before
    found: dict[str, Axis] = {name: axis for name in AXES if (axis := getattr(mesh, name)) is not None}
    for axis in found.values():
        assert axis.ranks[axis.rank] == place.rank and (axis.group is None) == (axis.size == 1)
    close_mesh()
    return Found({name: (axis.rank, axis.ranks) for name, axis in found.items()}, own, made, (mesh.data_rank, mesh.data_size))


GRIDS = [
    (2, 2, 1, 2),
    (4, 1, 1, 2),
    (1, 2, 1, 4),
    (4, 2, 1, 1),
    (1, 1, 1, 8),
    (3, 2, 1, 1),
    (2, 1, 2, 2),
    (1, 2, 2, 2),
    (1, 1, 4, 2),
    (1, 1, 1, 1),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("pp", "dp", "cp", "tp"), GRIDS)
def test_neighbours(pp: int, dp: int, cp: int, tp: int, cluster: Cluster) -> None:
    """Global rank = ((pipeline rank x dp + replica) x cp + part of the sequence) x tp + tensor rank: tensor ranks share a
    machine, pipeline ranks are farthest apart."""
    for rank, found in enumerate(cluster.run(pp * dp * cp * tp, build, Case(pp, dp, cp, tp, tied=True))):
        stage, replica, part, tensor = (rank // (dp * cp * tp), rank // (cp * tp) % dp, rank // tp % cp, rank % tp)

        def at(stage: int, replica: int, part: int, tensor: int) -> int:
            return ((stage * dp + replica) * cp + part) * tp + tensor

        line = tuple(at(s, replica, part, tensor) for s in range(pp))
        data = tuple(at(stage, r, c, tensor) for r in range(dp) for c in range(cp))
        ends = tuple(dict.fromkeys((line[0], line[-1]))) if rank in (line[0], line[-1]) else (rank,)
        assert found.axes == {
            "tp": (tensor, tuple(at(stage, replica, part, t) for t in range(tp))),
            "kv": (0, (rank,)),
            "cp": (part, tuple(at(stage, replica, c, tensor) for c in range(cp))),
            "dp": (replica * cp + part, data),
            "dp_gather": (replica * cp + part, data),
            "pp": (stage, line),
            "pp_backward": (stage, line),
            "embedding": (ends.index(rank), ends),
        }
        assert found.data == (replica, dp), "context-parallel ranks read the same samples"


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(dp=2, groups={"dp": 1}),
        Case(dp=2, strategy="no_shard", groups={"dp": 1}),
        Case(tp=2, dp=2, groups={"tp": 2, "dp": 2}),
        Case(cp=2, groups={"cp": 1, "dp": 1}),
        Case(cp=2, dp=2, strategy="optim_grads", groups={"cp": 2, "dp": 1}),
        Case(pp=2, groups={"pp": 1, "pp_backward": 1}),
        Case(pp=2, tied=True, groups={"pp": 1, "pp_backward": 1, "embedding": 1}),
        Case(pp=4, tied=True, groups={"pp": 1, "pp_backward": 1, "embedding": 1}),
        Case(
            pp=2,
            tied=True,
            schedule="interleaved",
            virtual=2,
            groups={"pp": 1, "pp_backward": 1, "pp_return": 1, "pp_backward_return": 1, "embedding": 1},
        ),
        Case(pp=2, tied=True, schedule="zb-v", groups={"pp": 1, "pp_backward": 1, "pp_return": 1, "pp_backward_return": 1}),
        Case(pp=2, schedule="zb-h1", groups={"pp": 1, "pp_backward": 1}),
        Case(tp=4, kv_heads=4, groups={"tp": 1}),
        Case(tp=4, kv_heads=2, groups={"tp": 1, "kv": 2}),
        Case(tp=4, kv_heads=2, dp=2, groups={"tp": 2, "kv": 4, "dp": 4}),
        Case(tp=4, kv_heads=1, groups={"tp": 1}),
    ],
    ids=lambda case: " ".join(f"{name}={value}" for name, value in vars(case).items() if value != getattr(Case(), name) and name != "groups"),
)
def test_communicators_are_made_only_where_they_are_used(case: Case, cluster: Cluster) -> None:
    for rank, found in enumerate(cluster.run(case.world_size, build, case)):
        here = {name for name, (_, ranks) in found.axes.items() if len(ranks) > 1}
        here -= {"dp_gather"}  # one communicator with dp
        assert here <= case.groups.keys(), rank
        # The ranks between the first and the last stage have no part in tied embeddings.
        assert case.groups.keys() - here <= ({"embedding"} if 0 < rank < case.world_size - 1 else set()), rank
        assert found.own_groups == len(here), "every communicator is on an axis"
        assert found.all_groups == sum(case.groups.values())


def test_ranks_that_share_a_key_value_head_are_neighbours(cluster: Cluster) -> None:
    for rank, found in enumerate(cluster.run(8, build, Case(tp=8, kv_heads=2))):
        first = rank // 4 * 4
        assert found.axes["kv"] == (rank % 4, tuple(range(first, first + 4)))


def divided(place: Place, config: Config) -> dict[str, tuple[int, ...]]:
    """The ranks of the axes of experts."""
    mesh = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    assert mesh.ep is not None and mesh.experts is not None
    same = mesh.experts
    found = {"ep": mesh.ep, "dp": same.dp, "shard": same.shard, "replica": same.replica, "gather": same.gather}
    for axis in found.values():
        assert axis.ranks[axis.rank] == place.rank and (axis.group is None) == (axis.size == 1)
    close_mesh()
    return {name: axis.ranks for name, axis in found.items()}


@pytest.mark.parametrize(("dp", "cp", "tp", "ep", "strategy"), [(4, 1, 2, 2, "optim"), (4, 2, 1, 2, "optim_grads_params"), (6, 1, 1, 3, "no_shard"), (2, 2, 2, 2, "optim")])
def test_neighbours_divide_experts(dp: int, cp: int, tp: int, ep: int, strategy: Any, cluster: Cluster) -> None:
    """Of the data-parallel ranks, with the same part of the sequence. Every ``ep``-th one has the same experts, whatever its part."""
    case = Case(1, dp, cp, tp, strategy=strategy).config
    config = replace(case, parallel=replace(case.parallel, expert_model_parallel_size=ep))
    for rank, found in enumerate(cluster.run(dp * cp * tp, divided, config)):
        replica, part, tensor = rank // (cp * tp), rank // tp % cp, rank % tp
        first = replica // ep * ep
        assert found["ep"] == tuple((first + number) * cp * tp + part * tp + tensor for number in range(ep))
        same = tuple((r * cp + c) * tp + tensor for r in range(replica % ep, dp, ep) for c in range(cp))
        sharded = strategy != "no_shard"
        assert found["dp"] == same
        assert found["shard"] == found["gather"] == (same if sharded else (rank,))
        assert found["replica"] == ((rank,) if sharded else same)


def test_experts_that_do_not_divide() -> None:
    config = Case(dp=3).config
    config = replace(config, parallel=replace(config.parallel, expert_model_parallel_size=2))
    with pytest.raises(ClusterError, match="expert parallel size: got 2, expected a divisor of the 3 data-parallel ranks"):
        build_mesh(config, rank=0, world_size=3, device=torch.device("cpu"))


def test_a_world_that_does_not_factor() -> None:
    want = r"number of processes: got 6, expected a multiple of tensor x context x pipeline parallel size \(2 x 1 x 2\)"
    with pytest.raises(ClusterError, match=want):
        build_mesh(Case(tp=2, pp=2).config, rank=0, world_size=6, device=torch.device("cpu"))


def test_a_single_process_has_no_groups() -> None:
    mesh = Mesh.single()
    assert {axis.size for name in ("world", *AXES) if (axis := getattr(mesh, name)) is not None} == {1}
    assert mesh.world.group is None and (mesh.rank, mesh.data_rank, mesh.data_size) == (0, 0, 1)


@pytest.mark.parametrize(
    ("tp", "per_machine", "warns"),
    [(1, 3, False), (2, 8, False), (8, 8, False), (4, 6, True), (16, 8, True), (3, 8, True), (2, 1, True), (16, 0, False)],
)
def test_tensor_parallel_ranks_that_do_not_fit_a_machine_are_warned_about(tp: int, per_machine: int, warns: bool) -> None:
    """0 processes per machine: the launcher did not say."""
    warnings = placement_warnings(ParallelConfig(tensor_model_parallel_size=tp), per_machine)
    expected = f"tensor parallel size {tp} does not divide the {per_machine} processes of a machine: its traffic leaves the machine"
    assert warnings == ([expected] if warns else [])
