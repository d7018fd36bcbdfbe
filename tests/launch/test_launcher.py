"""Which process this is, as launchers say it; and what they say by halves, or two of them at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron_llama.errors import ClusterError
from megatron_llama.launch.launcher import Place, first_host, place_from_environment

TORCHRUN = {
    "RANK": "13", "WORLD_SIZE": "32", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1", "MASTER_ADDR": "node7",
    "MASTER_PORT": "1234", "TORCHELASTIC_RUN_ID": "none",
}
BY_HAND = {"RANK": "13", "WORLD_SIZE": "32", "LOCAL_RANK": "5", "MASTER_ADDR": "node7", "MASTER_PORT": "1234"}
JOB = {"SLURM_JOB_ID": "4123456", "SLURM_NTASKS": "32", "SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "gpu[03-06]"}
BATCH = {**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "8(x4)"}
"""What a batch script sees: everything but a step."""
SLURM = {
    **JOB, "SLURM_PROCID": "13", "SLURM_LOCALID": "5", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[03-06]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x4)",
}
ONE_A_MACHINE = {**SLURM, "SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}
PORT = 20000 + 4123456 % 20000


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, Place(0, 1, 0)),
        (TORCHRUN, Place(13, 32, 5, "node7", 1234, 8, 1)),
        (BY_HAND, Place(13, 32, 5, "node7", 1234, 0, 1)),
        (SLURM, Place(13, 32, 5, "gpu03", PORT, 8, 1)),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8(x1),24"}, Place(13, 32, 5, "gpu03", PORT, 24, 1)),
        ({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "99"}, Place(13, 32, 5, "head", 99, 8, 1)),
        ({**SLURM, "WORLD_SIZE": "4"}, Place(13, 32, 5, "gpu03", PORT, 8, 1)),
        ({**ONE_A_MACHINE, **TORCHRUN}, Place(13, 32, 5, "node7", 1234, 8, 1)),
        ({**BATCH, **TORCHRUN}, Place(13, 32, 5, "node7", 1234, 8, 1)),
        ({**SLURM, **BY_HAND}, Place(13, 32, 5, "node7", 1234, 0, 1)),
        ({"WORLD_SIZE": "4"}, Place(0, 1, 0)),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, Place(0, 1, 0)),
        ({**BATCH, "SLURM_NTASKS": "1"}, Place(0, 1, 0)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, Place(0, 1, 0)),
        ({**SLURM, "PMI_RANK": "13", "PMI_SIZE": "32"}, Place(13, 32, 5, "gpu03", PORT, 8, 1)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "3", "SLURM_JOB_NODELIST": "a,b"}, Place(1, 2, 1, "a", 20000 + 9500)),
    ],
)
def test_place(environ: dict[str, str], place: Place) -> None:
    assert place_from_environment(environ) == place


def test_whether_a_job_may_have_several_machines() -> None:
    assert place_from_environment(TORCHRUN).may_span_machines and place_from_environment(BY_HAND).may_span_machines
    assert not place_from_environment({**TORCHRUN, "LOCAL_WORLD_SIZE": "32"}).may_span_machines
    assert not Place(0, 1, 0).may_span_machines
    assert replace(Place(0, 1, 0), world_size=2).may_span_machines, "unknown"


def test_slurm_variables_that_claim_a_billion_tasks() -> None:
    """Nothing is listed by their word."""
    counts = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8(x999999999),2"}
    assert place_from_environment(counts).local_world_size == 8
    nodes = "a[" + "[" * 50_000 + "0-999999999],b"
    assert place_from_environment({**SLURM, "SLURM_STEP_NODELIST": nodes}).master_addr.startswith("a")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({**TORCHRUN, "WORLD_SIZE": "four"}, "environment variable WORLD_SIZE: got 'four', expected an integer; unset it"),
        ({**TORCHRUN, "WORLD_SIZE": "1000000000"}, "WORLD_SIZE: got .*expected an integer of at most 262,144"),
        ({**TORCHRUN, "WORLD_SIZE": "1" * 5000}, "WORLD_SIZE: got .*expected an integer"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT: got .*expected an integer of at most 65,535"),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, "LOCAL_RANK: got .*expected an integer of at least 0"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9" * 12}, "LOCAL_WORLD_SIZE: got .*expected an integer of at most"),
        ({**SLURM, "SLURM_JOB_ID": "seven"}, "environment variable SLURM_JOB_ID: got 'seven'"),
        ({**TORCHRUN, "RANK": "32"}, "RANK, WORLD_SIZE: got 32, 32, expected a rank from 0 to one less"),
        ({"RANK": "3"}, "got RANK=3 without WORLD_SIZE, MASTER_ADDR, expected all three, or none"),
        ({"RANK": "0", "MASTER_ADDR": "node7"}, "got RANK=0 MASTER_ADDR=node7 without WORLD_SIZE, "),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "without MASTER_ADDR, .*set MASTER_ADDR, or unset RANK"),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "got LOCAL_RANK=1 WORLD_SIZE=2 MASTER_ADDR=a without RANK"),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            r"got OMPI_COMM_WORLD_SIZE=2: processes that an MPI.*set RANK=\$OMPI_COMM_WORLD_RANK",
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "got PMI_SIZE=2: processes that an MPI launcher started, expected torchrun or srun"),
        (BATCH, "got a Slurm job of 32 tasks, and a process that srun has not started, .*start `srun python -m megatron_llama"),
        (JOB, "a Slurm job of 32 tasks"),
        ({**BATCH, "SLURM_STEP_ID": "4294967291"}, "a Slurm job of 32 tasks"),
        ({**BATCH, "SLURM_STEP_ID": "4294967290"}, "a Slurm job of 32 tasks"),
        ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "8"}, "a Slurm job of 16 tasks"),
        ({**SLURM, **TORCHRUN}, "got RANK=13 of 32 from torchrun, in one of 8 tasks.*`srun --ntasks-per-node=1 torchrun"),
        ({**SLURM, **BY_HAND, "RANK": "0"}, "got RANK=0 of 32 in the environment, in one of 8 tasks"),
    ],
)
def test_what_is_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        place_from_environment(environ)


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
