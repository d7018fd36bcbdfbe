"""Which process this is, as launchers say it, and who its neighbours are."""

from __future__ import annotations

import pytest

from megatron_llama.config import ParallelConfig
from megatron_llama.errors import ClusterError
from megatron_llama.mesh import Mesh, Place, build_mesh, close_mesh, first_host, place_from_environment
from tests.harness import Cluster

TORCHRUN = {"RANK": "13", "WORLD_SIZE": "32", "LOCAL_RANK": "5", "MASTER_ADDR": "node7", "MASTER_PORT": "1234"}
SLURM = {"SLURM_PROCID": "13", "SLURM_NTASKS": "32", "SLURM_LOCALID": "5", "SLURM_JOB_ID": "4123456", "SLURM_STEP_NODELIST": "gpu[03-06]"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, Place(0, 1, 0)),
        (TORCHRUN, Place(13, 32, 5, "node7", 1234)),
        (SLURM, Place(13, 32, 5, "gpu03", 20000 + 4123456 % 20000)),
        ({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "99"}, Place(13, 32, 5, "head", 99)),
        ({**SLURM, "WORLD_SIZE": "4"}, Place(13, 32, 5, "gpu03", 20000 + 4123456 % 20000)),
        ({**SLURM, **TORCHRUN}, Place(13, 32, 5, "node7", 1234)),
        ({"WORLD_SIZE": "4"}, Place(0, 1, 0)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "a,b"}, Place(1, 2, 1, "a", 20000 + 9500)),
    ],
    ids=["alone", "torchrun", "slurm", "slurm+master", "slurm+stray", "torchrun-in-slurm", "stray", "slurm-least"],
)
def test_place(environ: dict[str, str], place: Place) -> None:
    assert place_from_environment(environ) == place


def test_an_unreadable_place_is_named() -> None:
    with pytest.raises(ClusterError, match="environment variable WORLD_SIZE: got 'four', expected an integer; unset it"):
        place_from_environment({**TORCHRUN, "WORLD_SIZE": "four"})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu8", "gpu7"),
        ("gpu[03-07,9],login", "gpu03"),
        ("gpu[12,15]", "gpu12"),
        ("gpu[8]-ib,gpu[1-3]", "gpu8-ib"),
        ("login,gpu[03-07]", "login"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def axes(place: Place, tp: int, pp: int) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Rank and members of every axis of one process."""
    mesh = build_mesh(
        ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp),
        rank=place.rank,
        world_size=place.world_size,
        device=Mesh.single().device,
    )
    assert (mesh.rank, mesh.world.rank, mesh.world.size) == (place.rank, place.rank, place.world_size)
    assert mesh.dp_gather.ranks == mesh.dp.ranks and mesh.pp_backward.ranks == mesh.pp.ranks
    assert mesh.is_first_stage == (mesh.pp.rank == 0) and mesh.is_last_stage == (mesh.pp.rank == pp - 1)
    for axis in (mesh.tp, mesh.dp, mesh.dp_gather, mesh.pp, mesh.pp_backward, mesh.embedding):
        assert axis.ranks[axis.rank] == place.rank and (axis.group is None) == (axis.size == 1)
    close_mesh()
    return {name: (getattr(mesh, name).rank, getattr(mesh, name).ranks) for name in ("pp", "dp", "tp", "embedding")}


@pytest.mark.parametrize(("pp", "dp", "tp"), [(2, 2, 2), (4, 1, 2), (1, 2, 4), (4, 2, 1), (1, 1, 8), (3, 2, 1), (1, 1, 1)])
def test_neighbours(pp: int, dp: int, tp: int, cluster: Cluster) -> None:
    """Global rank = (pipeline stage x dp + replica) x tp + tensor rank: tensor ranks share a machine, stages are farthest apart."""
    for rank, found in enumerate(cluster.run(pp * dp * tp, axes, tp, pp)):
        stage, replica, tensor = rank // (dp * tp), rank // tp % dp, rank % tp
        line = tuple((s * dp + replica) * tp + tensor for s in range(pp))
        ends = tuple(dict.fromkeys((line[0], line[-1])))
        assert found == {
            "tp": (tensor, tuple((stage * dp + replica) * tp + t for t in range(tp))),
            "dp": (replica, tuple((stage * dp + r) * tp + tensor for r in range(dp))),
            "pp": (stage, line),
            "embedding": (ends.index(rank), ends) if rank in ends else (0, (rank,)),
        }


def test_a_world_that_does_not_factor() -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    with pytest.raises(ClusterError, match=r"number of processes: got 6, expected a multiple of tensor x pipeline parallel size \(2 x 2\)"):
        build_mesh(parallel, rank=0, world_size=6, device=Mesh.single().device)


def test_a_single_process_has_no_groups() -> None:
    mesh = Mesh.single()
    assert [axis.size for axis in (mesh.world, mesh.tp, mesh.dp, mesh.pp, mesh.embedding)] == [1] * 5
    assert mesh.is_first_stage and mesh.is_last_stage and mesh.world.group is None
