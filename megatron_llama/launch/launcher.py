"""The place of this process in its job, by the launcher's environment variables. Incomplete
variables, and those of two launchers, are refused: such processes would wait for each other until
the timeout, or train side by side into one folder without knowing of each other."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain

from megatron_llama.config.fields import shown
from megatron_llama.config.limits import LARGEST_RANKS
from megatron_llama.errors import ClusterError, ConfigError, describe
from megatron_llama.launch.processes import (
    Process,
    first_environment,
    parent_of,
    process_of,
    program_of,
)

LARGEST_PORT = 65535
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
LARGEST_STEP = 0xFFFFFFF0
"""The end of the numbers of srun's steps, which Slurm counts from 0. Numbers from here on are the
batch script, the shell of salloc, and what Slurm runs beside them."""
_OF_ONE_RANK = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "RANK")
"""Variables that torchrun gives to its ranks and does not have itself. A rank's children have them
too."""
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_SRUN = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_LOCALID", "SLURM_NODEID")
_GPUS = "CUDA_VISIBLE_DEVICES"
_SLURM = "slurmstepd"
MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PALS_RANKID", "PALS_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
)
"""Variables of rank and number of processes of mpirun (Open MPI, MVAPICH, MPICH and Intel), and of
Cray's and IBM's launchers."""

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_FIXED_WORKSPACES = (":4096:8", ":16:8")
"""Workspaces with which cuBLAS sums in one order. It reads the variable when it is first used."""
_ALGORITHM = "NCCL_ALGO"
_WITHOUT_SHARP = "^NVLS,NVLSTree"
_SHARP = frozenset({"nvls", "nvlstree"})
"""NVLink SHARP adds in the switch, in the order in which parts arrive: within a machine, and
between machines."""


def separate_queues(environ: MutableMapping[str, str] | None = None) -> None:
    """Let the streams of a GPU have queues of their own. Called before the device is used: CUDA
    looks once.

    A rank has 14 to 19 streams. With CUDA's 8 queues two of them share one, and a message waits
    behind a product that it does not depend on. A user who sets the variable has decided."""
    env = os.environ if environ is None else environ
    env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def register_no_graphs(environ: MutableMapping[str, str] | None = None) -> None:
    """Let NCCL leave the memory of captured messages as it is: registering it is not safe in
    segments that grow. Called before a graph is captured."""
    env = os.environ if environ is None else environ
    env.setdefault("NCCL_GRAPH_REGISTER", "0")


def fix_sums(environ: MutableMapping[str, str] | None = None) -> None:
    """Let cuBLAS and NCCL sum in a fixed order, for --deterministic-mode. Called before the device
    is used. Raises ConfigError where the environment asks for something else."""
    env = os.environ if environ is None else environ
    workspace = env.setdefault(_WORKSPACE, _FIXED_WORKSPACES[0])
    if workspace not in _FIXED_WORKSPACES:
        raise ConfigError(
            describe(
                "--deterministic-mode",
                got=f"{_WORKSPACE}={workspace}",
                expected=" or ".join(_FIXED_WORKSPACES),
                do=f"unset {_WORKSPACE}",
            )
        )
    algorithm = env.setdefault(_ALGORITHM, _WITHOUT_SHARP)
    named = set(re.split("[,;:]", algorithm.lower().removeprefix("^")))
    excludes = algorithm.startswith("^")
    if not (named >= _SHARP if excludes else named.isdisjoint(_SHARP)):
        raise ConfigError(
            describe(
                "--deterministic-mode",
                got=f"{_ALGORITHM}={algorithm}",
                expected=f"algorithms without NVLS, such as {_WITHOUT_SHARP}, Ring or Tree",
                do=f"unset {_ALGORITHM}",
            )
        )


@dataclass(frozen=True)
class Place:
    """The place of a process in its job, by its launcher (torchrun or Slurm)."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str = "localhost"
    master_port: int = 29500
    local_world_size: int = 0
    """Processes on this machine; 0 means unknown."""
    machine: int = 0
    """Number of this machine in the job: 0 for that of rank 0, and 1 for all others if the launcher
    does not count machines."""
    joined: bool = False
    """Whether the program has made the process group of all ranks itself, and keeps it."""

    @property
    def may_span_machines(self) -> bool:
        """Whether the job has several machines, or may have."""
        return self.world_size > 1 and self.local_world_size != self.world_size


