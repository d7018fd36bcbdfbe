"""Memory of any trainer by component, from formulas. They only serve to rule out layouts quickly:
``train/setup/memory.py`` plans the memory of this trainer exactly.

Activations follow "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et
al., 2022, section 4), extended to any MLP and attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from megatron_llama.planner.kernels import BF16_BYTES, CONVERTED, FP32_BYTES
from megatron_llama.planner.training_job import TrainingJob

TURNS = 2
"""Fewest blocks that have memory for their weights at a time."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank by component."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    working: float
    """Bytes of one block while it is recomputed, after the logits are freed; of gathered layers."""
    buffers: float
    """Bytes of workspaces of libraries and of tensors between stages."""

    @property
    def persistent(self) -> float:
        """Bytes that are held between steps."""
        return self.weights + self.gradients + self.optimizer + self.buffers

    @property
    def peak(self) -> float:
        """Bytes at the fullest moment of a step."""
        return self.persistent + self.activations + max(self.logits, self.working)


def stage_numel(job: TrainingJob, *, last: bool) -> int:
    """Return the elements of the first or the last rank of a pipeline, vectors included."""
    model = job.model
    traits = job.traits
    layers = ceil(model.num_hidden_layers / job.pp)
    if last:
        layers = model.num_hidden_layers // job.pp - job.last_stage_lacks
    small = (2 if traits.biased else 1) * model.hidden_size
    vectors = 0
    if traits.biased:
        vectors = sum(product.n for product in job.matmuls[::2]) + 2 * model.hidden_size + small
    table = job.table_rows * model.hidden_size
    tables = job.ends if job.pp == 1 else 1
    has_positions = traits.learned_positions and (not last or job.pp == 1)
    positions = job.seq * model.hidden_size if has_positions else 0
    return layers * (job.block_numel + vectors) + tables * table + positions + small


def block_bytes(job: TrainingJob) -> float:
    """Return the bytes that autograd keeps of one block for one microbatch, as the mean of blocks
    with and without experts."""
    dense = _dense_block_bytes(job)
    if job.experts is None:
        return dense
    return (1 - job.sparse) * dense + job.sparse * job.experts.kept


def _dense_block_bytes(job: TrainingJob) -> float:
    model = job.model
    traits = job.traits
    tokens = job.tokens
    split = job.tp if job.sequence_parallel else 1
    hidden = model.hidden_size
    inner = model.intermediate_size / job.tp
    # Schedules that postpone weight gradients keep their inputs, even with recomputation.
    again = 0.0 if job.bubble < 1 else job.recomputed
    lean = job.selective > 0
    if again >= 1:
        return BF16_BYTES * tokens * hidden / split
    streams = (8 - 4 * lean + 2 * traits.dropout + traits.norm_bytes) * hidden / split
    keys = max(1, model.num_key_value_heads // job.tp) * model.head_dim
    attention = BF16_BYTES * (2 * job.queries + 2 * keys)
    whole = tokens * (streams + attention + ((6 if traits.gated else 4) - 2 * lean) * inner)
    if traits.attention in ("fused", "plain") and not job.recomputes_scores:
        whole += traits.score_bytes * model.num_attention_heads / job.tp * tokens * job.seq
    return whole * (1 - again) + again * BF16_BYTES * tokens * hidden / split


def in_flight(job: TrainingJob, *, last: bool) -> float:
    """Return the largest number of blocks whose activations a rank holds, in 1F1B (Narayanan et
    al., 2021, section 2.2), its interleaved form and the zero-bubble schedules."""
    layers = job.model.num_hidden_layers / job.pp - last * job.last_stage_lacks
    depth = 0 if last else job.pp - 1
    # With zero-bubble schedules every rank holds as much as the first rank with 1F1B.
    if job.bubble < 1:
        return min(job.microbatches, job.pp) * layers
    if job.vpp == 1:
        return min(job.microbatches, depth + 1) * layers
    chunks = min(job.microbatches * job.vpp, 2 * depth + (job.vpp - 1) * job.pp + 1)
    return chunks * layers / job.vpp


def weight_code_bytes(job: TrainingJob) -> float:
    """Return the bytes of the codes of weights, in both orders, on a rank at an end of the
    pipeline; of two blocks if they take turns."""
    if job.precision not in CONVERTED:
        return 0.0
    layers = TURNS if job.codes_again else job.narrow_ends * job.model.num_hidden_layers / job.pp
    return 2.0 * layers * job.code_elements


def footprint(job: TrainingJob, *, last: bool, workspaces: float = 0.0) -> Footprint:
    """Return the memory of the first or the last rank of a pipeline. ``workspaces`` are bytes that
    libraries keep."""
    traits = job.traits
    model = job.model
    numel = stage_numel(job, last=last)
    layers = ceil(model.num_hidden_layers / job.pp) - last * job.last_stage_lacks
    shard = job.sharded_numel(numel, job.expert_numel(layers))
    everything = job.sharding == "parameters"
    weights = BF16_BYTES * (shard if everything else numel) + weight_code_bytes(job)
    cut = everything or (
        job.sharding == "gradients" and (job.pp == 1 or traits.reduces_every_microbatch)
    )
    share = job.trained.share
    gradients = traits.kept_gradient_bytes * share * (shard if cut else numel)
    on_device = 1 - (job.offload.share if job.offload is not None else 0.0)
    optimizer = traits.state_bytes * share * shard * on_device
    stream = job.tokens * model.hidden_size * BF16_BYTES / (job.tp if job.sequence_parallel else 1)
    keys = 2 * max(1, model.num_key_value_heads // job.tp) * model.head_dim
    buffers = workspaces + (2 * job.vpp * stream if job.pp > 1 else 0.0)
    if job.recomputed >= 1:
        # The input of the last recomputed block stays, as Megatron's own tests show.
        buffers += stream
    if job.cp > 1:
        buffers += 4 * BF16_BYTES * job.tokens * keys + 2 * job.exchanged[0]
    logits = traits.logit_bytes * job.logits if last or job.pp == 1 else 0.0
    working = _dense_block_bytes(replace(job, recomputed=0.0)) if job.recomputed > 0 else 0.0
    if job.experts is not None:
        working = max(working * (job.sparse < 1), job.experts.working)
    if everything:
        unit = max(job.block_numel, job.table_rows * model.hidden_size)
        working += (3 * BF16_BYTES + FP32_BYTES) * unit
    return Footprint(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=in_flight(job, last=last) * block_bytes(job),
        logits=logits,
        working=working,
        buffers=buffers,
    )


def fuller_end(job: TrainingJob) -> float:
    """Return the peak bytes of the first or the last rank of a pipeline, whichever needs more."""
    return max(footprint(job, last=last).peak for last in (False, True))
