"""Optimizers beside AdamW, and what ``shard`` refuses to combine with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_llama.engine.options import ADAM, FP32, MUON, SCHEDULE_FREE
from megatron_llama.engine.shard.optimizer import AdamW, Elementwise, ParameterGroup
from megatron_llama.errors import ConfigError


@dataclass(frozen=True)
class ScheduleFreeAdamW(AdamW):
    """Schedule-free AdamW (Defazio et al., 2024): an average of the weights takes the place of a
    learning rate that decays.

    The model trains with one set of weights, and everything that reads it between steps has the
    average: passes under ``torch.no_grad()``, ``gathered``, ``masters`` and state dicts. Warm the
    learning rate up from ``lr`` times a share, and leave it there. Other options than ``lr`` cannot
    change. A state that is loaded without its optimizer's part goes on with the old steps."""

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if (self.exp_avg_dtype, self.exp_avg_sq_dtype) != (FP32, FP32):
            raise ConfigError(
                "ml.ScheduleFreeAdamW",
                got=str(self),
                expected="state in fp32",
                do="leave exp_avg_dtype and exp_avg_sq_dtype out, or take ml.AdamW",
            )

    @property
    def rule(self) -> str:
        """The update rule, by its name in ``EngineOptions``."""
        return SCHEDULE_FREE


def elementwise(optimizer: torch.optim.Optimizer) -> Elementwise:
    """Promise that an optimizer is elementwise: it updates each element by what it is, its gradient
    and its state alone, so that the parts of a parameter can be updated by different ranks.

    That holds for Lion or AdaBelief, and not for what asks for norms (LAMB, LARS), rows and columns
    (Adafactor, Shampoo), or all parameters together (Prodigy). ``shard`` tries a few steps, and
    refuses an optimizer that gives other bits for parts than for a matrix, whose state is no tensor
    of the parameter's shape or of no dim, or that counts steps elsewhere. Raises TypeError for what
    is no torch.optim.Optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"ml.elementwise: got {type(optimizer).__name__}, expected a torch.optim.Optimizer"
        )
    return Elementwise(optimizer)


def require_updatable(
    groups: Sequence[ParameterGroup], optimizer_offload: str, dtype: torch.dtype
) -> None:
    """Raise ConfigError where the host cannot update by the rule of the groups, where the model
    computes in a ``dtype`` whose moments cannot be kept in theirs, or where Muon has no matrix."""
    if any(made.rule == MUON for made in groups):
        from megatron_llama.engine.shard.muon import require_matrices

        require_matrices(groups)
    for made in groups:
        kept = made.base.exp_avg_dtype, made.base.exp_avg_sq_dtype
        is_narrow = made.rule in (ADAM, MUON) and kept != (FP32, FP32)
        if optimizer_offload != "none" and (made.rule != ADAM or is_narrow):
            raise ConfigError(
                "shard(optimizer_offload=)",
                got=f"{optimizer_offload} with {made.kind}",
                expected="AdamW with moments in fp32, which alone the host has",
                do="leave it out, or give optimizer=ml.AdamW(...)",
            )
        if is_narrow and dtype == torch.float64:
            raise ConfigError(
                "shard(dtype=)",
                got=f"torch.float64 with {made.kind}",
                expected="fp32 or bf16",
                do="keep moments in full",
            )
