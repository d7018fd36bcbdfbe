"""The objective of a step: how the losses of tokens become one number, and the weight that the
gradient of each token has in it.

The runtime calls it in this order: ``preliminary`` and ``begin`` before the first pass of a step or
an evaluation, ``microbatch`` at the last stage for each microbatch, and ``means`` when all are
summed. Every rank takes part in ``begin``; only the ranks of the last stage, all of tp and cp among
them, take part in the calls for a microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_llama.engine.comm.collectives import all_reduce
from megatron_llama.engine.mesh import Mesh
from megatron_llama.model.nn.context import local_sequence
from megatron_llama.model.nn.loss import TokenWeights
from megatron_llama.pipeline.microbatch import Microbatch

OBJECTIVE = "objective"
"""The key of a run's objective in the identity of its samples, which a checkpoint keeps."""


class MicrobatchLoss(Protocol):
    """One microbatch's share of the loss."""

    def weights(self, scale: Tensor) -> Tensor | TokenWeights:
        """Return the derivative of the share, times ``scale`` (0-dim), by the loss of each token of
        this rank's part of the sequence, [s, b] in the dtype of ``scale``; or the function from
        these losses to it."""

    def sums(self, losses: Tensor) -> Tensor:
        """Return the share, and the other sums over the global batch, fp64 [Objective.length].
        Ranks that share the samples (cp) each give a part of it."""


class StepLoss(Protocol):
    """The loss of one global batch."""

    @property
    def weight(self) -> Tensor:
        """The divisor of the mean loss, for example the target tokens: 0-dim fp64, the same on all
        ranks."""

    def microbatch(self, batch: Microbatch) -> MicrobatchLoss:
        """Return the share of one microbatch, which is on the device."""


class Objective(Protocol):
    """The objective of a run."""

    @property
    def length(self) -> int:
        """The number of sums over a global batch; the first is the loss."""

    def preliminary(
        self, batches: Sequence[Microbatch]
    ) -> tuple[Sequence[Microbatch], Objective] | None:
        """Return other microbatches, which run forward before the step, and the objective whose
        sums over them ``begin`` gets; or None, on every rank alike."""

    def begin(self, batches: Sequence[Microbatch], mesh: Mesh, known: Tensor | None) -> StepLoss:
        """Begin a step or an evaluation; ``known`` are the sums over the preliminary microbatches.
        Collective."""

    def means(self, sums: Tensor) -> Mapping[str, Tensor]:
        """Return the means that follow from sums, of one global batch or added up over several:
        numbers for the log by name, 0-dim fp64 each, NaN where nothing was counted."""


class NextToken:
    """The mean negative log-likelihood of the target tokens of the global batch."""

    length = 1

    def preliminary(self, batches: Sequence[Microbatch]) -> None:
        """Return None: no sums are needed before the step."""

    def begin(self, batches: Sequence[Microbatch], mesh: Mesh, known: Tensor | None) -> StepLoss:
        """Count the target tokens, before the first backward pass: they divide every loss."""
        return _NextTokenLoss(target_tokens(batches, mesh), mesh)

    def means(self, sums: Tensor) -> Mapping[str, Tensor]:
        """Return no numbers: there is only the loss."""
        return {}


def target_tokens(batches: Sequence[Microbatch], mesh: Mesh) -> Tensor:
    """Count the positions in the loss of the global batch, 0-dim fp64, at least 1. Collective over
    dp where there is a mask."""
    masks = [b.loss_mask for b in batches if b.loss_mask is not None]
    whole = sum(b.labels.numel() for b in batches if b.loss_mask is None)
    # Filled in, not copied: a copy from the host would wait for the device's stream.
    count = torch.full((), float(whole), dtype=torch.float64, device=mesh.device)
    for mask in masks:
        count += mask.sum().to(mesh.device, non_blocking=True)
    # Ranks that share a sequence each count all of it, and are in the sum too.
    count /= mesh.cp.size
    if masks:
        all_reduce(count, mesh.dp, async_op=False).wait()
        return count.clamp_(min=1.0)
    return count * mesh.dp.size


class _NextTokenLoss:
    def __init__(self, weight: Tensor, mesh: Mesh) -> None:
        self.weight = weight
        self._mesh = mesh

    def microbatch(self, batch: Microbatch) -> MicrobatchLoss:
        mask = batch.loss_mask
        local = None if mask is None else local_sequence(mask, self._mesh.cp)
        shape = (batch.labels.shape[0] // self._mesh.cp.size, batch.labels.shape[1])
        return _NextTokenShare(self.weight, local, shape)


class _NextTokenShare:
    def __init__(self, tokens: Tensor, mask: Tensor | None, shape: tuple[int, int]) -> None:
        self._tokens = tokens
        self._mask = mask
        self._shape = shape

    def weights(self, scale: Tensor) -> Tensor:
        weight = (scale / self._tokens).to(scale.dtype)
        if self._mask is None:
            return weight.expand(self._shape)
        return self._mask.to(weight.dtype) * weight

    def sums(self, losses: Tensor) -> Tensor:
        counted = losses if self._mask is None else losses * self._mask
        return counted.sum(dtype=torch.float64).div(self._tokens).unsqueeze(0)
