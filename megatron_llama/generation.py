"""Sampling from a model in one process. Every token runs the whole prefix: simple, and exact by construction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_llama.model.llama import Stage


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; see GenerateConfig for the fields."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float


def generate(stage: Stage, prompt: Sequence[int], sampling: Sampling, *, eos: int | None, generator: torch.Generator) -> Iterator[int]:
    """Yield new token ids after ``prompt`` (not empty), until ``eos`` (not yielded), the limit, or the model's longest sequence."""
    ids, device = list(prompt), stage.mesh.device
    room = stage.config.max_position_embeddings - len(ids)
    with torch.no_grad():
        for _ in range(min(sampling.max_new_tokens, room)):
            tokens = torch.tensor(ids, device=device).unsqueeze(-1)
            logits = stage(tokens, stage.positions(len(ids), device))
            token = draw(logits[-1, 0, : stage.config.vocab_size].float(), sampling, generator)
            if token == eos:
                return
            ids.append(token)
            yield token


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token from logits [vocab_size]: temperature, then top-k, then top-p (Holtzman et al., 2020)."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    sorted_logits, order = (logits / sampling.temperature).sort(descending=True)
    if sampling.top_k:
        sorted_logits, order = sorted_logits[: sampling.top_k], order[: sampling.top_k]
    probabilities = sorted_logits.softmax(-1)
    # The first token whose predecessors do not yet have top_p together is the last one kept.
    keep = probabilities.cumsum(-1) - probabilities < sampling.top_p
    probabilities = probabilities.where(keep, torch.zeros_like(probabilities))
    return int(order[torch.multinomial(probabilities.cpu(), 1, generator=generator)])
