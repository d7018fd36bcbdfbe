"""Times of collectives in groups of ranks, from latency and bandwidth inside a node and between
nodes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.training_job import Machine, TrainingJob


@dataclass(frozen=True)
class RankGroup:
    """A group of ranks that communicate in a ring."""

    size: int
    rate: float
    """Bytes per second that leave a rank in the ring."""
    latency: float
    """Seconds to start a collective or a message."""
    hops: float
    """Seconds of one trip around the ring."""
    outside: int
    """Ranks of the group in other nodes than a given one."""
    card: float
    """Bytes per second of the network card of one rank."""

    def gather(self, size: float, messages: float = 1) -> float:
        """Return the seconds of all-gathers or reduce-scatters of ``size`` bytes in total, counted
        over all ranks. A rank sends all but one of ``self.size`` parts."""
        if self.size == 1:
            return 0.0
        start = messages * (self.latency + self.hops)
        return (self.size - 1) / self.size * size / self.rate + start

    def reduce(self, size: float, messages: float = 1) -> float:
        """Return the seconds of all-reduces of ``size`` bytes in total: a reduce-scatter and an
        all-gather."""
        return 2 * self.gather(size, messages)

    def exchange(self, size: float, messages: float = 1) -> float:
        """Return the seconds of all-to-alls in which each rank has ``size`` bytes in total, its own
        part included. What leaves a node goes through the rank's own card: unlike a ring, each rank
        sends to each."""
        if not self.outside:
            return self.gather(size, messages)
        return self.outside / self.size * size / self.card + messages * self.latency

    def send(self, size: float) -> float:
        """Return the seconds of a message of ``size`` bytes to one rank."""
        return size / self.rate + self.latency


def rank_group(
    machine: Machine, size: int, stride: int, fit: Coefficients, *, least: int = 1
) -> RankGroup:
    """Return the group of ``size`` ranks whose neighbours are ``stride`` ranks apart, ``least`` of
    them in a node at least."""
    inside = machine.gpu.nvlink * fit.nvlink
    card = min(inside, machine.nic * fit.nic)
    if size * stride <= machine.domain:
        return RankGroup(size, inside, fit.latency, fit.hop_inside * size, 0, card)
    # Each rank of the group in a node drives a network card, so a ring that leaves the node has
    # the rate of that many cards, until NVLink is slower.
    members = max(least, min(size, machine.domain // stride))
    rate = min(inside, members * machine.nic * fit.nic)
    hops = fit.hop * size / members + fit.hop_inside * size
    return RankGroup(size, rate, fit.latency_across, hops, size - members, card)


@dataclass(frozen=True)
class RankGroups:
    """The groups of a job by axis. Ranks are counted over tp first, then cp, dp and pp."""

    tp: RankGroup
    cp: RankGroup
    cp_heads: RankGroup
    """The ranks that exchange the sequence for heads; size 1 if none do."""
    cp_keys: RankGroup
    """The ranks between which keys and values travel."""
    shards: RankGroup
    replicas: RankGroup
    ep: RankGroup
    """The ranks that divide experts among them."""
    expert_shards: RankGroup
    """The ranks that divide the sharded state of the same experts."""
    expert_replicas: RankGroup
    pp: RankGroup


def rank_groups(job: TrainingJob, fit: Coefficients) -> RankGroups:
    """Return the groups of a job on its machine. The distance between neighbouring stages is the
    number of ranks of one stage."""
    machine = job.machine
    data = job.dp * job.cp
    heads = max(1, job.head_ranks)
    shards = job.shards if job.sharding != "none" else 1
    expert_shards = job.expert_shards if job.sharding != "none" else 1
    return RankGroups(
        tp=rank_group(machine, job.tp, 1, fit),
        cp=rank_group(machine, job.cp, job.tp, fit),
        cp_heads=rank_group(machine, heads, job.tp, fit),
        cp_keys=rank_group(machine, job.cp // heads, job.tp * heads, fit),
        shards=rank_group(machine, shards, job.tp, fit),
        replicas=rank_group(machine, data // shards, job.tp * shards, fit),
        ep=rank_group(machine, job.ep, job.tp * job.cp, fit),
        expert_shards=_same_experts(job, expert_shards, 1, fit),
        expert_replicas=_same_experts(
            job, max(1, data // job.ep // expert_shards), expert_shards, fit
        ),
        pp=rank_group(machine, 2, job.tp * data, fit),
    )


def _same_experts(job: TrainingJob, size: int, apart: int, fit: Coefficients) -> RankGroup:
    """Return the group of ``size`` of the ranks that hold the same experts: every ``apart``-th of
    them. They are those of cp, which are neighbours, of every ``ep``-th data-parallel rank."""
    beside = max(1, min(job.cp, job.machine.domain // job.tp) // apart)
    stride = job.tp * job.ep * apart
    return rank_group(job.machine, size, stride, fit, least=min(size, beside))
