"""Two machines, each with its own torchrun: the launcher's own options, and names that lead to themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.product import ITERS, Product, column
from tests.launch.test_network import LOOPBACK_NAMES, version_6
from tests.launcher import LAUNCHERS, ROOT
from tests.machines import Machine, run_on

PROCESSES = (1, 2)
"""Of each machine."""


@dataclass(frozen=True)
class Torchrun:
    """Starts the processes of a machine. ``rendezvous`` has the options of each machine."""

    rendezvous: Sequence[Sequence[str]]
    command: Sequence[str]

    def __call__(self, machine: int) -> None:
        environ = {name: value for name, value in os.environ.items() if name not in LAUNCHERS} | {"OMP_NUM_THREADS": "1"}
        options = ["--nnodes", "2", "--nproc-per-node", str(PROCESSES[machine]), *self.rendezvous[machine]]
        argv = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "megatron_llama", *self.command]
        subprocess.run(argv, check=True, cwd=ROOT, env=environ, stdout=2)


def static(address: str) -> list[list[str]]:
    return [["--node-rank", str(machine), "--master-addr", address] for machine in range(2)]


def c10d(endpoint: str, addresses: Sequence[str]) -> list[list[str]]:
    """torchrun asks the machine's name whether it is the host of the endpoint; here it is told."""
    options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    return [[*options, "--local-addr", address, "--rdzv-conf", f"is_host={int(address == addresses[0])}"] for address in addresses]


@pytest.mark.few(1, all=2)
@pytest.mark.long
@pytest.mark.parametrize(
    ("machines", "rendezvous"),
    [
        (LOOPBACK_NAMES, static("alpha")),
        (LOOPBACK_NAMES, c10d("10.2.0.1:29500", ["10.2.0.1", "10.2.0.2"])),
        (version_6(), c10d("[fd00::1]:29500", ["fd00::1", "fd00::2"])),
    ],
    ids=["static, by name", "c10d", "c10d, IPv6 only"],
)
def test_torchrun_on_two_machines(machines: Sequence[Machine], rendezvous: Sequence[Sequence[str]], product: Product, tmp_path: Path) -> None:
    bare = [Machine(machine.name, machine.interfaces, machine.hosts) for machine in machines]
    command = product.command(save=tmp_path / "run", global_batch_size=6, data_parallel_sharding_strategy="optim_grads")
    run_on(bare, Torchrun(rendezvous, command), tmp_path)
    assert column(tmp_path / "run", "iteration") == list(range(1, ITERS + 1))
