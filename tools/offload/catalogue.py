"""Who is compared: the modes of this project by name, their configurations, and the least that a
step of each can take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.engine.offload_options import EXACT, NONE, ZENFLOW, ZenFlowConfig
from megatron_llama.engine.plan.offload import offload_plan
from megatron_llama.engine.plan.zenflow import longest_window
from megatron_llama.pipeline.plan.run_engine import engine_options, rank_bucket_plan

NEVER = 1e9
ALWAYS = 1e-9
"""Norms to clip to, where it happens in no step, and in every one."""
SMALL = ModelConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=8,
    num_attention_heads=4,
)
BUCKET_ELEMENTS = 66_000
"""For the small model: one bucket for each fused weight. With --model llama2-7b and buckets as they
are by default there are 163."""


@dataclass(frozen=True)
class Mode:
    """One way to run the engine of this project."""

    name: str
    offload: str
    clip: float | None
    """None: as the configuration has it."""
    bound: Callable[[Numbers], float]
    """Seconds of a step at least."""
    blocking: bool = False
    speculative: bool = False


@dataclass(frozen=True)
class Numbers:
    """What a machine takes for the parts of a step: seconds, of the whole model."""

    microbatches: int
    forward: float
    """Of one microbatch."""
    backward: float
    """Of one microbatch."""
    bus: float
    """Copying four bytes of each element in one direction."""
    update: float
    """On the host, when nothing else is done there."""
    wide: int = 4
    """Bytes of a gradient on its way to the host."""
    narrow: int = 4
    """Bytes of a weight on its way to the device."""
    cold: float = 1.0
    """With ZenFlow: the share of elements that is updated on the host."""
    window: int = 1
    """With ZenFlow: steps of one such update."""

    @property
    def compute(self) -> float:
        """Of a step on the device, the optimizer aside."""
        return self.microbatches * (self.forward + self.backward)

    def copy(self, size: float) -> float:
        """Seconds for so many bytes of each element, in one direction."""
        return self.bus * size / 4


def waiting(n: Numbers) -> float:
    """Everything after everything else."""
    return n.compute + n.copy(n.wide) + n.update + n.copy(n.narrow)


def barrier(n: Numbers) -> float:
    """Updates begin at the norm and run beside the next forward pass."""
    return n.compute + max(0.0, n.update - n.forward)


def no_barrier(n: Numbers) -> float:
    """Updates begin in the last backward pass."""
    return n.compute + max(0.0, n.update - n.forward - n.backward)


def windows(n: Numbers) -> float:
    """Copies and updates of cold columns beside everything."""
    return max(n.compute, n.copy(n.cold * n.narrow), n.cold * n.update / n.window)


MODES = (
    Mode("no offload", NONE, None, lambda n: n.compute),
    Mode("blocking", EXACT, None, waiting, blocking=True),
    Mode("exact", EXACT, None, barrier),
    Mode("exact, no clipping", EXACT, 0.0, no_barrier),
    Mode("exact, speculation hits", EXACT, NEVER, no_barrier, speculative=True),
    Mode("exact, speculation misses", EXACT, ALWAYS, barrier, speculative=True),
    Mode("zenflow", ZENFLOW, None, windows),
)
"""All norms are clipped to --clip-grad unless the name says otherwise."""


def configuration(mode: Mode, config: Config) -> Config:
    """A mode of a resolved configuration. ZenFlow: a tenth of the columns, four steps, beside the
    next ones, unless options say more."""
    clip = config.optimizer.clip_grad if mode.clip is None else mode.clip
    offload = replace(
        config.offload,
        optimizer_offload=mode.offload,  # type: ignore[arg-type]
        offload_speculative=mode.speculative,
    )
    zenflow = config.zenflow
    if zenflow == ZenFlowConfig():
        zenflow = replace(zenflow, zenflow_update_interval="4", zenflow_overlap_step=True)
    return replace(
        config,
        offload=offload,
        optimizer=replace(config.optimizer, clip_grad=clip),
        zenflow=zenflow,
    )


def numbers_of(mode: Mode, config: Config, machine: Numbers) -> Numbers:
    """The machine's, with what the mode copies."""
    layout = rank_bucket_plan(config, dp=1)
    plan = offload_plan(engine_options(config), layout)
    total = elements(config)
    if plan is None:
        return machine
    wide = round(plan.to_host / total)
    narrow = round(plan.to_device / total)
    if mode.offload != ZENFLOW:
        return replace(machine, wide=wide, narrow=narrow)
    cold = 1 - config.zenflow.zenflow_topk_ratio
    return replace(
        machine,
        narrow=2 if config.training.bf16 else 4,
        cold=cold,
        window=longest_window(config.zenflow),
    )


def elements(config: Config) -> int:
    """Trained elements of one process, padding included."""
    layout = rank_bucket_plan(config, dp=1)
    return sum(bucket.numel for bucket in layout.buckets if bucket.kind.trainable)
