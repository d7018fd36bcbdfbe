"""A model's scores of the tokens of microbatches: the most likely next tokens, and the
log-probabilities of the labels. Forward passes only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama.engine.comm.collectives import all_reduce
from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.tensors import at_least_fp32
from megatron_llama.model.llama import Stage
from megatron_llama.model.nn.context import local_sequence
from megatron_llama.model.nn.loss import argmax, cross_entropy
from megatron_llama.pipeline.microbatch import Microbatch
from megatron_llama.pipeline.runtime import PipelineRuntime


class TokenScores(NamedTuple):
    """A model's scores of the tokens of a microbatch, all [s, b]."""

    losses: Tensor
    """Negative log-probabilities of the labels, fp32 (fp64 for an fp64 model)."""
    likeliest: Tensor
    """The most likely token behind each token, int64; the first of equal ones."""


def predict_tokens(runtime: PipelineRuntime, batch: Microbatch) -> Tensor:
    """Return the most likely token behind each token of a batch, int64 [s, b], on every rank. All
    ranks give the same batch; labels are not read."""
    mesh = runtime.mesh
    likeliest = torch.full(batch.tokens.shape, -1, device=mesh.device)

    def read(stage: Stage, number: int, batch: Microbatch, logits: Tensor) -> None:
        likeliest[_own_places(batch, mesh.cp)] = argmax(logits, mesh.tp, stage.config.vocab_size)

    runtime.forward([batch], read)
    # Ranks of other stages, and of other parts of the sequence, have -1.
    all_reduce(likeliest, mesh.world, dist.ReduceOp.MAX, async_op=False).wait()
    return likeliest


def score_tokens(runtime: PipelineRuntime, batches: Sequence[Microbatch]) -> list[TokenScores]:
    """Return the scores of every token of some microbatches, on all ranks that share them. Forward
    only; all logits of a microbatch are in memory at once. Collective: all ranks give the same
    number of microbatches, those of a data-parallel replica the same ones."""
    mesh = runtime.mesh
    dtype = at_least_fp32(runtime.dtype)
    scores = [
        TokenScores(
            torch.zeros(batch.tokens.shape, dtype=dtype, device=mesh.device),
            torch.full(batch.tokens.shape, -1, device=mesh.device),
        )
        for batch in batches
    ]

    def read(stage: Stage, number: int, batch: Microbatch, logits: Tensor) -> None:
        losses, likeliest = scores[number]
        places = _own_places(batch, mesh.cp)
        vocab_size = stage.config.vocab_size
        likeliest[places] = argmax(logits, mesh.tp, vocab_size)
        # Last, because it overwrites the logits.
        labels = local_sequence(batch.labels, mesh.cp)
        losses[places] = cross_entropy(logits, labels, mesh.tp, vocab_size)

    runtime.forward(batches, read)
    for losses, likeliest in scores:
        # Ranks of other stages, and of other parts of the sequence, have 0 and -1.
        # tp ranks have computed the same from the same sums.
        for axis in (mesh.pp, mesh.cp):
            all_reduce(losses, axis, async_op=False).wait()
            all_reduce(likeliest, axis, dist.ReduceOp.MAX, async_op=False).wait()
    return scores


def _own_places(batch: Microbatch, cp: Axis) -> Tensor:
    """Return the positions of this rank's part of the sequence."""
    return local_sequence(torch.arange(len(batch.tokens), device=batch.tokens.device), cp)
