"""Hosts as network namespaces: each with one interface, joined by a bridge, with a limited rate at
both ends of every cable.

Everything lives in namespaces of its own, named after this process, so that two runs do not meet.
Leaving removes it all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from tools.overlap.job import bits_per_second

ROOT = str(Path(__file__).resolve().parents[2])

GSO_BYTES = 32768
"""Largest packet that is handed to an interface in one piece: larger ones save CPU, smaller ones
make the rate limit exact."""
BURST_BYTES = 2 * GSO_BYTES
"""What an idle link may send at once: 1.3 ms at 400mbit. A token bucket passes no packet that is
larger."""
QUEUE_BYTES = 64 << 20
"""The switch never drops: what the network of a training cluster does by flow control."""
WINDOW_BYTES = 262144
"""Of a TCP connection. With megabytes one flow of a host runs ahead of the others, but a gather
ends with its slowest part: with 21 gathers under way the first five came 50 % late."""
TCP = (("congestion_control", "reno"), ("slow_start_after_idle", "0"))
"""What makes TCP a cable, on which nothing waits for anything but the rate. Every kernel has Reno,
and where nothing is lost it never slows down; BBR, the default of some, probes and pauses, and
exchanges took 12 % longer than the minimum instead of 3 %."""


class RigError(Exception):
    """The emulated cluster could not be made or ended early. The message says what to do."""


def command(*words: str) -> str:
    """Run and return the output. Raises RigError."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        raise RigError(
            f"`{' '.join(words)}` failed: {said}\n  needs root with CAP_NET_ADMIN and "
            "CAP_SYS_ADMIN (a container: --privileged)"
        )
    return done.stdout


@dataclass(frozen=True)
class Delay:
    """Of every packet on its way from a host to the switch, in milliseconds."""

    latency: float
    jitter: float

    def tc(self) -> list[str]:
        """The arguments of ``tc qdisc``."""
        return [
            "netem",
            "delay",
            f"{self.latency}ms",
            f"{self.jitter}ms",
            "limit",
            str(QUEUE_BYTES),
        ]


def limit(rate: str) -> list[str]:
    """The arguments of ``tc qdisc ... root`` for a rate."""
    return ["tbf", "rate", rate, "burst", f"{BURST_BYTES}b", "limit", f"{QUEUE_BYTES}b"]


class Hosts:
    """A context manager: the cluster exists inside."""

    def __init__(self, count: int, rates: Sequence[str], delay: Delay | None = None) -> None:
        """``rates``: of each host's cable, in both directions."""
        self.count = count
        self.rates = list(rates)
        self._delay = delay
        self._prefix = f"overlap{os.getpid()}"
        self.switch = f"{self._prefix}-switch"
        self._logs = tempfile.TemporaryDirectory(prefix="overlap-")
        self._ranks: list[subprocess.Popen[bytes]] = []

    def host(self, number: int) -> str:
        """Name of a host's namespace."""
        return f"{self._prefix}-host{number}"

    @staticmethod
    def port(number: int) -> str:
        """The switch's interface towards a host."""
        return f"port{number}"

    @staticmethod
    def address(number: int) -> str:
        """Inside the cluster only."""
        return f"10.0.{(number + 1) // 256}.{(number + 1) % 256}"

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def _make(self) -> None:
        command("ip", "netns", "add", self.switch)
        command("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        command("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for number, rate in enumerate(self.rates):
            host = self.host(number)
            port = self.port(number)
            command("ip", "netns", "add", host)
            command("ip", "-n", host, "link", "set", "lo", "up")
            for name, value in (*TCP, ("rmem", f"4096 131072 {self._window(rate)}")):
                command(
                    "ip",
                    "netns",
                    "exec",
                    host,
                    "sh",
                    "-c",
                    f"echo {value} > /proc/sys/net/ipv4/tcp_{name}",
                )
            command(
                "ip",
                "-n",
                host,
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                self.switch,
            )
            command("ip", "-n", host, "address", "add", f"{self.address(number)}/16", "dev", "eth0")
            command("ip", "-n", self.switch, "link", "set", port, "master", "bridge")
            for namespace, device in ((host, "eth0"), (self.switch, port)):
                command(
                    "ip",
                    "-n",
                    namespace,
                    "link",
                    "set",
                    device,
                    "gso_max_size",
                    str(GSO_BYTES),
                    "up",
                )
                command(
                    "tc",
                    "-n",
                    namespace,
                    "qdisc",
                    "add",
                    "dev",
                    device,
                    "root",
                    "handle",
                    "1:",
                    *limit(rate),
                )
            if self._delay is not None:
                self._slow_down(host, self._delay)

    def _window(self, rate: str) -> int:
        """What is on its way for a round trip must fit, too."""
        trip = 0.0 if self._delay is None else 2 * (self._delay.latency + self._delay.jitter) / 1e3
        return WINDOW_BYTES + int(2 * trip * bits_per_second(rate) / 8)

    @staticmethod
    def _slow_down(host: str, delay: Delay) -> None:
        try:
            command("tc", "-n", host, "qdisc", "add", "dev", "eth0", "parent", "1:1", *delay.tc())
        except RigError as error:
            remedy = (
                "the kernel has no netem; load it (modprobe sch_netem, in some distributions "
                "from the package of extra kernel modules)"
            )
            raise RigError(
                f"--latency and --jitter: {remedy}, or leave the options out\n  {error}"
            ) from None

    def _remove(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait()
        known = subprocess.run(
            ["ip", "netns", "list"], capture_output=True, text=True
        ).stdout.split()
        for namespace in (self.switch, *map(self.host, range(self.count))):
            if namespace in known:
                subprocess.run(["ip", "netns", "delete", namespace], check=False)
        self._logs.cleanup()

    def run(self, arguments: Sequence[str]) -> None:
        """Run this Python with the arguments on every host, as torchrun would. Raises RigError when
        one fails."""
        for number in range(self.count):
            self._ranks.append(self._start(number, arguments))
        for _ in range(self.count):
            self._wait_for_one()

    def _start(self, number: int, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        words = ["ip", "netns", "exec", self.host(number), sys.executable, *arguments]
        place = {
            "RANK": number,
            "WORLD_SIZE": self.count,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "GROUP_RANK": number,
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": 29500,
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": 1,
            "MKL_NUM_THREADS": 1,
            # Ranks import this checkout too, whichever way this process was started.
            "PYTHONPATH": os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
        # Ctrl-C is for the parent, which ends the ranks; they would only add their tracebacks.
        with open(self._log(number), "wb") as log:
            output: IO[bytes] | None = None if number == 0 else log
            return subprocess.Popen(
                words, env=environment, stdout=output, stderr=log, start_new_session=True
            )

    def _log(self, number: int) -> Path:
        return Path(self._logs.name) / f"rank{number}.log"

    def _wait_for_one(self) -> None:
        pid, status = os.waitpid(-1, 0)
        number = next((n for n, rank in enumerate(self._ranks) if rank.pid == pid), None)
        if number is None:
            return self._wait_for_one()
        self._ranks[number].returncode = code = os.waitstatus_to_exitcode(status)
        if code:
            lines = self._log(number).read_text(errors="replace").splitlines()[-25:]
            raise RigError("\n".join([f"rank {number} ended with exit code {code}:", *lines]))
