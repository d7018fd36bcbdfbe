"""Which interface leads to the other machines: real ones as far as a process can see (``tests/machines.py``)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_llama.config.schema import ParallelConfig
from megatron_llama.engine.comm.groups import close_mesh
from megatron_llama.errors import ClusterError
from megatron_llama.launch import network
from megatron_llama.launch.join import join
from megatron_llama.launch.launcher import Place, place_from_environment
from megatron_llama.launch.network import interface_of, require_master
from torch.distributed import DistError, HashStore, Store  # type: ignore[attr-defined]

from tests.machines import Machine, run_on

SIZES = (1, 2)
"""Processes of the two machines."""
LOCALHOST = "127.0.0.1 localhost\n"


HOLD_SECONDS = 3.0


class SlowReader:
    """A store whose user has all the others go first: it reads when the host of the store has left, or stays."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def get(self, key: str) -> bytes:
        self.store.wait([key])
        deadline = time.monotonic() + HOLD_SECONDS
        with suppress(DistError):
            while time.monotonic() < deadline:
                self.store.check([key])
        return self.store.get(key)


class Counted:
    """A store that counts the values that its user reads."""

    def __init__(self, store: Store) -> None:
        self.store, self.read = store, 0

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        self.read += 1
        return self.store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.read += len(keys)
        return self.store.multi_get(keys)


@pytest.mark.parametrize(("sources", "expected"), [(["a", "a", "a"], None), ([None, "b", "b"], "b"), ([None, None, None], None), (["b", "a", None], "b")])
def test_rank_0_alone_reads_what_all_ranks_say(sources: list[str | None], expected: str | None) -> None:
    """In a job of thousands the store answers each value that is read, one after the other."""
    shared = HashStore()
    stores = [Counted(shared) for _ in sources]

    def ask(rank: int) -> str | None:
        return network._agreed(stores[rank], Place(rank, len(sources), 0), "source", sources[rank], network._other_machine)  # type: ignore[arg-type]

    with ThreadPoolExecutor(len(sources)) as pool:
        assert list(pool.map(ask, range(len(sources)))) == [expected] * len(sources)
    assert [store.read for store in stores] == [len(sources) + 1, 1, 1]


