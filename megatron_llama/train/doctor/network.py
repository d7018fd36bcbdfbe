"""The network interfaces of this machine, and the addresses of its name."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from megatron_llama.launch.network import GLOO, interfaces_by_address, is_loopback, resolved
from megatron_llama.train.doctor.findings import Finding


def network() -> Iterator[Finding]:
    """Yield the interfaces with their addresses, and the addresses of the machine's name.

    A name that leads to loopback is no problem by itself: processes of one machine meet there, and
    those of several take the interface that leads to rank 0."""
    addresses: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    for address, name in interfaces_by_address().items():
        addresses.setdefault(name, []).append(str(address))
    for name, own in addresses.items():
        yield Finding(name, ", ".join(own) or "no address")
    host = socket.gethostname()
    try:
        leads_to = resolved(host)
    except socket.gaierror as error:
        value = f"{host}, which cannot be resolved ({error.strerror})"
        expected = "a name that leads to this machine: torchrun and gloo ask for it"
        yield Finding("host name", value, expected, do=f"add {host} to /etc/hosts, or set {GLOO}")
        return
    only_here = ", this machine alone" if all(map(is_loopback, leads_to)) else ""
    yield Finding("host name", f"{host}, which is {', '.join(leads_to)}{only_here}")
