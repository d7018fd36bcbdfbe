"""How long a step takes, in closed form: equal stages, one bottleneck, what cannot hide.
``simulate`` does it action by action."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2

from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.footprint import footprint
from megatron_llama.planner.job import Job
from megatron_llama.planner.kernels import Kernels, Pass
from megatron_llama.planner.links import Axes, axes_of

UPDATE = 34
UPDATE_WIDE = 28
"""Bytes an update moves for each parameter of a shard: gradient, master weight and two moments, in
and out, and the narrow weight, if there is one beside the master."""
FULL = 0.85
"""Share of the memory beyond which the allocator has to return and take memory within a step."""
HOST_UPDATE = 30
"""The same on the host, which reads 16 bytes and writes 12, and 2 of the narrow weight."""
BUCKET = 40_000_000
"""Elements in one message of gradients, in most trainers."""


@dataclass(frozen=True)
class Step:
    """Seconds of one step and where they go."""

    compute: float
    """Kernels of the busiest rank."""
    bubble: float
    """Its idle time in the pipeline."""
    tensor: float
    """Exposed communication over tp."""
    context: float
    """The same over cp."""
    pipeline: float
    """The same between stages."""
    data: float
    """The same over dp."""
    update: float
    """The optimizer."""
    other: float
    """Waiting for stragglers, and what comes once a step."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return (
            self.compute
            + self.bubble
            + self.tensor
            + self.context
            + self.pipeline
            + self.data
            + self.update
            + self.other
        )


@dataclass(frozen=True)
class Block:
    """One transformer block, one microbatch, with the communication that nothing hides."""

    forward: Pass
    backward: Pass
    """With what is computed again."""

    @property
    def seconds(self) -> float:
        """Both passes."""
        return self.forward.seconds + self.backward.seconds


def block_of(job: Job, axes: Axes, kernels: Kernels, fit: Coefficients) -> Block:
    """What one block costs. Each pass sums partial results over tp twice (gather and scatter under
    sequence parallelism); with context parallelism keys and values travel forward, and their
    gradients come back."""
    shown = fit.tensor_overlap if job.traits.overlap_tensor else 1.0
    tensor = 2 * axes.tp.reduce(job.stream) * shown
    wide = (
        2
        * job.model.num_key_value_heads
        * job.model.head_dim
        / min(job.tp, job.model.num_key_value_heads)
    )
    context = axes.cp.gather(job.itemsize * job.tokens * job.cp * wide) * fit.cp_exposed
    pure = kernels.forward()
    forward = replace(pure, tensor=tensor, context=context)
    backward = replace(kernels.backward(pure), tensor=tensor, context=2 * context)
    if job.recomputes_scores:
        return Block(forward, backward + Pass(attention=pure.attention))
    return Block(
        forward,
        backward
        + forward.scaled(job.recomputed)
        + Pass(memory=pure.memory * job.recomputed_memory),
    )


