"""Times of kernels on a GPU: matrix products, attention, and operators that only move memory. A
roofline model (Williams et al., 2009) with fitted efficiencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from megatron_llama.model.plan.fp8 import BLOCKWISE, TENSORWISE
from megatron_llama.model.plan.params import kv_copies
from megatron_llama.model.plan.windows import score_share
from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.training_job import Matmul, TrainingJob

BF16_BYTES = 2
"""Bytes of an activation or a weight in 16-bit computation."""
FP32_BYTES = 4
CAUSAL = 0.5
"""Share of the scores that a causal mask leaves. Kernels that write scores compute all of them."""
SHARPNESS = 4
"""Exponent of the norm that joins the times of device and host. The larger it is, the more the
slower of the two decides."""
GRAPH = 0.2
"""Share of the host's time for a block that is left if its passes run as graphs: to wait for the
weights, to report the gradients, and one launch in place of some forty. Assumed, not measured."""
OLD = ("megatron", "aleph")
"""Trainers from before 2023, whose blocks are many small kernels."""


@dataclass(frozen=True)
class PassTime:
    """Seconds of one pass through one block (or the ends of the model) on one rank, by purpose."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    tensor: float = 0.0
    """Exposed communication over tp."""
    context: float = 0.0
    """Exposed communication over cp."""
    expert: float = 0.0
    """Exposed communication over ep."""
    launch: float = 0.0
    """The host's time to launch the kernels, while the device works."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole pass. The slower of device and host decides. If their times are
        close, each sometimes waits for the other."""
        device = sum(self.parts[:-1])
        return float((device**SHARPNESS + self.launch**SHARPNESS) ** (1 / SHARPNESS))

    def __add__(self, other: PassTime) -> PassTime:
        return PassTime(
            *(mine + theirs for mine, theirs in zip(self.parts, other.parts, strict=True))
        )

    @property
    def parts(self) -> tuple[float, ...]:
        """The values of the fields in order."""
        return (
            *(self.matmul, self.attention, self.memory),
            *(self.tensor, self.context, self.expert, self.launch),
        )

    def scaled(self, factor: float) -> PassTime:
        """Return the times multiplied by ``factor``."""
        return PassTime(*(seconds * factor for seconds in self.parts))


CONVERTED: Mapping[str, float] = MappingProxyType({BLOCKWISE: 4.0, TENSORWISE: 7.0})
"""Bytes that move for each element of a weight when its codes are made, by recipe of --fp8: a read
in 16 bits, and a write in both orders; with one scale a tensor also a read for it, and a read of
the codes in the one order."""


