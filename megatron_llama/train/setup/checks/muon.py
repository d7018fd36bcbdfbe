"""Checks of ``--optimizer muon``."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.config.parse import flag
from megatron_llama.config.schema import Config
from megatron_llama.engine.plan.muon import split_matrices
from megatron_llama.errors import describe
from megatron_llama.train.setup.checks.whole_units import whole_units

_HOST = "the matrices are orthogonalised where the model computes"


def muon_problems(config: Config) -> Iterator[str]:
    """Yield options with which Muon cannot be used, and meaningless numbers."""
    optimizer = config.optimizer
    if not 0 <= optimizer.muon_momentum < 1:
        yield describe(
            flag("muon_momentum"),
            got=optimizer.muon_momentum,
            expected="a number in [0, 1)",
            do="give --muon-momentum 0.95 or so",
        )
    if not 0 < optimizer.muon_num_ns_steps < 100:
        yield describe(
            flag("muon_num_ns_steps"),
            got=optimizer.muon_num_ns_steps,
            expected="1 to 99",
            do="5 bring singular values near 1",
        )
    offload = config.offload.optimizer_offload
    if offload != "none":
        yield describe(
            "--optimizer muon",
            got=f"--optimizer-offload {offload}",
            expected=f"none: {_HOST}",
            do="leave --optimizer-offload out, or take --optimizer adam",
        )
    if config.lora.lora_rank:
        yield describe(
            "--optimizer muon",
            got=f"--lora-rank {config.lora.lora_rank}",
            expected="weights that are trained: AdamW updates low-rank additions",
            do="take --optimizer adam",
        )
    tp = config.parallel.tensor_model_parallel_size
    units = whole_units(config, tp=tp)
    if not units:
        return
    if not any(spec.muon for unit in units for spec in unit.params) and not config.lora.lora_rank:
        yield describe(
            "--optimizer muon",
            got=f"--freeze {' '.join(optimizer.freeze)}",
            expected="matrices of blocks that are trained",
            do="take --optimizer adam, or freeze less",
        )
    if split := split_matrices(units):
        # Queries are then a separate weight from keys and values, which have copies.
        yield describe(
            "--optimizer muon",
            got=f"--tensor-model-parallel-size {tp}, which cuts {split[0]} into several weights",
            expected=f"at most num_key_value_heads {config.model.num_key_value_heads}",
            do="use fewer tensor-parallel ranks, or take --optimizer adam",
        )
