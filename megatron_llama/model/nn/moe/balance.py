"""Loads of experts, and losses of routers: experts are equally loaded, and logits stay small.

Counts of tokens are integers and have no gradient. Given them, the loss that balances the experts
of a block is linear in the probabilities: the sum over all tokens t and experts i of ``factor_i *
p_ti``. So every rank adds up and differentiates the terms of its own tokens, and only the counts
are messages. What follows does not depend on how tokens are spread over ranks and microbatches.

The losses are of Fedus et al., 2021, section 2.2 (``seq_aux_loss`` and ``global_aux_loss``, divided
by the experts of a token as in Megatron-LM), and of Zoph et al., 2022, section 3.1 (the z-loss).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_llama.config.schema import Config
from megatron_llama.engine.comm.collectives import all_reduce
from megatron_llama.engine.mesh import Mesh
from megatron_llama.model.nn.moe.block import MoE
from megatron_llama.model.nn.moe.routing import Routing
from megatron_llama.model.plan.experts import is_sparse
from megatron_llama.model.plan.router_losses import HUGGINGFACE, NONE, SEQUENCE


class RouterLosses:
    """The loads and losses of the routers of one process. A block with experts calls ``add`` with
    the choices of its tokens; ``forward`` and ``begin`` say what happens to them.

    ``forward`` gets sums, which are of all blocks with experts of the whole model, [blocks, 2 +
    experts] fp64: the loss that balances, the z-loss, and the tokens of each expert. Every rank
    adds those of its own blocks and tokens."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        training = config.training
        model = config.model
        layers = [layer for layer in range(model.num_hidden_layers) if is_sparse(model, layer)]
        self.counts_first = training.counts_experts_first
        """Whether the counts of the global batch have to be known before its first backward
        pass."""
        self._kind = training.moe_router_load_balancing_type
        self._blocks = {layer: place for place, layer in enumerate(layers)}
        """The place of each layer with experts among all of them."""
        self._experts = model.num_experts
        self._top_k = model.num_experts_per_tok
        self._balance = training.moe_aux_loss_coeff if self._kind != NONE else 0.0
        self._z = training.moe_z_loss_coeff
        self.trains = training.has_router_losses
        """Whether there are losses. Without them tokens are counted for the log alone."""
        self._mesh = mesh
        self._samples = torch.ones(())
        self._tokens = torch.ones(())
        """Those of the global batch."""
        self._factors: Tensor | None = None
        """Those of each block, [blocks, experts], where the counts of the global batch decide."""
        self._sums: Tensor | None = None
        """None: no pass is counted now, or a block is computed again."""
        self._scale: Tensor | None = None
        """The loss scale of a step; None: nothing is trained."""
        self._counted: Tensor | None = None
        """See ``forward``."""

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the sums."""
        return len(self._blocks), 2 + self._experts

    def attach(self, stages: Iterable[nn.Module]) -> None:
        """Let the blocks with experts of these stages call ``add``."""
        for stage in stages:
            for name, module in stage.named_modules():
                if isinstance(module, MoE):
                    module.router_losses = partial(self.add, self._blocks[int(name.split(".")[-2])])

    def begin(self, samples: Tensor, tokens: Tensor, known: Tensor | None) -> None:
        """Begin a step over so many sequences and tokens of the global batch, 0-dim fp64 each, of
        the sequences that count. ``known``: the sums over the same batch, where the loss depends on
        the counts of all of it."""
        self._samples = samples
        self._tokens = tokens
        self._factors = None
        if known is not None:
            counts = known[:, 2:]
            per_token = self._top_k
            if self._kind == HUGGINGFACE:
                # All blocks are one: their counts are added, and their tokens.
                counts = counts.sum(0, keepdim=True).expand_as(counts)
                tokens = tokens * len(counts)
                per_token = 1
            self._factors = counts * (self._experts / per_token / tokens.square())

    @contextmanager
    def forward(
        self, sums: Tensor | None, scale: Tensor | None, counted: Tensor | None = None
    ) -> Iterator[None]:
        """Add the choices of a forward pass to ``sums``. ``scale``: the loss scale, if a backward
        pass follows; it holds until the next forward pass. None for both: a pass whose choices do
        not count. ``counted``: [b] bool, the sequences that count; None: all."""
        self._sums = sums
        self._scale = scale
        self._counted = counted
        try:
            yield
        finally:
            self._sums = None

    def recompute(self, counted: Tensor | None) -> None:
        """Begin a backward pass, in which blocks may be computed again. ``counted``: see
        ``forward``."""
        self._counted = counted

    def add(self, block: int, routing: Routing, samples: int) -> Routing:
        """Count the choices of a block for the tokens of ``samples`` sequences, and return them
        with weights whose backward pass also has the gradients of the losses."""
        trains = self.trains and self._scale is not None
        has_backward = trains and torch.is_grad_enabled()
        if self._sums is None and not has_backward:
            return routing
        with torch.no_grad():
            counts = self._count(routing.experts, samples)
            factors = self._block_factors(block, counts) if trains and self._balance else None
            log_sums = routing.logits.logsumexp(-1) if trains and self._z else None
            if self._counted is not None:
                counted = self._counted.unsqueeze(-1)
                counts = counts * counted
                factors = None if factors is None else factors * counted
                if log_sums is not None:
                    log_sums = log_sums * self._counted.repeat(len(log_sums) // samples)
            if self._sums is not None:
                self._add_sums(self._sums[block], routing.probabilities, counts, factors, log_sums)
        if self._scale is None or not has_backward:
            return routing
        dtype = routing.probabilities.dtype
        if factors is not None:
            factors = factors.to(dtype) * (self._balance * self._scale)
        if log_sums is not None:
            log_sums *= (2.0 * self._z / self._tokens * self._scale).to(dtype)
        weights = _Trained.apply(  # type: ignore[no-untyped-call]
            routing.weights, routing.probabilities, routing.logits, factors, log_sums
        )
        return routing._replace(weights=weights)

    def _count(self, experts: Tensor, samples: int) -> Tensor:
        """Return the tokens of each sequence that are sent to each expert, [samples, experts]."""
        chosen = experts.new_zeros(len(experts), self._experts, dtype=torch.uint8)
        # A token's experts differ, so no element is written twice.
        chosen.scatter_(1, experts, 1)
        return chosen.view(-1, samples, self._experts).sum(0, dtype=torch.int32)

    def _block_factors(self, block: int, counts: Tensor) -> Tensor:
        """Return the derivative of the loss by the probabilities of a token of each sequence,
        [samples, experts] fp64."""
        if self._kind != SEQUENCE:
            assert self._factors is not None, "the counts of the global batch are not known"
            return self._factors[block].repeat(len(counts), 1)
        whole = counts.clone()
        # Tensor-parallel ranks split sequences too, wherever there are experts.
        for axis in (self._mesh.cp, self._mesh.tp):
            all_reduce(whole, axis, async_op=False).wait()
        # Every token has as many experts, so the counts say how long the sequence is. A tensor:
        # the host would wait for the number.
        choices = whole.sum(-1, keepdim=True, dtype=torch.float64)
        return whole * (self._experts * self._top_k / (self._samples * choices.square()))

    def _add_sums(
        self,
        sums: Tensor,
        probabilities: Tensor,
        counts: Tensor,
        factors: Tensor | None,
        log_sums: Tensor | None,
    ) -> None:
        if factors is not None:
            whole = probabilities.view(-1, len(counts), self._experts).sum(0, dtype=torch.float64)
            sums[0] += (whole * factors).sum()
        if log_sums is not None:
            # Of a sequence that does not count they are zero.
            sums[1] += log_sums.double().square().sum() / self._tokens
        sums[2:] += counts.sum(0)

    def means(self, sums: Tensor) -> Mapping[str, Tensor]:
        """Return the numbers of a step for the log, 0-dim fp64 each, from the sums over the global
        batch: the losses, without their coefficients and as means over the blocks; of all blocks
        the largest load of an expert, 1 where all are equal; and the mean entropy of the loads,
        also 1 there."""
        numbers: dict[str, Tensor] = {}
        if self._balance:
            # HuggingFace's is one loss of all blocks.
            losses = sums[:, 0]
            is_one = self._kind == HUGGINGFACE
            numbers["load_balancing_loss"] = losses.sum() if is_one else losses.mean()
        if self._z:
            numbers["z_loss"] = sums[:, 1].mean()
        shares = sums[:, 2:] / sums[:, 2:].sum(-1, keepdim=True)
        numbers["experts/largest_load"] = shares.max() * self._experts
        entropy = torch.special.entr(shares).sum(-1).mean()
        numbers["experts/entropy"] = entropy / math.log(max(2, self._experts))
        return numbers


class _Trained(torch.autograd.Function):
    """Returns the weights [t, k] of a token's experts as they are. Backward adds a gradient of the
    probabilities [t, E]: ``factors`` [b, E], of the sequence of a token; and one of the logits [t,
    E]: ``log_sums`` [t] times the probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        probabilities: Tensor,
        logits: Tensor,
        factors: Tensor | None,
        log_sums: Tensor | None,
    ) -> Tensor:
        ctx.tokens = len(probabilities)
        ctx.has = factors is not None, log_sums is not None
        # Probabilities are kept anyway, for the gradient of the choice.
        kept = (factors, log_sums, None if log_sums is None else probabilities)
        ctx.save_for_backward(*(tensor for tensor in kept if tensor is not None))
        ctx.set_materialize_grads(False)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = [*ctx.saved_tensors]
        has_factors, has_log_sums = ctx.has
        probabilities_grad = logits_grad = None
        if has_factors:
            factors = kept.pop(0)
            # Tokens of a microbatch's sequences take turns.
            probabilities_grad = factors.repeat(ctx.tokens // len(factors), 1)
        if has_log_sums:
            log_sums, probabilities = kept
            logits_grad = probabilities * log_sums.unsqueeze(-1)
        return grad, probabilities_grad, logits_grad, None, None
