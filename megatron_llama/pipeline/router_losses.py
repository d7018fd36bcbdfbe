"""Training with losses of routers (``model/nn/moe/balance.py``) beside the loss of the tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_llama.config.schema import Config
from megatron_llama.engine.comm.collectives import all_reduce
from megatron_llama.engine.mesh import Mesh
from megatron_llama.model.llama import Stage
from megatron_llama.model.nn.moe.balance import RouterLosses
from megatron_llama.pipeline.microbatch import Microbatch
from megatron_llama.pipeline.objective import NextToken, Objective, StepLoss
from megatron_llama.pipeline.runtime import Engine, Key, PipelineRuntime, Step


class RoutedNextToken(NextToken):
    """The mean loss of the target tokens, with the sums of the routers behind it.

    A loss that needs the counts of the global batch has a preliminary pass over the same
    microbatches."""

    def __init__(self, losses: RouterLosses) -> None:
        self._losses = losses
        self.length = NextToken.length + math.prod(losses.shape)

    def preliminary(  # type: ignore[override]
        self, batches: Sequence[Microbatch]
    ) -> tuple[Sequence[Microbatch], Objective] | None:
        return (batches, self) if self._losses.counts_first else None

    def begin(self, batches: Sequence[Microbatch], mesh: Mesh, known: Tensor | None) -> StepLoss:
        samples, tokens = _sizes(batches, mesh).unbind()
        self._losses.begin(samples, tokens, None if known is None else self.routers(known))
        return super().begin(batches, mesh, known)

    def routers(self, sums: Tensor) -> Tensor:
        """View the sums of the routers among all of a step."""
        return sums[NextToken.length :].view(self._losses.shape)

    def means(self, sums: Tensor) -> Mapping[str, Tensor]:
        return self._losses.means(self.routers(sums))


def _counted(batch: Microbatch) -> Tensor | None:
    """Return the samples of a batch that count, [b] bool: those of which some token is in the loss.
    Others fill the last step of a pass, and how many they are depends on the layout. None: all."""
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
    """The runtime of a run with losses of routers. Evaluations have none."""

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
        """``objective``: see PipelineRuntime. Raises ValueError for any but the mean loss of the
        target tokens."""
        if objective is not None:
            raise ValueError("losses of routers stand beside the loss of the next token alone")
        self._losses = RouterLosses(config, mesh)
        self._losses.attach(stages.values())
        self._routed = RoutedNextToken(self._losses)
        super().__init__(stages, engine, mesh, config, dtype=dtype, objective=self._routed)

    def evaluate(
        self, batches: Sequence[Microbatch], objective: Objective | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of the tokens alone. There are no ``numbers`` of an evaluation: they are
        NaN."""
        found = super().evaluate(batches, NextToken() if objective is None else objective)
        self.sums.fill_(torch.nan)
        return found

    def _forward(self, step: Step, key: Key) -> None:
        if len(step.sums) != self._routed.length:
            with self._losses.forward(None, None):
                super()._forward(step, key)
            return
        sums = torch.zeros_like(self._routed.routers(step.sums))
        with self._losses.forward(sums, step.loss_scale, self._counted_here(step, key)):
            # A view: the loss of the tokens is added to its own sum.
            super()._forward(replace(step, sums=step.sums[: NextToken.length]), key)
        # The tp ranks have other tokens each. Their sums are added up, and divided as those of a
        # loss that each of them has.
        self._routed.routers(step.sums).add_(sums, alpha=self.mesh.tp.size)

    def _backward(self, step: Step, key: Key) -> None:
        self._losses.recompute(self._counted_here(step, key))
        super()._backward(step, key)

    def _counted_here(self, step: Step, key: Key) -> Tensor | None:
        counted = _counted(step.batches[key.microbatch])
        return None if counted is None else counted.to(self.mesh.device, non_blocking=True)