def place_from_environment(environ: Mapping[str, str] | None = None) -> Place:
    """Read torchrun's variables, else Slurm's, else assume a single process. Raises ClusterError.

    Only RANK, WORLD_SIZE and MASTER_ADDR together mean torchrun: a WORLD_SIZE alone, which some
    clusters set, does not win over Slurm.
    """
    env = os.environ if environ is None else environ
    in_step = _in_slurm_step(env)
    if all(name in env for name in TORCHRUN):
        if in_step:
            _refuse_two_launchers(env)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
    elif in_step:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID")
    else:
        _refuse_half_a_launcher(env)
        return Place(0, 1, 0)
    rank = _integer(env, names[0])
    world_size = _integer(env, names[1], high=LARGEST_RANKS)
    if not 0 <= rank < world_size:
        raise ClusterError(
            f"{names[0]}, {names[1]}",
            got=f"{rank}, {world_size}",
            expected="a rank from 0 to one less than the number of processes",
            do="start with torchrun or srun",
        )
    local_rank = _integer(env, names[2], low=0, high=LARGEST_RANKS) if names[2] in env else rank
    machine = (
        _integer(env, names[3], low=0, high=LARGEST_RANKS)
        if names[3] in env
        else int(rank != local_rank)
    )
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "localhost"))
    if "MASTER_PORT" in env:
        port = _integer(env, "MASTER_PORT", low=0, high=LARGEST_PORT)
    else:  # the same on all ranks of a job, and another one for the next job on these machines
        job = _integer(env, "SLURM_JOB_ID") if "SLURM_JOB_ID" in env else 9500
        port = 20000 + job % 20000
    if "LOCAL_WORLD_SIZE" in env:
        local_size = _integer(env, "LOCAL_WORLD_SIZE", low=0, high=LARGEST_RANKS)
    else:
        local_size = _slurm_tasks_here(env) if names[0] == "SLURM_PROCID" else 0
    host = env.get("MASTER_ADDR") or first_host(nodes)
    return Place(rank, world_size, local_rank, host, port, local_size, machine)


def hide_accelerators() -> None:
    """Hide all GPUs from this process. Called before it looks for one."""
    os.environ[_GPUS] = ""


def launched_rank() -> str:
    """Return the rank of this process by its launcher, before any check."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))


def unlaunched() -> dict[str, str]:
    """Return the environment for a job that this process starts: without the variables of the
    launcher around this process."""
    names = {*TORCHRUN, *chain.from_iterable(MPI), "LOCAL_RANK", "MASTER_PORT"}
    return {
        name: value
        for name, value in os.environ.items()
        if name not in names and not name.startswith(("SLURM_", "TORCHELASTIC_"))
    }


def launcher_hosts_store() -> bool:
    """Whether the launcher holds the job's store, as torchrun does, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def become_rank(place: Place, slots: Sequence[int]) -> None:
    """Make this process the rank of a ``place``, whoever has launched it, in a job whose store is
    held by another process. ``slots``: the local ranks by the launcher of all ranks of its machine.
    Called before the process looks for its device."""
    env = os.environ
    for name in [name for name in env if name.startswith("TORCHELASTIC_RUN") or name in _SRUN]:
        del env[name]
    values = (place.rank, place.world_size, place.local_rank, place.local_world_size, place.machine)
    env.update(zip(_RANK_VARIABLES, map(str, values), strict=True))
    env.update(MASTER_ADDR=place.master_addr, MASTER_PORT=str(place.master_port))
    env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if list(slots) != list(range(len(slots))):
        # Local ranks have no gaps, so the GPUs of ranks that are gone are hidden.
        visible = env.get(_GPUS, "").split(",") if env.get(_GPUS) else []
        devices = visible or [str(slot) for slot in range(max(slots) + 1)]
        if len(devices) > max(slots):  # else the launcher shows each process its own
            env[_GPUS] = ",".join(devices[slot] for slot in slots)


