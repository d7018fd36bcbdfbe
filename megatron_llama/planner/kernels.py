"""How long kernels last on a GPU: matrix products, attention, and what only moves memory. A
roofline with fitted efficiencies."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.job import Job, Matmul

NARROW = 2
"""Bytes of an activation or a weight while computing, in 16 bits."""
CAUSAL = 0.5
"""Of the square of scores, what a causal mask leaves; kernels that write scores compute all of
it."""
SHARP = 4
"""How sharply the slower of device and host decides: the exponent of a norm."""
OLD = ("megatron", "aleph")
"""Trainers of before 2023, whose blocks are many small kernels."""


@dataclass(frozen=True)
class Pass:
    """Seconds of one pass through one block (or the ends of the model) on one rank, by what they go
    into."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    tensor: float = 0.0
    """Communication over tp that nothing hides."""
    context: float = 0.0
    """The same over cp."""
    launch: float = 0.0
    """The host's time to start all this, beside the device."""

    @property
    def seconds(self) -> float:
        """Together. Whichever is slower, device or host, decides; where they are close, each waits
        for the other now and then."""
        device = self.matmul + self.attention + self.memory + self.tensor + self.context
        return float((device**SHARP + self.launch**SHARP) ** (1 / SHARP))

    def __add__(self, other: Pass) -> Pass:
        return Pass(*(mine + theirs for mine, theirs in zip(self.parts, other.parts, strict=True)))

    @property
    def parts(self) -> tuple[float, ...]:
        """The fields."""
        return self.matmul, self.attention, self.memory, self.tensor, self.context, self.launch

    def scaled(self, factor: float) -> Pass:
        """So many times this."""
        return Pass(*(part * factor for part in self.parts))


class Kernels:
    """Times of the kernels of one job."""

    def __init__(self, job: Job, fit: Coefficients) -> None:
        gpu = job.machine.gpu
        family = job.machine.gpu.family
        self.job = job
        self.fit = fit
        self.gpu = gpu
        self.hbm = gpu.hbm / fit.memory
        peak = gpu.peak * gpu.power * (gpu.single if job.itemsize > NARROW else 1.0)
        self.wide_rate = peak * fit.of_gpu("matmul", family)
        self.rate = self.wide_rate * self._speedup()
        self.attention_rate = peak * fit.of_gpu("attention", family)

    def _speedup(self) -> float:
        """Of products in 8 or 4 bits, conversions included."""
        fit = self.fit
        gpu = self.gpu
        if self.job.precision == "nvfp4":
            return gpu.fp4 * fit.fp4
        if self.job.precision == "mxfp8":
            return gpu.fp8 * fit.mxfp8
        if self.job.precision == "rowwise":
            return gpu.fp8 * fit.rowwise
        if self.job.precision == "fp8":
            return gpu.fp8 * (fit.fp8_b200 if gpu.family == "b200" else fit.fp8)
        return 1.0

    def matmul(self, product: Matmul, *, narrow: bool = True) -> float:
        """Seconds of one product. ``narrow``: in the job's precision; the head is always in
        bfloat16."""
        moved = self.fit.matmul_bytes * self.job.itemsize * product.elements
        return product.flops / (self.rate if narrow else self.wide_rate) + moved / self.gpu.hbm

    def attention(self) -> float:
        """Seconds of one block's attention forward, for one microbatch."""
        job = self.job
        fit = self.fit
        span = min(job.seq, 1024) if job.traits.packed else job.seq
        flops = (
            4.0
            * job.tokens
            * span
            * job.queries
            * (fit.misaligned if job.model.head_dim % 8 else 1.0)
        )
        if job.traits.attention == "flash":
            return CAUSAL * flops / self.attention_rate
        if job.traits.attention in ("flash1", "triton"):
            return (
                CAUSAL
                * flops
                / self.attention_rate
                * (fit.flash1 if job.traits.attention == "flash1" else fit.triton)
            )
        heads = job.model.num_attention_heads / job.tp
        scores = heads * job.tokens * span * job.itemsize
        passes = fit.scores_fused if job.traits.attention == "fused" else fit.scores_plain
        return flops / self.wide_rate + passes * scores / self.hbm

    def memory(self) -> float:
        """Seconds of norms, rotary embedding, activation and residual sums of one block forward."""
        job = self.job
        fit = self.fit
        traits = self.job.traits
        model = job.model
        split = job.tp if job.sequence_parallel else 1
        streams = 6.0 * model.hidden_size / split
        norms = 4.0 * model.hidden_size / split
        inner = (
            3.0 if traits.gated else 2.0
        ) * model.intermediate_size / job.tp + 4.0 * job.queries
        factor = fit.compiled if traits.compiled else 1.0
        return (
            job.tokens
            * job.itemsize
            * factor
            * (streams + inner + norms * (1.0 if traits.fused_norms else 1.0 + fit.norms))
            / self.hbm
        )

    def forward(self) -> Pass:
        """One block, forward, one microbatch, without communication."""
        traits = self.job.traits
        fit = self.fit
        scale = fit.family(traits.family)
        launch = (fit.launch_old if traits.family in OLD else fit.launch) * (
            0.5 if traits.compiled else 1.0
        )
        products = sum(self.matmul(product) for product in (*self.job.matmuls, *self.job.additions))
        return Pass(
            products * scale, self.attention() * scale, self.memory() * scale, launch=launch
        )

    def backward(self, forward: Pass) -> Pass:
        """One block, backward: both gradients of each product, attention with five products for
        two, without what is computed again."""
        flash = self.job.traits.attention in ("flash", "flash1", "triton")
        attention = (2.5 if flash else 2.0) * forward.attention
        return Pass(
            forward.matmul + self.weight_gradients(),
            attention,
            2 * forward.memory,
            launch=2 * forward.launch,
        )

    def weight_gradients(self) -> float:
        """Seconds of the products that make one block's weight gradients. Frozen weights have
        none."""
        trained = (1 - self.job.trained.frozen) * sum(
            self.matmul(product) for product in self.job.matmuls
        )
        return (
            trained + sum(self.matmul(product) for product in self.job.additions)
        ) * self.fit.family(self.job.traits.family)

    def head(self) -> Pass:
        """The head and the loss, forward: its product, and a few passes over the logits in fp32."""
        product = self.job.head
        passes = self.fit.logits * (0.5 if self.job.traits.compiled else 1.0)
        return Pass(
            self.matmul(product, narrow=False), 0, passes * 4.0 * self.job.logits / self.hbm
        )
