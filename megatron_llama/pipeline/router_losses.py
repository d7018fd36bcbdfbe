"""Training with losses of routers (``model/nn/moe/balance.py``) beside the loss of the tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_llama.config.schema import Config
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
        # Ranks have as many microbatches as each other, of as many samples.
        samples = sum(batch.tokens.shape[1] for batch in batches) * mesh.data_size
        tokens = sum(batch.tokens.numel() for batch in batches) * mesh.data_size
        self._losses.begin(samples, tokens, None if known is None else self.routers(known))
        return super().begin(batches, mesh, known)

    def routers(self, sums: Tensor) -> Tensor:
        """View the sums of the routers among all of a step."""
        return sums[NextToken.length :].view(self._losses.shape)

    def means(self, sums: Tensor) -> Mapping[str, Tensor]:
        return self._losses.means(self.routers(sums))


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
        with self._losses.forward(sums, step.loss_scale):
            # A view: the loss of the tokens is added to its own sum.
            super()._forward(replace(step, sums=step.sums[: NextToken.length]), key)
        # The tp ranks have other tokens each. Their sums are added up, and divided as those of a
        # loss that each of them has.
        self._routed.routers(step.sums).add_(sums, alpha=self.mesh.tp.size)