def estimate(job: Job, fit: Coefficients) -> Step:
    """The time of a step."""
    axes = axes_of(job, fit)
    kernels = Kernels(job, fit)
    block = block_of(job, axes, kernels, fit)
    head = kernels.head()
    layers = job.model.num_hidden_layers
    share = job.model.num_hidden_layers / job.pp
    ends = (3 - job.trained.head_frozen) * head.seconds + axes.tp.reduce(job.stream) * 2
    middle = share * block.seconds
    # An uneven share: some rank has the larger part, unless it is the one with the head.
    uneven = (-(-layers // job.pp) - share) * block.seconds
    squeeze = 1 + fit.pressure * max(0.0, _fullness(job) - FULL)
    fullest = middle + uneven - block.seconds + ends if job.ends_counted else middle + ends
    bottleneck = max(fullest, middle + uneven) * squeeze
    hops = (
        axes.pp.send(job.stream / (job.tp if job.sequence_parallel else 1)) if job.pp > 1 else 0.0
    )
    wait = (
        fit.pipeline_exposed
        * 2
        * hops
        * (job.microbatches * (1 if job.vpp == 1 else 0.5 * job.vpp) + job.pp)
    )
    bubble = job.bubble * (job.pp - 1) * middle / job.vpp
    work = job.microbatches * bottleneck
    data = data_time(job, axes, fit, work, middle)
    owned = job.trained.share * job.rank_numel / (job.shards if job.sharding != "none" else 1)
    away = job.offload.share * owned if job.offload is not None else 0.0
    waits = host_wait(job, fit, away, share * block.forward.seconds, share * block.backward.seconds)
    update = update_bytes(job) * (owned - away) / kernels.hbm + waits
    both = block.forward + block.backward
    tensor, context = (job.microbatches * share * part for part in (both.tensor, both.context))
    whole = work + bubble + wait + data + update + fit.step
    return Step(
        max(0.0, work - tensor - context),
        bubble,
        tensor,
        context,
        wait,
        data,
        update,
        fit.step + whole * straggling(job, fit),
    )


def host_wait(
    job: Job, fit: Coefficients, elements: float, forward: float, backward: float
) -> float:
    """Seconds of a step that wait for an optimizer on the host, which updates ``elements`` for this
    rank: gradients that arrive behind the last backward pass, and updates and weights that the next
    forward pass does not hide. ``forward``, ``backward``: of one microbatch on a rank."""
    offload = job.offload
    gpu = job.machine.gpu
    if offload is None or not elements:
        return 0.0
    bus = gpu.pcie * fit.pcie
    update = HOST_UPDATE * elements / (gpu.host * fit.host)
    late = max(0.0, offload.down * elements / bus - backward)
    hidden = forward + (backward if offload.early else 0.0)
    if offload.beside:
        hidden += (offload.steps - 1) * job.microbatches * (forward + backward)
    return late + max(0.0, max(update, offload.up * elements / bus) - hidden) / offload.steps


def update_bytes(job: Job) -> int:
    """Bytes that an update on the device moves for each parameter."""
    return UPDATE if job.itemsize < 4 else UPDATE_WIDE * job.itemsize // 4


def _fullness(job: Job) -> float:
    """Share of the device's memory that the fuller end of the pipeline needs."""
    return max(footprint(job, last=last).peak for last in (False, True)) / job.machine.gpu.memory


def straggling(job: Job, fit: Coefficients) -> float:
    """Share by which a step takes longer because many GPUs wait for the slowest of them."""
    return fit.straggle * max(0.0, log2(job.machine.gpus / 8))


def data_time(job: Job, axes: Axes, fit: Coefficients, work: float, middle: float) -> float:
    """Exposed seconds of gradients and parameters between data-parallel ranks: of those that travel
    beside every microbatch, and of those that travel once."""
    numel = job.rank_numel
    wire = job.traits.gradient_bytes
    units = job.model.num_hidden_layers / job.pp
    weights = job.itemsize * numel
    trained = job.trained.share * numel
    replicas = axes.replicas.reduce(wire * trained / (job.shards if job.sharding != "none" else 1))
    messages = max(1.0, trained / BUCKET)
    if job.sharding == "parameters":
        gathers = 2 * job.microbatches if job.pp == 1 else 1
        sent = (
            gathers * axes.shards.gather(weights, units)
            + job.microbatches * axes.shards.gather(wire * trained, units)
            + replicas
        )
        return _beside(sent, work, fit)
    each = job.sharding == "gradients" and (job.pp == 1 or job.traits.reduces_every_microbatch)
    reductions = axes.shards.gather(wire * trained, messages)
    gathers_once = axes.shards.gather(job.itemsize * trained, messages)
    sent = gathers_once + replicas + (0.0 if each else reductions)
    if job.traits.family == "intern":
        sent += job.shards * fit.broadcast
    streamed = _beside(job.microbatches * reductions, work, fit) if each else 0.0
    if not job.traits.overlap_data:
        return sent + (job.microbatches * reductions if each else 0.0)
    return (
        streamed
        + fit.data_exposed * sent
        + (1 - min(1.0, fit.data_exposed)) * max(0.0, sent - middle)
    )


def _beside(sent: float, work: float, fit: Coefficients) -> float:
    """What kernels and communication side by side take more than kernels alone."""
    return float((work**4 + sent**4) ** 0.25) - work + fit.parameters_exposed * min(sent, work)
