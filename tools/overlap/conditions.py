"""A network that misbehaves, on a timetable: rates that alternate, links that stall."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from tools.overlap.hosts import Hosts, RigError, limit
from tools.overlap.job import bits_per_second

CLONE_NEWNET = 0x40000000
KICK = b"\xff" * 6 + b"\x02" + bytes(5) + b"\x88\xb5"
"""An Ethernet frame that nobody takes (EtherType for local experiments)."""
STALL = ["tbf", "rate", "8kbit", "burst", "2kb", "limit", "64mb"]


class Limits:
    """The rate limits of a cluster while it runs: one ``tc`` for each namespace reads changes from
    a pipe, in microseconds."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._pipes: dict[str, subprocess.Popen[str]] = {}
        self.rates = list(hosts.rates)

    def __enter__(self) -> Self:
        for namespace in (self._hosts.switch, *map(self._hosts.host, range(self._hosts.count))):
            words = ["tc", "-n", namespace, "-batch", "-"]
            self._pipes[namespace] = subprocess.Popen(
                words, stdin=subprocess.PIPE, text=True, start_new_session=True
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pipe in self._pipes.values():
            assert pipe.stdin is not None
            pipe.stdin.close()
            pipe.wait()

    def set(self, rates: Iterable[str]) -> None:
        """New rates for every cable, in both directions."""
        self.rates = list(rates)
        for number, rate in enumerate(self.rates):
            self._change(self._hosts.host(number), "eth0", limit(rate))
            self._change(self._hosts.switch, self._hosts.port(number), limit(rate))

    def stall(self) -> None:
        """The switch passes on nothing."""
        for number in range(self._hosts.count):
            self._change(self._hosts.switch, self._hosts.port(number), STALL)

    def resume(self) -> None:
        """The switch passes on again what it has, and more."""
        for number, rate in enumerate(self.rates):
            self._change(self._hosts.switch, self._hosts.port(number), limit(rate))

    def _change(self, namespace: str, device: str, words: list[str]) -> None:
        pipe = self._pipes[namespace].stdin
        assert pipe is not None
        pipe.write(f"qdisc change dev {device} root {' '.join(words)}\n")
        pipe.flush()


@dataclass
class Timetable:
    """Something that happens over and over while the ranks run, in a thread."""

    body: Callable[[threading.Event], None]
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _error: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            self.body(self._stop)
        except BaseException as error:
            self._error = error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()
        if self._error is not None and error is None:
            raise RigError(
                f"the timetable of the network broke off: {self._error}"
            ) from self._error


def alternating(limits: Limits, phases: list[tuple[str, float]]) -> Timetable:
    """Every cable has one rate after the other, each for so many seconds."""

    def body(stop: threading.Event) -> None:
        while True:
            for rate, seconds in phases:
                limits.set([rate] * len(limits.rates))
                if stop.wait(seconds):
                    return

    return Timetable(body)


@dataclass
class Stalls:
    """How often the switch stalled, and how much it passed on meanwhile, over what the cables could
    have carried."""

    count: int = 0
    seconds: float = 0.0
    passed: float = 0.0
    capacity: float = 0.0

    def __str__(self) -> str:
        share = self.passed / self.capacity if self.capacity else 0.0
        return (
            f"{self.count} stalls of {self.seconds / max(1, self.count) * 1e3:.0f} ms; "
            f"{share:.1%} of what the cables carry got through"
        )


def stalling(
    hosts: Hosts, limits: Limits, *, seconds: float, period: float, seen: Stalls
) -> Timetable:
    """Every ``period`` seconds the switch passes on nothing for so many. ``seen`` counts what
    really happened."""

    def body(stop: threading.Event) -> None:
        _enter(hosts.switch)
        ports = [hosts.port(number) for number in range(hosts.count)]
        kicks = [_open(port) for port in ports]
        while not stop.wait(period - seconds):
            limits.stall()
            begin = time.perf_counter()
            before = _sent(ports)
            stop.wait(seconds)
            passed = _sent(ports) - before
            took = time.perf_counter() - begin
            limits.resume()
            time.sleep(0.001)  # tc reads its pipe
            for kick in kicks:
                # A token bucket looks at its queue when a packet comes, or when the one in front
                # should have gone at the old rate.
                kick.send(KICK)
            seen.count += 1
            seen.seconds += took
            seen.passed += passed
            seen.capacity += took * sum(bits_per_second(rate) for rate in limits.rates) / 8
        for kick in kicks:
            kick.close()

    return Timetable(body)


def _enter(namespace: str) -> None:
    """Move this thread, and no other, into a network namespace."""
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(handle)


def _open(port: str) -> socket.socket:
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    raw.bind((port, 0))
    return raw


def _sent(ports: list[str]) -> int:
    """Bytes that have left the switch through these ports."""
    with open("/proc/thread-self/net/dev") as table:
        rows = dict(line.split(":", 1) for line in table if ":" in line)
    return sum(int(counters.split()[8]) for name, counters in rows.items() if name.strip() in ports)
