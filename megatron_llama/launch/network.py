"""The network interface by which the processes of several machines reach each other.

By default gloo listens on the address of the machine's own name, which many systems resolve to
127.0.0.1 or 127.0.1.1. That works on one machine; on two the processes wait for each other until a
timeout. The interface by which a process reaches the job's store leads to the other machines, so
gloo is told to listen there.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import json
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from megatron_llama.errors import ClusterError, describe
from megatron_llama.launch.launcher import Place

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
GLOO_LAZY = "TORCH_GLOO_LAZY_INIT"
"""Whether gloo connects two ranks when they first talk, instead of all ranks when a group is
made."""
RESOLVE_SECONDS = 20.0
"""How long a name may stay unknown: a cluster may publish a machine's name after its start."""
POLL_SECONDS = 0.5
READ_SECONDS = 15.0
"""How long rank 0 stays for ranks that have not yet read why all ranks leave."""
LOOPBACK = "lo"


def require_master(place: Place) -> None:
    """Raise ClusterError if MASTER_ADDR cannot be the address of the first machine: its name is
    unknown, or it leads from another machine back to that machine itself."""
    where = f"MASTER_ADDR on rank {place.rank}"
    deadline = time.monotonic() + RESOLVE_SECONDS
    while True:
        try:
            addresses = resolved(place.master_addr)
            break
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise ClusterError(
                    where,
                    got=f"{place.master_addr}, a name that {socket.gethostname()} cannot resolve "
                    f"({error.strerror})",
                    expected="a name or an address of the machine of rank 0",
                    do="give an address",
                ) from None
            time.sleep(POLL_SECONDS)
    if place.machine > 0 and all(map(is_loopback, addresses)):
        raise ClusterError(
            where,
            got=f"{place.master_addr}, which is {addresses[0]}: {socket.gethostname()} itself and "
            "not the machine of rank 0",
            expected="an address of that machine",
            do="start torchrun with --master-addr ADDRESS, or with --rdzv-endpoint and "
            "--local-addr, each machine's own address; or set MASTER_ADDR",
        )


def choose_interface(store: Store, place: Place, given: Mapping[str, str]) -> str | None:
    """Return the name of the interface that leads to the other machines. None where the backends
    need no name: on one machine, or if ``given`` (the environment) has it.

    Collective. ``store`` is the part of this attempt. Raises ClusterError, on every rank, if the
    backend of some rank would listen where no other machine can reach it."""
    if not place.may_span_machines:
        return None
    own = _source_towards(place.master_addr, place.master_port)
    source = None if is_loopback(own) else own
    remote = _agreed(store, place, "source", source, _other_machine)
    if remote is None:
        return None  # one machine
    if is_loopback(own):  # the machine of rank 0, whose name leads to itself: as others come to it
        own = _source_towards(remote, place.master_port)
    name = interface_of(own)
    problem = _agreed(store, place, "problem", _problem(place, own, name, given), _first)
    if problem is not None:
        _stay_for_readers(store, place)
        error = ClusterError(problem)
        error.everywhere = True
        raise error
    return None if GLOO in given or name == LOOPBACK else name


def _problem(place: Place, own: str, name: str | None, given: Mapping[str, str]) -> str | None:
    """Say why the other machines could not reach this process; None if they can."""
    host = socket.gethostname()
    where = f"the network of rank {place.rank} on {host}"
    names = [name for _, name in socket.if_nameindex()]
    expected = f"an interface that reaches the other machines, as {name or own} does"
    do = f"set {GLOO} (and {NCCL}) on that machine to one of {', '.join(names)}"
    if GLOO in given:
        wrong = [nic for nic in given[GLOO].split(",") if nic not in names or nic == LOOPBACK]
        got = f"{GLOO}={given[GLOO]}"
        return describe(where, got=got, expected=expected, do=do) if wrong else None
    if name not in (None, LOOPBACK):
        return None
    # The address belongs to no named interface, so gloo resolves the machine's name.
    try:
        addresses = resolved(host)
    except socket.gaierror:
        got = f"the name {host}, which cannot be resolved"
        return describe(where, got=got, expected=expected, do=do)
    if any(map(is_loopback, addresses)):
        got = f"the name {host}, which is {', '.join(addresses)} there"
        return describe(where, got=got, expected=expected, do=do)
    return None


