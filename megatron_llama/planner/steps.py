"""The time of a step in closed form: equal stages, one bottleneck, and exposed communication.
``simulate.py`` computes it action by action."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from math import log2
from typing import TYPE_CHECKING

from megatron_llama.model.plan.fp8 import SCALE_BYTES, ScaleMessages
from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.context_traffic import context_shares
from megatron_llama.planner.footprint import fuller_end
from megatron_llama.planner.kernels import Kernels, PassTime
from megatron_llama.planner.links import RankGroup, RankGroups, rank_groups
from megatron_llama.planner.tensor_pieces import exposed_pieces
from megatron_llama.planner.training_job import TrainingJob

if TYPE_CHECKING:  # of few models
    from megatron_llama.planner.expert_work import ExpertWork

UPDATE = 34
UPDATE_WIDE = 28
"""Bytes that an update moves for each parameter of a shard: gradient, master weight and two
moments, in and out, and (UPDATE) the 16-bit weight if it is separate from the master."""
HOST_UPDATE = 30
"""The same on the host, which reads 16 bytes and writes 12, and 2 for the 16-bit weight."""
FULL = 0.85
"""Share of the memory beyond which the allocator has to return and take memory within a step."""
BUCKET = 40_000_000
"""Elements of one message of gradients in most trainers."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by purpose."""

    compute: float
    """Kernels of the busiest rank."""
    bubble: float
    """Idle time of the busiest rank in the pipeline."""
    tensor: float
    """Exposed communication over tp."""
    context: float
    """Exposed communication over cp."""
    pipeline: float
    """Exposed communication between stages."""
    data: float
    """Exposed communication over dp."""
    expert: float
    """Exposed communication over ep."""
    update: float
    """The optimizer's update."""
    other: float
    """Waiting for stragglers, and work that is done once a step."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return float(sum(astuple(self)))


@dataclass(frozen=True)
class BlockTime:
    """Times of one transformer block and one microbatch, with exposed communication."""

    forward: PassTime
    backward: PassTime
    """The backward pass, with recomputation."""

    @property
    def both(self) -> PassTime:
        """Sum of forward and backward, part by part."""
        return self.forward + self.backward

    @property
    def seconds(self) -> float:
        """Seconds of forward, then backward."""
        return self.forward.seconds + self.backward.seconds


def block_time(
    job: TrainingJob, groups: RankGroups, kernels: Kernels, fit: Coefficients
) -> BlockTime:
    """Return the time of one block. Each pass sums partial results over tp twice (with sequence
    parallelism: gathers and scatters), whole or in pieces. With context parallelism, keys and
    values travel forward, and again backward with their gradients, as far as windows reach, or the
    sequence is exchanged for heads. The time is that of the rank that sends most. Experts have no
    messages over tp, but those over ep, which are waited for."""
    shown = fit.tensor_overlap if job.traits.overlap_tensor else 1.0
    tensor = tensor_back = (2 - job.sparse) * groups.tp.reduce(job.stream) * shown
    if job.tensor_pieces > 1:
        tensor, tensor_back = exposed_pieces(job, groups.tp, kernels, fit)
    keys = groups.cp_keys
    elements = 2 * job.tokens * job.cp * job.key_heads * job.model.head_dim
    sent, sent_back = context_shares(job.model, job.seq, keys.size)
    wide = max(4, job.itemsize) if job.traits.wide_context_gradients else job.itemsize
    gradients = keys.gather(wide * elements * sent_back) * fit.cp_exposed
    # Attention waits for queries, and the next layer for outputs: nothing hides an exchange.
    context = keys.gather(job.itemsize * elements * sent) * fit.cp_exposed
    context += sum(map(groups.cp_heads.exchange, job.exchanged))
    pure = kernels.forward()
    forward = replace(pure, tensor=tensor, context=context)
    backward = replace(kernels.backward(pure), tensor=tensor_back, context=context + gradients)
    if job.experts is not None:
        forward, backward = _dispatched(job, job.experts, groups, forward, backward)
    if job.recomputes_scores:
        return BlockTime(forward, backward + PassTime(attention=pure.attention))
    forward, backward = _scales(job, groups, forward, backward)
    again = forward.scaled(job.recomputed) + kernels.selective().scaled(job.selective)
    # What recomputes has the codes that its gradients need.
    codes = weight_codes(job, groups, kernels).scaled(job.codes_again)
    return BlockTime(forward + codes, backward + again + codes)


def _dispatched(
    job: TrainingJob, work: ExpertWork, groups: RankGroups, forward: PassTime, backward: PassTime
) -> tuple[PassTime, PassTime]:
    """Return the passes with the messages over the ranks that divide experts, and those that count
    the tokens of a sequence for a loss."""
    sent = work.messages
    send = groups.ep.exchange if work.exchanges else groups.ep.gather
    there = send(sent.forward_bytes, sent.forward)
    back = send(sent.backward_bytes, sent.backward)
    counted = PassTime()
    if work.counted:
        counted = PassTime(
            tensor=groups.tp.reduce(work.counted), context=groups.cp.reduce(work.counted)
        )
    return (
        forward + (counted + PassTime(expert=there)).scaled(job.sparse),
        backward + PassTime(expert=back).scaled(job.sparse),
    )


def _scales(
    job: TrainingJob, groups: RankGroups, forward: PassTime, backward: PassTime
) -> tuple[PassTime, PassTime]:
    """Return the passes with the messages about scales, which nothing hides, and with fewer bytes
    of gathers in 8 bits. A message about a gradient comes behind the gather of the input for the
    weight gradient, so with sequence parallelism the product no longer hides that gather."""
    tensor, tensor_back = _agreeing(job, groups.tp, job.tensor_scales, "tp")
    context, context_back = _agreeing(job, groups.cp, job.context_scales, "cp")
    dense = job.narrow - job.narrow_sparse
    saved = 0.0
    if job.gathers_codes:
        # Half of two gathers; of a block with experts half of that of attention.
        halves = dense + job.narrow_sparse / 2
        saved = halves * (groups.tp.gather(job.stream) - groups.tp.gather(0.0))
    behind = 0.0
    if job.sequence_parallel and job.tensor_scales.backward and job.bubble == 1:
        # Of experts nothing is gathered.
        behind = dense * job.tensor_scales.backward + job.narrow_sparse
    gathers = (1 - job.trained.frozen) * behind * groups.tp.gather(job.stream)
    more = PassTime(tensor=tensor - saved, context=context)
    return forward + more, backward + PassTime(tensor=tensor_back + gathers, context=context_back)


def _agreeing(
    job: TrainingJob, group: RankGroup, dense: ScaleMessages, axis: str
) -> tuple[float, float]:
    """Return the seconds of the messages about scales along an axis in a forward and in a backward
    pass: of a block as the mean of all."""
    share = job.narrow - job.narrow_sparse
    one = group.reduce(SCALE_BYTES)
    forward, backward = share * dense.forward * one, share * dense.backward * one
    work = job.experts
    if work is not None and axis in work.scales:
        single, experts = work.scales[axis]
        every = group.reduce(SCALE_BYTES * work.count * work.ranks)
        forward += job.narrow_sparse * (single.forward * one + experts.forward * every)
        backward += job.narrow_sparse * (single.backward * one + experts.backward * every)
    return forward, backward


def weight_codes(job: TrainingJob, groups: RankGroups, kernels: Kernels) -> PassTime:
    """Return the time in which the codes of one block's weights are made, with the messages about
    their scales."""
    messages = (job.narrow - job.narrow_sparse) * job.tensor_scales.weights
    if job.experts is not None and "tp" in job.experts.scales:
        messages += job.narrow_sparse * job.experts.scales["tp"].single.weights
    seconds = messages * groups.tp.reduce(SCALE_BYTES)
    return PassTime(memory=kernels.weight_codes(), tensor=seconds)


def update_of_codes(job: TrainingJob, groups: RankGroups, kernels: Kernels) -> float:
    """Return the seconds in which a rank's codes of trained weights are made after an update; 0 if
    each pass makes them."""
    if job.codes_again:
        return 0.0
    trained = (1 - job.trained.frozen) * job.model.num_hidden_layers / job.pp
    return trained * weight_codes(job, groups, kernels).seconds


def estimate(job: TrainingJob, fit: Coefficients) -> StepTime:
    """Return the time of a step."""
    groups = rank_groups(job, fit)
    kernels = Kernels(job, fit)
    block = block_time(job, groups, kernels, fit)
    layers = job.model.num_hidden_layers
    share = layers / job.pp
    head = (3 - job.trained.head_frozen) * kernels.head().seconds
    ends = head + groups.tp.reduce(job.stream) * 2
    middle = share * block.seconds
    # If blocks divide unevenly, some rank without the head has the larger number of blocks.
    uneven = (-(-layers // job.pp) - share) * block.seconds
    wide = 0.0
    if job.narrow_ends != job.narrow:
        # Blocks of the first and of the last rank that are in 16 bits.
        experts = job.narrow_experts * job.narrow_ends / job.narrow
        at_ends = replace(job, narrow=job.narrow_ends, narrow_experts=experts)
        wide = share * block_time(at_ends, groups, Kernels(at_ends, fit), fit).seconds - middle
    last = middle + uneven - block.seconds + ends if job.ends_counted else middle + ends
    fullness = fuller_end(job) / job.machine.gpu.memory
    bottleneck = max(last + wide, middle + uneven + wide) * (
        1 + fit.pressure * max(0.0, fullness - FULL)
    )
    hop = groups.pp.send(job.stage_message) if job.pp > 1 else 0.0
    hops = job.microbatches * (1 if job.vpp == 1 else 0.5 * job.vpp) + job.pp
    wait = fit.pipeline_exposed * 2 * hop * hops
    bubble = job.bubble * (job.pp - 1) * middle / job.vpp
    work = job.microbatches * bottleneck
    data = _data_time(job, groups, fit, work, middle)
    owned = job.trained.share * job.sharded_numel(job.rank_numel, job.rank_expert_numel)
    away = job.offload.share * owned if job.offload is not None else 0.0
    waits = host_wait(job, fit, away, share * block.forward.seconds, share * block.backward.seconds)
    update = update_bytes(job) * (owned - away) / kernels.hbm + waits
    update += update_of_codes(job, groups, kernels)
    tensor = job.microbatches * share * block.both.tensor
    context = job.microbatches * share * block.both.context
    expert = job.microbatches * share * block.both.expert
    summed = expert_sums(job, groups)
    whole = work + bubble + wait + data + summed + update + fit.step
    return StepTime(
        compute=max(0.0, work - tensor - context - expert),
        bubble=bubble,
        tensor=tensor + summed,
        context=context,
        pipeline=wait,
        data=data,
        expert=expert,
        update=update,
        other=fit.step + whole * straggling(job, fit),
    )


def host_wait(
    job: TrainingJob, fit: Coefficients, elements: float, forward: float, backward: float
) -> float:
    """Return the seconds in a step of waiting for an optimizer on the host, which updates
    ``elements`` for this rank. The wait is for gradients that arrive after the last backward pass,
    and for updates and weights that the next forward pass does not hide (docs/offload.md, bounds).
    ``forward`` and ``backward`` are the seconds of one microbatch on a rank."""
    offload = job.offload
    gpu = job.machine.gpu
    if offload is None or not elements:
        return 0.0
    bus = gpu.pcie * fit.pcie
    update = HOST_UPDATE * elements / (gpu.host * fit.host)
    late = max(0.0, offload.down * elements / bus - backward)
    hidden = forward + (backward if offload.during_backward else 0.0)
    if offload.overlapped:
        hidden += (offload.interval - 1) * job.microbatches * (forward + backward)
    return late + max(0.0, max(update, offload.up * elements / bus) - hidden) / offload.interval


def expert_sums(job: TrainingJob, groups: RankGroups) -> float:
    """Return the seconds in which tensor-parallel ranks add up the gradients of whole experts, each
    its shard in fp32, at the end of a step."""
    experts = job.rank_expert_numel
    if not experts:
        return 0.0
    owned = experts / (job.expert_shards if job.sharding != "none" else 1)
    return groups.tp.reduce(job.traits.kept_gradient_bytes * job.trained.share * owned)


def update_bytes(job: TrainingJob) -> int:
    """Return the bytes that an update on the device moves for each parameter."""
    return UPDATE if job.itemsize < 4 else UPDATE_WIDE * job.itemsize // 4


def straggling(job: TrainingJob, fit: Coefficients) -> float:
    """Return the relative slowdown of a step in which many GPUs wait for the slowest."""
    return fit.straggle * max(0.0, log2(job.machine.gpus / 8))


def _data_time(
    job: TrainingJob, groups: RankGroups, fit: Coefficients, work: float, middle: float
) -> float:
    """Return the exposed seconds of gradients and parameters between data-parallel ranks, both of
    messages during every microbatch and of messages once a step."""
    wire = job.traits.gradient_bytes
    units = job.model.num_hidden_layers / job.pp
    share = job.trained.share
    trained = share * job.rank_numel
    messages = max(1.0, trained / BUCKET)
    divided = job.rank_expert_numel if job.ep > 1 else 0.0

    def gather(itemsize: float, count: float) -> float:
        """Return the seconds of gathering all elements of a rank: experts that ranks divide have
        axes of their own."""
        others = groups.shards.gather(itemsize * (job.rank_numel - divided), count)
        sparse = job.sparse * count * (divided > 0)
        return others + groups.expert_shards.gather(itemsize * divided, sparse)

    shards = job.shards if job.sharding != "none" else 1
    replicas = groups.replicas.reduce(wire * share * (job.rank_numel - divided) / shards)
    if divided:
        own = divided / (job.expert_shards if shards > 1 else 1)
        replicas += groups.expert_replicas.reduce(wire * share * own)
    if job.sharding == "parameters":
        times = 2 * job.microbatches if job.pp == 1 else 1
        gathers = times * gather(job.itemsize, units)
        reductions = job.microbatches * gather(wire * share, units)
        return _slowdown(gathers + reductions + replicas, work, fit)
    every = job.sharding == "gradients" and (job.pp == 1 or job.traits.reduces_every_microbatch)
    reductions = gather(wire * share, messages)
    gathers = gather(job.itemsize * share, messages)
    sent = gathers + replicas + (0.0 if every else reductions)
    if job.traits.family == "intern":
        sent += job.shards * fit.broadcast
    if not job.traits.overlap_data:
        return sent + (job.microbatches * reductions if every else 0.0)
    streamed = _slowdown(job.microbatches * reductions, work, fit) if every else 0.0
    late = (1 - min(1.0, fit.data_exposed)) * max(0.0, sent - middle)
    return streamed + fit.data_exposed * sent + late


def _slowdown(sent: float, work: float, fit: Coefficients) -> float:
    """Return the additional seconds of kernels that run together with communication."""
    return float((work**4 + sent**4) ** 0.25) - work + fit.parameters_exposed * min(sent, work)
