"""Coefficients of the planner: speeds of kernels and links relative to data sheets. Each number has
a physical meaning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coefficients:
    """Efficiencies and times of kernels, links and steps. Efficiencies are shares of a data sheet's
    rate. The defaults are the prior of the fit; ``fitted.py`` has its result."""

    matmul_v100: float = 0.62
    """Share of the dense peak that large products reach; bytes come on top (``matmul_bytes``)."""
    matmul_a100: float = 0.75
    matmul_h100: float = 0.70
    matmul_b200: float = 0.70
    matmul_own: float = 0.7
    """The same for a device whose peak was measured by ``plan calibrate``."""
    fp8: float = 0.72
    """Rate of 8-bit products on Hopper relative to twice the 16-bit rate, with conversions."""
    fp8_b200: float = 0.85
    blockwise: float = 0.8
    """The same with a scale for every tile (--fp8 blockwise), of products that are no weight
    gradients. Assumed, not measured."""
    rowwise: float = 0.4
    """The same with a scale for every row."""
    mxfp8: float = 0.7
    fp4: float = 0.4
    matmul_bytes: float = 1.0
    """Bytes that a product moves relative to the least bytes. They take the memory's full rate, in
    addition to the time of the arithmetic."""
    attention_a100: float = 0.5
    """Share of the peak that flash attention reaches, with half of the scores counted."""
    attention_h100: float = 0.5
    attention_b200: float = 0.45
    attention_own: float = 0.3
    flash1: float = 1.3
    """Time of flash attention 1 relative to flash attention 2."""
    triton: float = 2.0
    """Time of flash attention in Triton with a bias (MPT) relative to flash attention 2."""
    scores_fused: float = 5.0
    """Times that written scores are moved in a forward pass, with softmax in one kernel."""
    scores_plain: float = 9.0
    """The same with a kernel for every operation."""
    misaligned: float = 16.0
    """Relative time of attention's products if the head dimension is not a multiple of 8. Tensor
    cores cannot compute these (312 against 19.5 TFLOP/s)."""
    memory: float = 1.0
    """Bytes that norms, activation, rotary embedding and residual sums move, relative to the ideal
    bytes."""
    compiled: float = 0.7
    """Factor on ``memory`` if a compiler or hand-written kernels fuse these operators."""
    norms: float = 6.0
    """Extra bytes of a norm of separate fp32 operations, relative to a norm of one kernel."""
    logits: float = 2.0
    """Passes over the fp32 logits in the forward pass."""
    launch: float = 150e-6
    """Seconds that the host needs to start a block's forward pass. Published runs hardly depend on
    it. A block's 84 to 112 operators, forward and backward, would take two to three times as long
    at ten microseconds each, which is an assumption too: ``plan calibrate`` measures it."""
    launch_old: float = 1e-3
    """The same in trainers of many small kernels."""
    pcie: float = 0.8
    """Share of the bus's rate that large copies between device and host reach. It is not fitted: no
    published run contains such copies."""
    host: float = 0.6
    """Share of the host memory's rate that updates on the host reach."""
    pressure: float = 0.1
    """Slowdown if more than 85 % of the memory is used: the allocator returns memory and takes it
    again."""
    nvlink: float = 0.75
    """Share of NVLink's rate that rings reach."""
    nic: float = 0.75
    """Share of the network cards' rate that rings reach."""
    latency: float = 25e-6
    """Seconds to start a collective inside a node, and until all its ranks have joined."""
    latency_across: float = 30e-6
    hop: float = 8e-6
    """Seconds from one node to the next in a ring."""
    hop_inside: float = 1e-6
    broadcast: float = 2e-3
    """Seconds for each shard if updated parameters are broadcast rank by rank (InternEvo)."""
    tensor_overlap: float = 0.6
    """Share of tensor-parallel communication that stays exposed if products overlap with it."""
    data_exposed: float = 0.2
    """Share of data-parallel communication that stays exposed during backward and forward
    passes."""
    parameters_exposed: float = 0.3
    """Delay that kernels and gathers or reductions of sharded parameters cause each other, as a
    share of the shorter of the two."""
    cp_exposed: float = 0.3
    """Exposed share of keys and values that travel between context-parallel ranks."""
    pipeline_exposed: float = 1.0
    """Exposed share of sends between pipeline stages."""
    straggle: float = 0.006
    """Slowdown of a step for each doubling of the GPUs beyond 8."""
    step: float = 0.02
    """Seconds of a step for data, norm and the log line."""
    family_aleph: float = 1.2
    """Time of a trainer's kernels that no other coefficient explains, relative to NVIDIA's own."""
    family_megatron: float = 1.2
    family_nemo: float = 1.0
    family_composer: float = 1.2
    family_fsdp1: float = 1.2
    family_yafsdp: float = 1.2
    family_torchtitan: float = 1.2
    family_intern: float = 1.2
    family_deepspeed: float = 1.2
    family_other: float = 1.2

    def family(self, name: str) -> float:
        """Return the factor of a family of trainers; ``family_other`` for an unknown family."""
        return float(getattr(self, f"family_{name}", self.family_other))

    def of_gpu(self, what: str, family: str) -> float:
        """Return a coefficient that depends on the GPU, ``matmul`` or ``attention``. V100s run
        attention like A100s."""
        return float(getattr(self, f"{what}_{family}", self.attention_a100))
