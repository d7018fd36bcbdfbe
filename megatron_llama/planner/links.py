"""How long a collective takes on an axis of the process grid: latency and bandwidth, inside a node
and between nodes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.job import Job, Machine


@dataclass(frozen=True)
class Axis:
    """A group of ranks that communicate. ``rate``: bytes per second that leave a rank in a ring
    through the group."""

    size: int
    rate: float
    latency: float
    """Of starting a collective or a message."""
    hops: float
    """Of going once around the ring."""

    def gather(self, size: float, messages: float = 1) -> float:
        """Seconds of all-gathers or reduce-scatters of ``size`` bytes together, counted over all
        ranks."""
        if self.size == 1:
            return 0.0
        return (self.size - 1) / self.size * size / self.rate + messages * (
            self.latency + self.hops
        )

    def reduce(self, size: float, messages: float = 1) -> float:
        """Seconds of all-reduces of ``size`` bytes together."""
        return 2 * self.gather(size, messages)

    def send(self, size: float) -> float:
        """Seconds of a message of ``size`` bytes to one rank."""
        return size / self.rate + self.latency


def axis_of(machine: Machine, size: int, stride: int, fit: Coefficients) -> Axis:
    """The axis whose neighbours are ``stride`` ranks apart. Ranks of a group that NVLink joins
    drive a network card each, so a ring that leaves them has the rate of so many cards, until
    NVLink is slower."""
    inside = machine.gpu.nvlink * fit.nvlink
    if size * stride <= machine.domain:
        return Axis(size, inside, fit.latency, fit.hop_inside * size)
    members = max(1, min(size, machine.domain // stride))
    rate = min(inside, members * machine.nic * fit.nic)
    return Axis(size, rate, fit.latency_across, fit.hop * size / members + fit.hop_inside * size)


@dataclass(frozen=True)
class Axes:
    """The axes of a job; ranks are counted tp first, then cp, dp and pp."""

    tp: Axis
    cp: Axis
    shards: Axis
    replicas: Axis
    pp: Axis


def axes_of(job: Job, fit: Coefficients) -> Axes:
    """The axes of a job on its machine. Stages are as far apart as everything inside one."""
    machine = job.machine
    data = job.dp * job.cp
    shards = job.shards if job.sharding != "none" else 1
    return Axes(
        tp=axis_of(machine, job.tp, 1, fit),
        cp=axis_of(machine, job.cp, job.tp, fit),
        shards=axis_of(machine, shards, job.tp, fit),
        replicas=axis_of(machine, data // shards, job.tp * shards, fit),
        pp=axis_of(machine, 2, job.tp * data, fit),
    )