def is_launched() -> bool:
    """Whether torchrun or srun has started this process, and ends it when another one has ended."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_STEP_ID" in os.environ


def launching_processes(environ: Mapping[str, str] | None = None) -> tuple[Process, ...]:
    """Return the processes on which this one depends: its parents up to the launcher, which is the
    last. Empty if no launcher owns this process, or where /proc is missing."""
    env = os.environ if environ is None else environ
    parent = process_of(os.getppid())
    if parent is None:
        return ()
    # A process that a rank has started may lack these, and is a run of its own.
    if "TORCHELASTIC_RUN_ID" not in env or not all(name in env for name in TORCHRUN):
        owned = _in_slurm_step(env) and program_of(parent.pid) == _SLURM
        return (parent,) if owned else ()
    own = {name: env.get(name) for name in _OF_ONE_RANK}
    chain = [parent]
    # A script that has started this process was started with the same variables.
    while all(first_environment(chain[-1].pid).get(name) == own[name] for name in own):
        parent = process_of(parent_of(chain[-1].pid))
        if parent is None:
            break
        chain.append(parent)
    return tuple(chain)


def job_name() -> str:
    """Return the launcher's name of the job, for people; empty without a launcher."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if "SLURM_JOB_ID" in os.environ:
        return f"Slurm job {os.environ['SLURM_JOB_ID']}"
    return f"torchrun's {run}" if run != "none" else ""  # none: its default


def start_of_processes() -> list[str]:
    """Return words that only the processes share that a launcher has started at once on this
    machine. A process without a launcher shares them with none."""
    launched = "RANK" in os.environ or "SLURM_PROCID" in os.environ
    starter = os.getppid() if launched else os.getpid()
    names = (
        *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
        *("SLURM_JOB_ID", "SLURM_STEP_ID"),
    )
    return [str(starter), *(os.environ.get(name, "") for name in names)]


def tell_torchrun(message: str) -> None:
    """Write an error where torchrun looks for it, as torch's ``record`` does. The last lines of its
    own report then say what was wrong, instead of how to get a traceback."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether srun has started this process. A batch script, and the shell of salloc, see most of
    Slurm's variables too; Slurm gives them no number of a step, or one beyond LARGEST_STEP."""
    if "SLURM_PROCID" not in env or "SLURM_NTASKS" not in env or "SLURM_STEP_ID" not in env:
        return False
    return 0 <= _integer(env, "SLURM_STEP_ID") < LARGEST_STEP


def _refuse_two_launchers(env: Mapping[str, str]) -> None:
    """Raise ClusterError if srun has started several torchruns on this machine, or processes that
    disagree with srun about who they are."""
    tasks = _slurm_tasks_here(env)
    by_torchrun = "TORCHELASTIC_RUN_ID" in env
    agreed = (env["RANK"], env["WORLD_SIZE"]) == (env["SLURM_PROCID"], env["SLURM_NTASKS"])
    if tasks < 2 or (agreed and not by_torchrun):
        return
    error = ClusterError(
        "the launcher",
        got=f"RANK={env['RANK']} of {env['WORLD_SIZE']} "
        f"{'from torchrun' if by_torchrun else 'in the environment'}, in one of {tasks} tasks that "
        "srun started on this machine",
        expected="one launcher that counts the processes",
        do="start `srun --ntasks-per-node=1 torchrun ...`, or `srun python -m megatron_llama ...` "
        f"without {', '.join(TORCHRUN)}; for separate runs side by side unset SLURM_STEP_ID",
    )
    error.everywhere = by_torchrun  # each torchrun has a rank 0, which says it once
    raise error


