"""Training a model with experts: losses of routers (``model/nn/moe/balance.py``) beside the
objective, and the loads of experts for the log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_llama.config.schema import Config
from megatron_llama.engine.comm.collectives import all_reduce
from megatron_llama.engine.mesh import Mesh
from megatron_llama.model.llama import Stage
from megatron_llama.model.nn.moe.balance import RouterLosses
from megatron_llama.pipeline.microbatch import Microbatch
from megatron_llama.pipeline.objective import MicrobatchLoss, NextToken, Objective, StepLoss
from megatron_llama.pipeline.runtime import Engine, Key, PipelineRuntime, Step


class Routed:
    """An objective, with the sums of the routers behind its own.

    A loss that needs the counts of the global batch has a preliminary pass over the same
    microbatches."""

    def __init__(self, objective: Objective, losses: RouterLosses) -> None:
        self._objective = objective
        self._losses = losses
        self.own = objective.length
        """The number of the objective's own sums, which come first."""
        self.length = self.own + math.prod(losses.shape)

    def preliminary(
        self, batches: Sequence[Microbatch]
    ) -> tuple[Sequence[Microbatch], Objective] | None:
        others = self._objective.preliminary(batches)
        if not self._losses.counts_first:
            return others
        assert others is None, "one preliminary pass cannot count and be that of the objective"
        return batches, self

    def begin(self, batches: Sequence[Microbatch], mesh: Mesh, known: Tensor | None) -> StepLoss:
        counts = None
        if self._losses.counts_first:
            counts = None if known is None else self.routers(known)
            known = None
        if self._losses.trains:
            samples, tokens = _sizes(batches, mesh).unbind()
            self._losses.begin(samples, tokens, counts)
        return _RoutedLoss(self._objective.begin(batches, mesh, known))

    def routers(self, sums: Tensor) -> Tensor:
        """View the sums of the routers among all of a step."""
        return sums[self.own :].view(self._losses.shape)

    def means(self, sums: Tensor) -> Mapping[str, Tensor]:
        own = self._objective.means(sums[: self.own])
        return {**own, **self._losses.means(self.routers(sums))}


@dataclass(frozen=True)
class _RoutedLoss:
    """The loss of an objective in a pass in which routers count."""

    loss: StepLoss

    @property
    def weight(self) -> Tensor:
        return self.loss.weight

    def microbatch(self, batch: Microbatch) -> MicrobatchLoss:
        return self.loss.microbatch(batch)


def _counted(batch: Microbatch) -> Tensor | None:
    """Return the samples of a batch that count, [b] bool: those of which some token is in the loss,
    or that have completions to compare. Others fill the last step of a pass, and how many they are
    depends on the layout. None: all."""
    if batch.completion_kinds is not None:
        return (batch.completion_kinds > 0).any(0)
    return None if batch.loss_mask is None else batch.loss_mask.any(0)


def _sizes(batches: Sequence[Microbatch], mesh: Mesh) -> Tensor:
    """Count the samples of the global batch that count, and their tokens: [2] fp64, at least 1
    each. Collective over dp where there is a mask."""
    sizes = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    has_mask = False
    for batch in batches:
        length, samples = batch.tokens.shape
        counted = _counted(batch)
        has_mask |= counted is not None
        count = samples if counted is None else counted.sum().to(mesh.device, non_blocking=True)
        sizes[0] += count
        sizes[1] += count * length
    if has_mask:
        # Ranks that share a sequence each count all of it.
        all_reduce(sizes, mesh.dp, async_op=False).wait()
        return sizes.div_(mesh.cp.size).clamp_(min=1.0)
    return sizes.mul_(mesh.data_size)


class RoutedRuntime(PipelineRuntime):
    """The runtime of a model with experts: it counts the tokens of each expert, and trains the
    losses of routers that a run has. Evaluations have neither."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        engine: Engine,
        mesh: Mesh,
        config: Config,
        *,
        dtype: torch.dtype,
        objective: Objective | None = None,
    ) -> None:
        """See PipelineRuntime."""
        self._losses = RouterLosses(config, mesh)
        self._losses.attach(stages.values())
        self._alone: Objective = NextToken() if objective is None else objective
        self._routed = Routed(self._alone, self._losses)
        super().__init__(stages, engine, mesh, config, dtype=dtype, objective=self._routed)

    def evaluate(
        self, batches: Sequence[Microbatch], objective: Objective | None = None
    ) -> tuple[Tensor, Tensor]:
        """Evaluate the objective without the losses of routers. The ``numbers`` of routers are then
        NaN."""
        if objective is not None:
            return super().evaluate(batches, objective)
        with torch.no_grad():
            sums, weight = self._sums(batches, self._alone, training=False)
        self.sums.fill_(torch.nan)
        self.sums[: self._routed.own].copy_(sums)
        return sums[0], weight

    def _forward(self, step: Step, key: Key) -> None:
        if not isinstance(step.loss, _RoutedLoss):
            with self._losses.forward(None, None):
                super()._forward(step, key)
            return
        sums = torch.zeros_like(self._routed.routers(step.sums))
        with self._losses.forward(sums, step.loss_scale, self._counted_here(step, key)):
            # A view: the loss of the objective is added to its own sums.
            super()._forward(replace(step, sums=step.sums[: self._routed.own]), key)
        # The tp ranks have other tokens each. Their sums are added up, and divided as those of a
        # loss that each of them has.
        self._routed.routers(step.sums).add_(sums, alpha=self.mesh.tp.size)

    def _backward(self, step: Step, key: Key) -> None:
        if self._losses.trains:
            self._losses.recompute(self._counted_here(step, key))
        super()._backward(step, key)

    def _counted_here(self, step: Step, key: Key) -> Tensor | None:
        counted = _counted(step.batches[key.microbatch])
        return None if counted is None else counted.to(self.mesh.device, non_blocking=True)