class Kernels:
    """Times of the kernels of one job."""

    def __init__(self, job: TrainingJob, fit: Coefficients) -> None:
        gpu = job.machine.gpu
        self.job = job
        self.fit = fit
        self.gpu = gpu
        self.hbm = gpu.hbm / fit.memory
        peak = gpu.peak * gpu.power * (gpu.single if job.itemsize > BF16_BYTES else 1.0)
        self.base_rate = peak * fit.of_gpu("matmul", gpu.family)
        """FLOP/s of products in 16 bits or more."""
        self.rate = self._rate(job.narrow)
        """The same of products in the job's precision, over all blocks."""
        self.all_narrow = job.precision not in CONVERTED
        """Whether weight gradients and low-rank additions are in the job's precision too, as other
        trainers have them."""
        self.attention_rate = peak * fit.of_gpu("attention", gpu.family)
        single = gpu.peak * gpu.power * gpu.single
        self.single_rate = single * fit.of_gpu("matmul", gpu.family)
        """FLOP/s of products in fp32."""

    def _rate(self, narrow: float) -> float:
        """Return the FLOP/s of products of which so large a share is in the job's precision."""
        return self.base_rate / ((1.0 - narrow) + narrow / self._speedup())

    def _speedup(self) -> float:
        """Return the rate of products in 8 or 4 bits relative to 16 bits, with conversions."""
        fit = self.fit
        gpu = self.gpu
        if self.job.precision == "nvfp4":
            return gpu.fp4 * fit.fp4
        if self.job.precision == "mxfp8":
            return gpu.fp8 * fit.mxfp8
        if self.job.precision == "rowwise":
            return gpu.fp8 * fit.rowwise
        if self.job.precision == "blockwise":
            return gpu.fp8 * fit.blockwise
        if self.job.precision in ("fp8", "tensorwise"):
            return gpu.fp8 * (fit.fp8_b200 if gpu.family == "b200" else fit.fp8)
        return 1.0

    def matmul(
        self, product: Matmul, *, reduced: bool = True, narrow: float | None = None
    ) -> float:
        """Return the seconds of one product. ``reduced`` says that the product is in the job's 8 or
        4 bits, if it has these; the head is always in bfloat16. ``narrow``: the share of the blocks
        in which it is; None: that of all blocks."""
        of_blocks = self.rate if narrow is None else self._rate(narrow)
        rate = of_blocks if reduced else self.base_rate
        moved = self.fit.matmul_bytes * self.job.itemsize * product.elements
        return product.flops / rate + moved / self.gpu.hbm

    def attention(self) -> float:
        """Return the seconds of one block's attention in the forward pass of one microbatch, as the
        mean of layers with and without a window."""
        job = self.job
        fit = self.fit
        kind = job.traits.attention
        span = min(job.seq, 1024) if job.traits.packed else job.seq
        misaligned = fit.misaligned if job.model.head_dim % 8 else 1.0
        flops = 4.0 * job.tokens * span * job.queries * misaligned
        if kind in ("flash", "flash1", "triton"):
            slower = {"flash1": fit.flash1, "triton": fit.triton}.get(kind, 1.0)
            seen = score_share(job.model, span)
            return CAUSAL * seen * flops / self.attention_rate * slower
        heads = job.model.num_attention_heads / job.tp
        scores = heads * job.tokens * span * job.itemsize
        passes = fit.scores_fused if kind == "fused" else fit.scores_plain
        return flops / self.base_rate + passes * scores / self.hbm

    def memory(self) -> float:
        """Return the seconds of a block's memory-bound operators in the forward pass: norms, rotary
        embedding, activation, residual sums, and biases that no product adds; without what experts
        move (``moved``)."""
        job = self.job
        model = job.model
        traits = job.traits
        split = job.tp if job.sequence_parallel else 1
        # Biases of row-parallel layers are added behind their sums: one read and one write each.
        sums = 6.0 + 2.0 * (model.attention_bias + model.mlp_bias)
        streams = sums * model.hidden_size / split
        norms = (8.0 if model.norm_position == "both" else 4.0) * model.hidden_size / split
        norms *= 1.0 if traits.fused_norms else 1.0 + self.fit.norms
        gates = 3.0 if traits.gated else 2.0
        inner = gates * model.intermediate_size / job.tp + 4.0 * job.queries
        if model.qk_norm != "none":
            # Queries and keys are read once and written twice: as a copy, then normed in place.
            inner += 3.0 * job.queries * (1.0 + self._keys_of_a_query())
        compiled = self.fit.compiled if traits.compiled else 1.0
        dense = job.tokens * job.itemsize * compiled * (streams + inner + norms) / self.hbm
        if job.experts is None:
            return dense
        activated = job.tokens * job.itemsize * gates * model.intermediate_size / job.tp
        return dense - job.sparse * activated / self.hbm

    def moved(self, size: int, coded: int) -> float:
        """Return the seconds in which experts move ``size`` bytes in each block that has some, and
        ``coded`` more in each of them that is in 8 bits, as the mean of all blocks."""
        return self.job.sparse * (size + self.job.narrow_experts * coded) / self.hbm

    def _keys_of_a_query(self) -> float:
        """Return the number of a rank's key heads for each query head."""
        model = self.job.model
        copies = kv_copies(model, self.job.tp)
        return model.num_key_value_heads * copies / model.num_attention_heads

    def forward(self) -> PassTime:
        """Return the forward pass of one block and microbatch, without communication."""
        traits = self.job.traits
        fit = self.fit
        scale = fit.family(traits.family)
        launch = fit.launch_old if traits.family in OLD else fit.launch
        products = self._products() + self._additions()
        work = self.job.experts
        moved = 0.0 if work is None else self.moved(work.moved, work.coded)
        return PassTime(
            products * scale,
            self.attention() * scale,
            (self.memory() + moved) * scale,
            launch=launch * (0.5 if traits.compiled else 1.0) * (GRAPH if self.job.graphs else 1.0),
        )

    def backward(self, forward: PassTime) -> PassTime:
        """Return the backward pass of one block, without recomputation: two gradients of each
        product. Attention has five products instead of two (Dao et al., 2022, appendix B.4)."""
        flash = self.job.traits.attention in ("flash", "flash1", "triton")
        memory = 2 * forward.memory
        if (work := self.job.experts) is not None:
            scale = self.fit.family(self.job.traits.family)
            back = self.moved(work.moved_back, work.coded_back)
            memory += (back - 2 * self.moved(work.moved, work.coded)) * scale
        return PassTime(
            forward.matmul + self.weight_gradients(),
            (2.5 if flash else 2.0) * forward.attention,
            memory,
            launch=2 * forward.launch,
        )

    def weight_gradients(self) -> float:
        """Return the seconds of the products that make one block's weight gradients. Frozen weights
        have none."""
        matmuls = self._products(reduced=self.all_narrow) + self._expert_gradients()
        seconds = (1 - self.job.trained.frozen) * matmuls + self._additions()
        return seconds * self.fit.family(self.job.traits.family)

    def _products(self, *, reduced: bool = True) -> float:
        """Return the seconds of one pass of the products with the weights of one block, as the mean
        of blocks with and without experts."""
        job = self.job
        work = job.experts
        if work is None:
            return sum(self.matmul(product, reduced=reduced) for product in job.matmuls)

        def total(products: Sequence[Matmul], narrow: float) -> float:
            return sum(self.matmul(product, reduced=reduced, narrow=narrow) for product in products)

        experts = sum(self.grouped(product, reduced=reduced) for product in work.grouped)
        sparse = total(work.shared, job.narrow_experts) + experts + self._router()
        dense = total(job.mlp, job.narrow_dense)
        return total(job.attention, job.narrow) + (1 - job.sparse) * dense + job.sparse * sparse

    def grouped(self, product: Matmul, *, reduced: bool = True) -> float:
        """Return the seconds of the products of all experts of a rank. Each takes as long as a
        product of its own: the fewer tokens an expert has, the more its weight's bytes count. In 8
        bits factors are codes, with their scales."""
        job = self.job
        work = job.experts
        assert work is not None
        narrow = job.narrow_experts if reduced and job.precision in CONVERTED else 0.0
        seconds = (1.0 - narrow) * self.matmul(product, reduced=False)
        if narrow:
            moved = work.codes(product) + job.itemsize * product.m * product.n
            bytes_time = self.fit.matmul_bytes * moved / self.gpu.hbm
            seconds += narrow * (product.flops / self._rate(1.0) + bytes_time)
        return work.count * seconds

    def _router(self) -> float:
        assert self.job.experts is not None
        product = self.job.experts.router
        itemsize = max(self.job.itemsize, FP32_BYTES)
        moved = self.fit.matmul_bytes * itemsize * product.elements
        return product.flops / self.single_rate + moved / self.gpu.hbm

    def _expert_gradients(self) -> float:
        """Return the seconds in which gradients of experts are read and written beyond what a
        product moves: all of them for each microbatch, in fp32, however few tokens they are of."""
        job = self.job
        if job.experts is None:
            return 0.0
        # The sum over microbatches is read, unless each is sent by itself.
        times = 1 if job.sharding in ("gradients", "parameters") else 2
        more = times * job.traits.kept_gradient_bytes - self.fit.matmul_bytes * job.itemsize
        return job.sparse * max(0.0, more) * job.experts.numel / self.gpu.hbm

    def selective(self) -> PassTime:
        """Return the part of one block's forward pass that selective recomputation repeats: half of
        the memory-bound work, and of experts the first product."""
        scale = self.fit.family(self.job.traits.family)
        memory = 0.5 * self.memory() * scale
        work = self.job.experts
        if work is None:
            return PassTime(memory=memory)
        first = self.job.sparse * self.grouped(work.grouped[0])
        moved = self.moved(work.moved_again, work.coded_again)
        return PassTime(matmul=first * scale, memory=memory + moved * scale)

    def _additions(self) -> float:
        return sum(self.matmul(product, reduced=self.all_narrow) for product in self.job.additions)

    def weight_codes(self) -> float:
        """Return the seconds in which the codes of one block's weights are made, without
        messages."""
        job = self.job
        moved = CONVERTED.get(job.precision, 0.0) * job.narrow * job.code_elements
        if job.experts is not None and job.precision == TENSORWISE:
            # Each expert has a scale of its own: its codes are made apart, and copied to their
            # place.
            moved += 2.0 * job.sparse * job.narrow_experts * job.experts.numel
        return moved / self.hbm

    def head(self) -> PassTime:
        """Return the forward pass of head and loss: a product, and passes over fp32 logits."""
        passes = self.fit.logits * (0.5 if self.job.traits.compiled else 1.0)
        logits = passes * 4.0 * self.job.logits / self.hbm
        return PassTime(self.matmul(self.job.head, reduced=False), 0, logits)
