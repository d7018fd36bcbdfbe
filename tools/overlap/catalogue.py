"""What is compared: the model, and every contender by name. Integers and strings only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megatron_llama.config.schema import (
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)

BLOCKS = 6
SEQUENCE = 16
STEPS = 4
"""Training steps of one contender in one round, one after the other."""
BUCKET_ELEMENTS = 262144
"""One bucket for each fused weight, o_proj with its qkv_proj: the finest cut that keeps weights
whole. A larger bucket is reduced later and holds up the forward pass for longer; a smaller one
cannot hold the two attention weights (768 + 256 rows of 256)."""
USER_BUCKET_ELEMENTS = 352256
"""For a user's module: the largest bucket of our own model, gate_proj and up_proj as one weight.
With BUCKET_ELEMENTS each has its own in a user's module: nine more reductions and gathers."""
NOMINAL_BITS_PER_SECOND = 400e6
"""The rate at which sending the minimum takes as long as computing; at 800mbit it takes half as
long."""


@dataclass(frozen=True)
class Mode:
    """One way to run the engine of this project."""

    name: str
    strategy: str
    clip: float = 1.0
    bf16: bool = False
    param_slots: str = "default"
    optimizer: Literal["adam", "muon"] = "adam"
    divides: bool = False
    """Whether all hosts divide the experts of a block among them."""


MODES = (
    Mode("optim", "optim"),
    Mode("optim-noclip", "optim", clip=0.0),
    Mode("optim-bf16", "optim", bf16=True),
    Mode("no_shard", "no_shard"),
    Mode("optim_grads", "optim_grads"),
    Mode("optim_grads_params", "optim_grads_params"),
    Mode("optim_grads_params-3", "optim_grads_params", param_slots="3"),
    Mode("optim-muon", "optim", optimizer="muon"),
)
EXPERT_MODES = (Mode("optim-ep", "optim", divides=True),)
"""Ways to run our own model with experts, besides those of ``MODES``."""
COMPUTE = "compute"
"""The same model and waits without communication: what every time is divided by."""
PEERS = ("serial", "ddp", "ddp-zero", "fsdp2", "fsdp2-reshard")
HF = "hf:"
"""In front of a name: the same with blocks of Hugging Face's LLaMA instead of our own. Peers wrap
them, and a mode of ours is ``megatron_llama.shard``."""
HF_PEERS = tuple(HF + name for name in ("ddp", "fsdp2", "fsdp2-reshard"))
HF_MODES = tuple(
    HF + name
    for name in ("optim", "no_shard", "optim_grads", "optim_grads_params", "optim_grads_params-3")
)
NAMES = (COMPUTE, *PEERS, *(mode.name for mode in MODES))
EXPERT_NAMES = tuple(mode.name for mode in EXPERT_MODES)
HF_NAMES = (HF + COMPUTE, *HF_PEERS, *HF_MODES)
USER = (
    COMPUTE,
    "optim",
    "optim_grads_params-3",
    HF + COMPUTE,
    *HF_PEERS,
    HF + "optim",
    HF + "optim_grads_params-3",
)
"""What ``--user-module`` compares."""
MIXTURE = (
    COMPUTE,
    "optim",
    *EXPERT_NAMES,
    HF + COMPUTE,
    *HF_PEERS,
    HF + "optim",
    HF + "optim_grads",
    HF + "optim_grads_params-3",
)
"""What ``--experts`` compares."""
EXPERTS_PER_TOKEN = 2


def mode_named(name: str) -> Mode | None:
    """The mode of the engine with this name, whichever model it trains; None for a peer."""
    known = MODES + EXPERT_MODES
    return next((mode for mode in known if mode.name == name.removeprefix(HF)), None)


def baseline(name: str) -> str:
    """The contender without communication that trains the same model."""
    return HF + COMPUTE if name.startswith(HF) else COMPUTE


def model(experts: int = 0) -> ModelConfig:
    """5.27 million parameters, and routers of ``experts``, which share out the width of an MLP."""
    dense = ModelConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=SEQUENCE,
    )
    if not experts:
        return dense
    inner = dense.intermediate_size // experts
    return replace(
        dense,
        model_type="mixtral",
        intermediate_size=inner,
        moe_intermediate_size=inner,
        num_experts=experts,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        norm_topk_prob=True,
    )


def configuration(mode: Mode, hosts: int, experts: int = 0) -> Config:
    """A resolved configuration."""
    return Config(
        model=model(experts),
        parallel=ParallelConfig(
            data_parallel_sharding_strategy=mode.strategy,  # type: ignore[arg-type]
            reduce_bucket_size=BUCKET_ELEMENTS,
            grad_reduce_in_bf16=mode.bf16,
            param_slots=mode.param_slots,
            expert_model_parallel_size=hosts if mode.divides else 1,
        ),
        training=TrainingConfig(
            seq_length=SEQUENCE,
            micro_batch_size=1,
            global_batch_size=hosts,
            train_iters=1,
            bf16=mode.bf16,
        ),
        optimizer=OptimizerConfig(clip_grad=mode.clip, optimizer=mode.optimizer),
    )


def block_parameters() -> int:
    """Elements of one block."""
    m = model()
    return 4 * m.hidden_size**2 + 3 * m.hidden_size * m.intermediate_size + 2 * m.hidden_size


def parameters() -> int:
    """Elements of the model."""
    m = model()
    return 2 * m.vocab_size * m.hidden_size + BLOCKS * block_parameters() + m.hidden_size


def minimum_bytes(hosts: int) -> float:
    """What one rank sends in a step at least: its part of every fp32 gradient to its owner, its own
    fp32 shard to the others."""
    return 2 * (hosts - 1) / hosts * 4 * parameters()


def strategy_minimum(mode: Mode, hosts: int) -> float:
    """What one rank sends in a step at least under the strategy of a mode: ``minimum_bytes``, and
    its own shard of every block that backward gathers again because its slot had to be given to
    another."""
    slots = {"default": 2, "all": BLOCKS}.get(mode.param_slots)
    kept = int(mode.param_slots) if slots is None else slots
    again = BLOCKS - kept if mode.strategy == "optim_grads_params" else 0
    return minimum_bytes(hosts) + (hosts - 1) / hosts * 4 * again * block_parameters()


def compute_seconds(hosts: int) -> float:
    """Timed waits of one step: as long as the minimum takes at the nominal rate."""
    return minimum_bytes(hosts) * 8 / NOMINAL_BITS_PER_SECOND


def half_block_seconds(hosts: int) -> float:
    """Forward time of half a block; backward takes twice that."""
    return compute_seconds(hosts) / (BLOCKS * 2 * 3)