def _refuse_half_a_launcher(env: Mapping[str, str]) -> None:
    """Raise ClusterError if the environment says that there are other processes, but not how to
    find them."""
    alone = env.get("RANK", "0") == "0" and env.get("WORLD_SIZE") == "1"
    stray = [name for name in ("RANK", "LOCAL_RANK") if name in env]
    if stray and not alone:
        present = " ".join(f"{name}={env[name]}" for name in (*stray, *TORCHRUN[1:]) if name in env)
        missing = [name for name in TORCHRUN if name not in env]
        raise ClusterError(
            "environment",
            got=f"{present} without {', '.join(missing)}",
            expected="all three, or none of them for a single process",
            do=f"start with torchrun or srun, set {', '.join(missing)}, or unset "
            f"{', '.join(stray)}",
        )
    for rank, size in MPI:
        if rank in env and size in env and _integer(env, size) > 1:
            raise ClusterError(
                "the launcher",
                got=f"{size}={env[size]}: processes that an MPI launcher started",
                expected="torchrun or srun",
                do=f"start with one of them, or set RANK=${rank} WORLD_SIZE=${size} LOCAL_RANK "
                "MASTER_ADDR MASTER_PORT for each process",
            )
    tasks = _slurm_job_tasks(env)
    if tasks > 1:
        raise ClusterError(
            "the launcher",
            got=f"a Slurm job of {tasks} tasks, and a process that srun has not started",
            expected="one process for each task",
            do="start `srun python -m megatron_llama ...`; for a single process, unset "
            "SLURM_NTASKS and SLURM_NTASKS_PER_NODE",
        )


def _slurm_job_tasks(env: Mapping[str, str]) -> int:
    """Return the number of tasks that were requested for the job; 1 outside of a job. Where only
    --ntasks-per-node was given, some versions of Slurm do not multiply."""
    if "SLURM_JOB_ID" not in env:
        return 1
    if "SLURM_NTASKS" in env:
        return _integer(env, "SLURM_NTASKS")
    nodes = _integer(env, "SLURM_NNODES") if "SLURM_NNODES" in env else 1
    return nodes * _integer(env, "SLURM_NTASKS_PER_NODE") if "SLURM_NTASKS_PER_NODE" in env else 1


def _slurm_tasks_here(env: Mapping[str, str]) -> int:
    """Return the number of this step's tasks on this machine; 0 means unknown."""
    counts = env.get("SLURM_STEP_TASKS_PER_NODE", "")  # 8(x3),2 means 8, 8, 8, 2
    machine = _integer(env, "SLURM_NODEID") if "SLURM_NODEID" in env else 0
    counted = 0
    for tasks, times in re.findall(r"(\d{1,9})(?:\(x(\d{1,9})\))?", counts):
        counted += int(times or 1)
        if machine < counted:
            return int(tasks)
    return _integer(env, "SLURM_NTASKS_PER_NODE") if "SLURM_NTASKS_PER_NODE" in env else 0


def _integer(
    env: Mapping[str, str], name: str, *, low: int | None = None, high: int | None = None
) -> int:
    """Return the integer that a variable says. Raises ClusterError for anything else, and for one
    below ``low`` or above ``high``."""
    try:
        value = int(env[name])
    except ValueError:
        value = None
    if value is None or (low is not None and value < low) or (high is not None and value > high):
        least = "" if low is None else f" of at least {low}"
        most = "" if high is None or value is None or value <= high else f" of at most {high:,}"
        raise ClusterError(
            f"environment variable {name}",
            got=shown(env[name]),
            expected=f"an integer{most or least}",
            do="unset it",
        )
    return value


def first_host(nodelist: str) -> str:
    """Return the first machine of a Slurm node list: ``gpu[03-07,9],login`` gives ``gpu03``."""
    first_entry = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    assert first_entry is not None  # the pattern matches the empty string
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first_entry[0])
