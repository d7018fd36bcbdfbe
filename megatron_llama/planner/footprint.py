"""Memory of somebody else's trainer, by component: what its ranks hold for a job. The project's own
is planned by ``memory.py``.

Activations as in "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et
al., 2022), for any MLP and attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from megatron_llama.planner.job import Job
from megatron_llama.planner.kernels import NARROW

WIDE = 4


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    working: float
    """One block as it is computed again, when the logits are gone; gathered layers."""
    buffers: float
    """Workspaces of libraries, tensors between stages."""

    @property
    def persistent(self) -> float:
        """What is there between steps."""
        return self.weights + self.gradients + self.optimizer + self.buffers

    @property
    def peak(self) -> float:
        """All of it at the worst moment of a step."""
        return self.persistent + self.activations + max(self.logits, self.working)


def stage_numel(job: Job, *, last: bool) -> int:
    """Elements of the first or the last rank of a pipeline, small vectors included."""
    model = job.model
    traits = job.traits
    layers = (
        (model.num_hidden_layers // job.pp - job.last_stage_lacks)
        if last
        else ceil(model.num_hidden_layers / job.pp)
    )
    small = (2 if traits.biased else 1) * model.hidden_size
    vectors = 0
    if traits.biased:
        vectors = sum(product.n for product in job.matmuls[::2]) + 2 * model.hidden_size + small
    table = job.head.n * model.hidden_size
    tables = job.ends if job.pp == 1 else 1
    positions = (
        job.seq * model.hidden_size if traits.learned_positions and (not last or job.pp == 1) else 0
    )
    return layers * (job.block_numel + vectors) + tables * table + positions + small


def block_bytes(job: Job) -> float:
    """What autograd keeps of one block of one microbatch."""
    model = job.model
    traits = job.traits
    tokens = job.tokens
    split = job.tp if job.sequence_parallel else 1
    hidden = model.hidden_size
    inner = model.intermediate_size / job.tp
    # Schedules that put off weight gradients keep their inputs, whatever was computed again.
    again = 0.0 if job.bubble < 1 else job.recomputed
    lean = job.recomputed_memory > 0
    if again >= 1:
        return NARROW * tokens * hidden / split
    streams = (8 - 4 * lean + 2 * traits.dropout + traits.norm_bytes) * hidden / split
    keys = max(1, model.num_key_value_heads // job.tp) * model.head_dim
    attention = NARROW * (2 * job.queries + 2 * keys)
    whole = tokens * (streams + attention + ((6 if traits.gated else 4) - 2 * lean) * inner)
    if traits.attention in ("fused", "plain") and not job.recomputes_scores:
        whole += traits.score_bytes * model.num_attention_heads / job.tp * tokens * job.seq
    return whole * (1 - again) + again * NARROW * tokens * hidden / split


def in_flight(job: Job, *, last: bool) -> float:
    """Blocks whose activations a rank holds at most, in 1F1B and its interleaved form."""
    layers = job.model.num_hidden_layers / job.pp - last * job.last_stage_lacks
    depth = 0 if last else job.pp - 1
    if job.bubble < 1:  # zero-bubble schedules hold as much on every rank as 1F1B on the first
        return min(job.microbatches, job.pp) * layers
    if job.vpp == 1:
        return min(job.microbatches, depth + 1) * layers
    chunks = min(job.microbatches * job.vpp, 2 * depth + (job.vpp - 1) * job.pp + 1)
    return chunks * layers / job.vpp


def footprint(job: Job, *, last: bool, workspaces: float = 0.0) -> Footprint:
    """Of the first or the last rank of a pipeline. ``workspaces``: bytes that libraries keep."""
    traits = job.traits
    model = job.model
    numel = stage_numel(job, last=last)
    shards = job.shards if job.sharding != "none" else 1
    everything = job.sharding == "parameters"
    weights = NARROW * numel / (shards if everything else 1)
    cut = everything or (
        job.sharding == "gradients" and (job.pp == 1 or traits.reduces_every_microbatch)
    )
    trained = numel * job.trained.share
    gradients = traits.kept_gradient_bytes * trained / (shards if cut else 1)
    optimizer = (
        traits.state_bytes
        * trained
        * (1 - (job.offload.share if job.offload is not None else 0.0))
        / shards
    )
    stream = job.tokens * model.hidden_size * NARROW / (job.tp if job.sequence_parallel else 1)
    keys = 2 * max(1, model.num_key_value_heads // job.tp) * model.head_dim
    buffers = workspaces + (2 * job.vpp * stream if job.pp > 1 else 0.0)
    if (
        job.recomputed >= 1
    ):  # the input of the block that was computed again last stays, as Megatron's tests show
        buffers += stream
    if job.cp > 1:
        buffers += 4 * NARROW * job.tokens * keys
    logits = traits.logit_bytes * job.logits if last or job.pp == 1 else 0.0
    working = block_bytes(_kept(job)) if job.recomputed > 0 else 0.0
    if everything:
        unit = max(job.block_numel, job.head.n * model.hidden_size)
        working += (3 * NARROW + WIDE) * unit
    return Footprint(
        weights,
        gradients,
        optimizer,
        in_flight(job, last=last) * block_bytes(job),
        logits,
        working,
        buffers,
    )


def _kept(job: Job) -> Job:
    return replace(job, recomputed=0.0)
