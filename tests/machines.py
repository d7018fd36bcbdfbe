"""Machines that are network namespaces of this one, each with a name, a file of hosts and interfaces of its own, joined by
virtual cables. Nothing of it can be seen from outside, and all of it goes with its processes. It needs root, or a system that
gives every user namespaces of their own."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pyroute2 import IPRoute

from tests.harness import PRELOAD

NEW_MOUNTS, NEW_NAME, NEW_USER, NEW_NETWORK = 0x00020000, 0x04000000, 0x10000000, 0x40000000
BIND, PRIVATE = 0x1000, 0x4000 | 0x40000
NOT_ALLOWED = 77
"""Exit status where the system refuses namespaces."""
PATIENCE = 240.0
"""Seconds after which a test of machines fails: they wait for each other."""


@dataclass(frozen=True)
class Machine:
    """One machine. Interfaces of one name are one cable; one that only a single machine has leads nowhere."""

    name: str
    interfaces: Mapping[str, Sequence[str]]
    """Addresses by interface, as 10.0.0.1/24."""
    hosts: str
    """Its /etc/hosts."""
    environ: Mapping[str, str] = field(default_factory=dict)


def run_on(machines: Sequence[Machine], work: Callable[[int], None], folder: Path) -> list[str]:
    """Call ``work(index)`` once on every machine, and return what each has said on stderr."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "tests.machines"])
    process = context.Process(target=_cluster, args=(machines, work, folder), daemon=False)
    process.start()
    process.join(PATIENCE)
    code = process.exitcode
    process.kill()  # and with the cluster its machines: they hold pipes that it holds
    process.join()
    assert code != NOT_ALLOWED, "no network namespaces are allowed here: run this test as root, or allow user namespaces"
    said = [(folder / f"{machine.name}.err").read_text() for machine in machines]
    assert code == 0, f"the machines ended with {code}\n" + "\n".join(said)
    return said


def _cluster(machines: Sequence[Machine], work: Callable[[int], None], folder: Path) -> None:
    """Be the cables: start every machine, join them, and wait for all."""
    os.setpgid(0, 0)
    try:
        if os.geteuid():
            user = os.getuid()
            _unshare(NEW_USER)
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        _unshare(NEW_NETWORK | NEW_MOUNTS)
    except PermissionError:
        os._exit(NOT_ALLOWED)
    pids = []
    lines = []
    for index, machine in enumerate(machines):
        there, here = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _become(machine, here, lambda index=index: work(index), folder)
        assert there.recv(1) == b"r", "a machine could not be made"
        pids.append(pid)
        lines.append(there)
    with IPRoute() as network:
        for number, name in enumerate(sorted({name for machine in machines for name in machine.interfaces} - {"lo"})):
            ends = [pid for pid, machine in zip(pids, machines, strict=True) if name in machine.interfaces]
            assert len(ends) <= 2, "a cable has two ends"
            nowhere = {"ifname": f"end{number}"}
            peer = {"ifname": name, "net_ns_pid": ends[1]} if len(ends) == 2 else nowhere
            network.link("add", ifname=name, kind="veth", net_ns_pid=ends[0], peer=peer)
    for line in lines:
        line.send(b"c")
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os._exit(max(map(abs, codes)))


def _become(machine: Machine, line: socket.socket, work: Callable[[], None], folder: Path) -> None:
    """Be a machine, and never return."""
    code = 1
    try:
        os.dup2(os.open(folder / f"{machine.name}.err", os.O_WRONLY | os.O_CREAT), 2)
        _unshare(NEW_NETWORK | NEW_MOUNTS | NEW_NAME)
        socket.sethostname(machine.name)
        _checked(_libc.mount(b"none", b"/", None, PRIVATE, None))
        for path, content in (("/etc/hosts", machine.hosts), ("/etc/resolv.conf", "")):
            own = folder / f"{machine.name}{path.replace('/', '.')}"
            own.write_text(content)
            if Path(path).exists():
                _checked(_libc.mount(os.fsencode(own), os.fsencode(path), None, BIND, None))
        line.send(b"r")
        assert line.recv(1) == b"c"
        with IPRoute() as network:
            for name, addresses in {"lo": (), **machine.interfaces}.items():
                index = network.link_lookup(ifname=name)[0]
                network.link("set", index=index, state="up")
                for address in addresses:
                    # Without a wait for others who may have the same address.
                    at_once = {"flags": 2} if ":" in address else {}
                    network.addr("add", index=index, address=address.split("/")[0], prefixlen=int(address.split("/")[1]), **at_once)
        os.environ.update(machine.environ)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


_libc = ctypes.CDLL(None, use_errno=True)


def _unshare(what: int) -> None:
    _checked(_libc.unshare(what))


def _checked(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise PermissionError(number, os.strerror(number))