@dataclass(frozen=True)
class Ranks:
    """The processes of a machine: each joins the others, adds up all ranks, and writes what it found."""

    folder: Path
    minutes: float = 1.0
    slow: int | None = None
    """A rank that reads last what all have written into the store."""

    def __call__(self, machine: int) -> None:
        first = sum(SIZES[:machine])
        pids = []
        for local in range(SIZES[machine]):
            pid = os.fork()
            if pid == 0:
                self._be(machine, first + local, local)
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)

    def _be(self, machine: int, rank: int, local: int) -> None:
        launched = {"RANK": rank, "WORLD_SIZE": sum(SIZES), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": SIZES[machine], "GROUP_RANK": machine}
        os.environ.update({name: str(value) for name, value in launched.items()}, MASTER_PORT="29500")
        if rank == self.slow:
            agreed = network._agreed
            network._agreed = lambda store, *args: agreed(SlowReader(store), *args)  # type: ignore[arg-type]
        try:
            join(ParallelConfig(distributed_timeout_minutes=self.minutes), place_from_environment())
            ranks = torch.tensor(float(rank))
            dist.all_reduce(ranks)
            close_mesh()
            found = [ranks.item(), os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")]
        except ClusterError as error:
            found = [str(error)]
        (self.folder / f"{rank}.json").write_text(json.dumps(found))
        os._exit(0)


def found_by_ranks(machines: Sequence[Machine], folder: Path, minutes: float = 1.0, slow: int | None = None) -> list[list[object]]:
    said = run_on(machines, Ranks(folder, minutes, slow), folder)
    files = [folder / f"{rank}.json" for rank in range(sum(SIZES))]
    return [json.loads(file.read_text()) if file.exists() else [f"died: {said}"] for file in files]


LOOPBACK_NAMES = (
    Machine("alpha", {"net1": ["10.2.0.1/24"]}, LOCALHOST + "127.0.1.1 alpha\n10.2.0.2 beta\n", {"MASTER_ADDR": "alpha"}),
    Machine("beta", {"net1": ["10.2.0.2/24"]}, LOCALHOST + "127.0.1.1 beta\n10.2.0.1 alpha\n", {"MASTER_ADDR": "alpha"}),
)
"""As Debian installs them: a machine's own name is 127.0.1.1."""


def named(machines: Sequence[Machine], **environ: str) -> tuple[Machine, ...]:
    return tuple(replace(machine, environ={**machine.environ, **environ}) for machine in machines)


def two_interfaces() -> tuple[Machine, ...]:
    """Names are addresses of an interface that leads nowhere."""
    first = Machine("alpha", {"adm0": ["10.1.0.1/32"], "net1": ["10.2.0.1/24"]}, LOCALHOST + "10.1.0.1 alpha\n", {"MASTER_ADDR": "10.2.0.1"})
    second = Machine("beta", {"adm1": ["10.1.0.2/32"], "net1": ["10.2.0.2/24"]}, LOCALHOST + "10.1.0.2 beta\n", {"MASTER_ADDR": "10.2.0.1"})
    return first, second


def version_6() -> tuple[Machine, ...]:
    """No other addresses, and names that are ::1."""
    environ = {"MASTER_ADDR": "fd00::1"}
    return tuple(Machine(name, {"net1": [f"fd00::{end}/64"]}, f"::1 localhost {name}\n", environ) for end, name in ((1, "alpha"), (2, "beta")))


@pytest.mark.long
@pytest.mark.parametrize(
    "machines",
    [
        pytest.param(LOOPBACK_NAMES, id="names that lead to themselves"),
        pytest.param(two_interfaces(), id="two interfaces"),
        pytest.param(version_6(), id="IPv6 only"),
        pytest.param(
            tuple(replace(machine, hosts=LOCALHOST) for machine in named(LOOPBACK_NAMES, MASTER_ADDR="10.2.0.1")),
            id="names that nobody knows",
        ),
    ],
)
def test_machines_find_the_interface_that_leads_to_the_others(machines: Sequence[Machine], tmp_path: Path) -> None:
    """With one process on the first and two on the second."""
    assert found_by_ranks(machines, tmp_path) == [[3.0, "net1", "=net1"]] * 3


def test_what_a_user_has_chosen_stays(tmp_path: Path) -> None:
    machines = named(two_interfaces(), GLOO_SOCKET_IFNAME="net1", NCCL_SOCKET_IFNAME="ib")
    assert found_by_ranks(machines, tmp_path) == [[3.0, "net1", "ib"]] * 3


@pytest.mark.long
@pytest.mark.parametrize("slow", [None, 2])
def test_an_interface_that_leads_nowhere_is_refused_on_all_ranks(slow: int | None, tmp_path: Path) -> None:
    """Also on a rank that still reads why when all others have."""
    first, second = LOOPBACK_NAMES
    machines = (first, replace(second, environ={**second.environ, "GLOO_SOCKET_IFNAME": "lo"}))
    refused = ("the network of rank 1 on beta: got GLOO_SOCKET_IFNAME=lo, expected an interface that reaches the other machines, as net1 does; ")
    assert (
        found_by_ranks(machines, tmp_path, slow=slow)
        == [[f"{refused}set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) on that machine to one of lo, net1"]] * 3
    )


def test_an_address_that_no_interface_has(tmp_path: Path) -> None:
    """An address of the loopback, which is reached all the same: gloo would take the first one there, 127.0.0.1."""
    machines = (
        Machine("alpha", {"lo": ["10.9.0.1/32"], "net1": ["10.9.0.3/24"]}, LOCALHOST + "127.0.1.1 alpha\n", {"MASTER_ADDR": "10.9.0.1"}),
        Machine("beta", {"net1": ["10.9.0.2/24"]}, LOCALHOST + "127.0.1.1 beta\n", {"MASTER_ADDR": "10.9.0.1"}),
    )
    for found in found_by_ranks(machines, tmp_path):
        assert str(found[0]).startswith("the network of rank 0 on alpha: got the name alpha, which is 127.0.1.1 there, expected "), found


@pytest.mark.soak
def test_a_first_machine_that_is_called_localhost(tmp_path: Path) -> None:
    """What torchrun gives out where the full name of the first machine is localhost."""
    found = found_by_ranks(named(LOOPBACK_NAMES, MASTER_ADDR="localhost"), tmp_path, minutes=0.1)
    for rank in (1, 2):
        assert str(found[rank][0]).startswith(
            f"MASTER_ADDR on rank {rank}: got localhost, which is 127.0.0.1: beta itself and not the machine"
        ), found
        assert "--local-addr" in str(found[rank][0])
    assert str(found[0][0]).startswith("rank 1, 2: got no sign of it")


def test_a_name_that_cannot_be_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "RESOLVE_SECONDS", 0.0)
    with pytest.raises(ClusterError, match=r"MASTER_ADDR on rank 1: got nowhere.invalid, a name that \S+ cannot resolve \(.+\), expected "):
        require_master(Place(1, 2, 0, "nowhere.invalid", machine=1))


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None and interface_of("2001:db8::1") is None
