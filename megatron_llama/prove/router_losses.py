"""The losses of routers by their formulas, which share no code with the trainer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_llama.config.schema import Config


def router_losses(logits: Sequence[Tensor], samples: int, config: Config) -> Tensor:
    """Return the sum of all losses of routers, times their coefficients. ``logits``: of each block
    with experts, [samples * length, experts], of all samples of a
    step."""
    training = config.training
    chosen = config.model.num_experts_per_tok
    kind = training.moe_router_load_balancing_type
    total = torch.zeros(())
    if kind == "hf_aux_loss":
        # Not divided by the experts of a token.
        balance = chosen * _balance(torch.cat(tuple(logits)), chosen)
        total = total + training.moe_aux_loss_coeff * balance
    for block in logits:
        if kind == "seq_aux_loss":
            losses = [_balance(sample, chosen) for sample in block.chunk(samples)]
            total = total + training.moe_aux_loss_coeff * torch.stack(losses).mean()
        elif kind == "global_aux_loss":
            total = total + training.moe_aux_loss_coeff * _balance(block, chosen)
        total = total + training.moe_z_loss_coeff * block.logsumexp(-1).square().mean()
    return total


def _balance(logits: Tensor, chosen: int) -> Tensor:
    """Return experts * sum(share of the choices * mean probability), over the experts: 1 if all are
    equally loaded. ``logits``: [tokens, experts]."""
    experts = logits.shape[1]
    probabilities = logits.softmax(-1)
    choices = probabilities.topk(chosen).indices
    shares = nn.functional.one_hot(choices, experts).double().mean((0, 1))
    return experts * (shares * probabilities.mean(0)).sum()