def _agreed(
    store: Store,
    place: Place,
    what: str,
    value: str | None,
    agree: Callable[[Sequence[str | None]], str | None],
) -> str | None:
    """Return what ``agree`` makes of the values of all ranks, in rank order. Collective.

    Rank 0 alone reads them all. If every rank did, a job of 16,384 would ask its one store for
    268 million values."""
    keys = [f"{what}/{rank}" for rank in range(place.world_size)]
    store.set(keys[place.rank], json.dumps(value))
    if place.rank == 0:
        store.set(what, json.dumps(agree([json.loads(text) for text in store.multi_get(keys)])))
    agreed: str | None = json.loads(store.get(what))
    return agreed


def _first(values: Sequence[str | None]) -> str | None:
    """Return the first of the values that is one."""
    return next((value for value in values if value is not None), None)


def _other_machine(sources: Sequence[str | None]) -> str | None:
    """Return an address that a machine has for others; None if there is one machine only."""
    return _first(sources) if len(set(sources)) > 1 else None


def _stay_for_readers(store: Store, place: Place) -> None:
    """Say that this rank has read what was exchanged. Rank 0 returns when all ranks have, or after
    READ_SECONDS. It may host the store, and its end would look like a broken connection to ranks
    that still read."""
    with suppress(DistError):  # a rank is gone, or so slow that rank 0 has left without it
        store.set(_has_read(place.rank), "")
        if place.rank == 0:
            readers = [_has_read(rank) for rank in range(place.world_size)]
            store.wait(readers, timedelta(seconds=READ_SECONDS))


def _has_read(rank: int) -> str:
    return f"read/{rank}"


def _source_towards(host: str, port: int) -> str:
    """Return this machine's address on the way to ``host``. Nothing is sent."""
    problem: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_DGRAM
    ):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError as error:  # no route for this family of addresses
                problem = error
                continue
            return str(probe.getsockname()[0])
    raise ClusterError(
        f"the way to {host}",
        got=str(problem),
        expected="a network that leads to it",
        do="look at `ip route` on this machine",
    )


def resolved(host: str) -> list[str]:
    """Return the addresses of a name. Raises socket.gaierror."""
    return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None)))


def is_loopback(address: str) -> bool:
    """Whether an address leads to this machine alone."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this address; None if there is none, or on a system
    other than Linux."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    return interfaces_by_address().get(wanted)


def interfaces_by_address() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    """Return the name of the interface of each address of this machine; empty where the system does
    not tell."""
    tables = {**_ipv4_interfaces(), **_ipv6_interfaces()}
    return {ipaddress.ip_address(packed): name for packed, name in tables.items()}


def _ipv6_interfaces() -> dict[bytes, str]:
    listing = Path("/proc/net/if_inet6")
    lines = listing.read_text().splitlines() if listing.exists() else []
    return {bytes.fromhex(line.split()[0]): line.split()[-1] for line in lines}


def _ipv4_interfaces() -> dict[bytes, str]:
    """Return the kernel's list of IPv4 addresses (man 7 netdevice, SIOCGIFCONF)."""
    ask_for_addresses = 0x8912
    entry = struct.calcsize("16s24x")
    room = array.array("B", bytes(entry * 1024))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iP", len(room), room.buffer_info()[0])
        try:
            answer = fcntl.ioctl(probe.fileno(), ask_for_addresses, request)
        except OSError:
            return {}
    used, _ = struct.unpack("iP", answer)
    content = room.tobytes()[:used]
    # An entry is a name of 16 bytes, padded with zeros, and a socket address: family, port,
    # address. A second address of an interface may be named like eth0:1.
    return {
        content[start + 20 : start + 24]: content[start : start + 16]
        .split(b"\0")[0]
        .decode()
        .partition(":")[0]
        for start in range(0, used, entry)
    }
