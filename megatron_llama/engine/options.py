"""The engine's options: ``EngineOptions``, and the numbers of each group of parameters.

The engine's callers make them: ``shard`` from its arguments, the trainer from its configuration
(``engine_options`` in ``pipeline/plan/run_engine.py``). Nothing here is read from a file or a flag.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megatron_llama.engine.offload_options import OffloadConfig, ZenFlowConfig

ADAM = "adam"
MUON = "muon"
SCHEDULE_FREE = "schedule_free_adamw"
TORCH = "torch"
"""The update rules."""
FP32 = "fp32"
BF16 = "bf16"
FP16 = "fp16"
FP64 = "fp64"
EIGHT_BIT = "8bit"
"""The names of dtypes: plans import no torch. Moments have the first two and the last."""


@dataclass(frozen=True)
class UpdateOptions:
    """The numbers of an update rule for one group of parameters."""

    lr: float = 3e-4
    """The peak learning rate. Each step has its own: schedule-free AdamW alone reads this one, to
    weigh a step by its share of the peak."""
    weight_decay: float = 0.01
    """Decoupled weight decay, per unit of the learning rate, of parameters that decay."""
    adam_beta1: float = 0.9
    """Decay of the first moment, per step."""
    adam_beta2: float = 0.999
    """Decay of the second moment, per step."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    exp_avg_dtype: str = FP32
    """Dtype of the first moment: fp32, bf16, or 8bit with a scale for each 64 elements."""
    exp_avg_sq_dtype: str = FP32
    """Dtype of the second moment, likewise."""
    muon_momentum: float = 0.95
    """Decay of Muon's momentum, per step."""
    muon_nesterov: bool = True
    """Whether Muon looks ahead by one step of momentum."""
    muon_num_ns_steps: int = 5
    """Newton-Schulz iterations of Muon."""
    muon_adjust_lr: str = "match_rms_adamw"
    """The rule by which Muon's rate follows a matrix's shape: match_rms_adamw or original."""


@dataclass(frozen=True)
class StateTensor:
    """A tensor that an optimizer of torch keeps of a parameter."""

    name: str
    per_element: bool
    """Whether it has the parameter's shape; else it is a number."""
    itemsize: int | None
    """Bytes of an element. None: as many as the master has."""


@dataclass(frozen=True)
class TorchGroup(UpdateOptions):
    """A group of parameters that an optimizer of torch updates. The numbers of the other rules do
    not count; ``options`` has its own."""

    optimizer: Any = field(default=None, repr=False, compare=False)
    """A copy of the user's optimizer without parameters, groups and state."""
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """All options of the group, as torch.optim has them, but the learning rate."""
    state: tuple[StateTensor, ...] = ()
    """The state that it keeps of each parameter."""
    initial: Mapping[str, float] | None = None
    """The numbers with which the state begins, by its name. None: the optimizer makes its state in
    its first step, of values that are known only then."""


@dataclass(frozen=True)
class LossScaling:
    """A loss scale that follows overflows, as fp16 needs it."""

    initial_loss_scale: float = 65536.0
    """The factor of the loss in the first step."""
    min_loss_scale: float = 1.0
    """The factor never falls below this."""
    loss_scale_window: int = 1000
    """Steps without overflow after which the factor doubles."""
    hysteresis: int = 2
    """Overflowing steps in a row before the factor halves."""


@dataclass(frozen=True)
class EngineOptions:
    """The engine's options, whatever the model is."""

    strategy: str = "optim_grads_params"
    """The share of each rank: ``no_shard``, ``optim``, ``optim_grads`` or ``optim_grads_params``,
    explained at ``strategy_named``."""
    param_slots: int | None = 2
    """Units whose whole parameters a rank holds at a time, where parameters are sharded. None: all
    of them, so that each is gathered once in a step."""
    grad_slots: int = 2
    """Units whose whole gradients a rank holds at a time, where gradients are sharded."""
    bucket_size: int = 0
    """The most elements of one message, if buckets are filled by size and not by unit. 0: as
    ``largest_message`` says."""
    dtype: str = FP32
    """Dtype of parameters and activations: fp32, bf16, fp16 or fp64. Masters and gradients are in
    fp32, or with fp64 in fp64."""
    reduces_in_bf16: bool = False
    """Whether gradients travel in bf16, and not in the dtype of the masters."""
    sums_wide: bool = False
    """Whether a device adds up gradients that travel in bf16 in the dtype of the masters, as the
    host always does. Else the backend adds them in bf16, one rank after the other."""
    registers_buffers: bool = False
    """Whether the memory of messages is registered with NCCL (``comm/registered.py``)."""
    chunk_bytes: int = 1_048_576
    """Bytes of the largest piece of a message, where the backend is gloo."""
    prefetch_bytes: int = 0
    """The most bytes that are gathered before they are needed. 0: as many as the slots hold."""
    grad_divisor: float = 1.0
    """Divides the sum of the gradients over ranks and microbatches, in norm and update: the number
    of ranks for their mean."""
    find_unused: bool = False
    """Whether ranks may leave out different parameters in a step. Whole gradients then accumulate
    in slots of their own until its end (``GradientBuckets``)."""
    clip: float = 0.0
    """The norm above which steps will scale the gradient; 0: never. It serves to plan the memory of
    speculative updates: each step gets its own."""
    rule: str = ADAM
    """The update rule: ``adam`` (AdamW), ``schedule_free_adamw``, ``muon``, which updates the
    matrices of blocks, and AdamW the rest, or ``torch``, an elementwise optimizer of torch.optim's
    kind, with a ``TorchGroup`` for each group."""
    groups: tuple[UpdateOptions, ...] = (UpdateOptions(),)
    """The numbers of each group of parameters, by ``ParamSpec.group``."""
    loss_scaling: LossScaling | None = None
    """The rule by which the factor of the loss follows overflows. None: it stays 1."""
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    """The part of the optimizer that the host holds and updates."""
    zenflow: ZenFlowConfig = field(default_factory=ZenFlowConfig)
    """The windows and columns of offload by ZenFlow."""

    def largest_message(self, shards: int) -> int:
        """Return the most elements of one message over ``shards`` ranks. By default pieces of a
        ring are a million elements and more, as Megatron-LM's are (``--ddp-bucket-size``)."""
        return self.bucket_size or max(40_000_000, 1_000_000 * shards)

    @property
    def itemsize(self) -> int:
        """Bytes of a parameter or activation."""
        return self.itemsize_of()

    def itemsize_of(self, dtype: str = "") -> int:
        """Return the bytes of an element of a parameter that has this dtype, or the engine's."""
        return {FP64: 8, FP32: 4, FP16: 2, BF16: 2}[dtype or self.dtype]

    @property
    def master_itemsize(self) -> int:
        """Bytes of a master weight, a moment in full, or an accumulated gradient."""
        return max(self.itemsize, 4)

    def wire_itemsize(self, reduces_in: str = "") -> int:
        """Return the bytes of an element of a gradient while it travels between data-parallel
        ranks, of a parameter with this ``reduces_in``."""
        in_bf16 = reduces_in == BF16 if reduces_in else self.reduces_in_bf16
        return 2 if in_bf16 else self.master_itemsize
