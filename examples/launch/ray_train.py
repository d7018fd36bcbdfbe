"""Start a command on the machines of a Ray cluster, one process for each GPU:

    python examples/launch/ray_train.py --workers 32 -- pretrain --config FILE [options]

Ray Train places the workers, and starts all of them again when one fails. The run must have
`load: auto`, so that it resumes where it stopped. Every worker starts the command with the
variables that torchrun would set, so it is the same program as under any other launcher. Ray's own
process has no torch in it, and makes no process group.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
from functools import partial

import ray
from ray import train
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

PR_SET_PDEATHSIG = 1


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def work(job: dict[str, list[str]]) -> None:
    """What every worker does: be one rank, until the command ends."""
    here = train.get_context()
    # A new port for each attempt: what an earlier one has left cannot answer this one.
    first = here.get_world_rank() == 0
    host, port = broadcast_from_rank_zero(
        (ray.util.get_node_ip_address(), free_port()) if first else None
    )
    place = {
        "RANK": here.get_world_rank(),
        "WORLD_SIZE": here.get_world_size(),
        "LOCAL_RANK": here.get_local_rank(),
        "LOCAL_WORLD_SIZE": here.get_local_world_size(),
        "GROUP_RANK": here.get_node_rank(),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    environ = {**os.environ, **{name: str(value) for name, value in place.items()}}
    environ.setdefault("OMP_NUM_THREADS", "1")
    python = os.environ.get("PYTHON", sys.executable)
    command = [python, "-u", "-m", "megatron_llama", *job["command"]]
    # Linux ends the command when its worker ends: else it would keep its GPU. The function is
    # looked up here because a child of a process with threads may not load anything.
    follow_worker = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
    # A failed command is a failed worker.
    subprocess.run(command, env=environ, cwd=job["folder"][0], check=True, preexec_fn=follow_worker)


def main() -> None:
    """Start the workers, and wait until the command has ended on all of them."""
    parser = argparse.ArgumentParser(
        prog="examples/launch/ray_train.py",
        description="Start a command of megatron_llama on the machines of a Ray cluster.",
    )
    parser.add_argument("--workers", type=int, required=True, help="processes in all")
    parser.add_argument("--no-gpu", action="store_true", help="on processors, without GPUs")
    parser.add_argument("--restarts", type=int, default=10, help="how often all start again")
    parser.add_argument("--storage", help="folder of Ray's own notes, which all machines see")
    parser.add_argument("command", nargs="+", help="-- and the command with its options")
    given = parser.parse_args()
    trainer = DataParallelTrainer(
        work,
        train_loop_config={"command": given.command, "folder": [os.getcwd()]},
        scaling_config=train.ScalingConfig(num_workers=given.workers, use_gpu=not given.no_gpu),
        run_config=train.RunConfig(
            name="megatron-llama",
            storage_path=given.storage,
            failure_config=train.FailureConfig(max_failures=given.restarts),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
