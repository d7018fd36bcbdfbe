"""Text generation in one process: prompts of different lengths in one batch, with a cache of keys
and values, so that each token is computed once."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from megatron_llama.model.continuation import Continuation
from megatron_llama.model.llama import Stage
from megatron_llama.model.nn.cache import KVCache
from megatron_llama.model.rope import longest_sequence

FinishReason = Literal["stop", "length"]
"""The reason why a text ended: an end token or a stop string, or no room for more."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled. The fields are the options of ``SamplingConfig``."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float


class Reader:
    """A model that reads a batch of sequences piece by piece and remembers what it has read.

    A token's slot in the cache is its position. Shorter sequences are padded behind their end,
    where no token of theirs attends, and the next tokens overwrite the padding. So the first piece
    is plain causal attention without a mask; only later pieces need a mask."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._cache = KVCache()
        self._tokens: list[list[int]] = []
        """All tokens of each sequence."""
        self._cached: list[int] = []
        """The number of them that are in the cache."""

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each sequence that have been read."""
        return [len(sequence) for sequence in self._tokens]

    def read(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Read more tokens (at least one) of every sequence. Return fp32 logits [b, vocab_size] of
        the token that follows each."""
        if not self._tokens:
            self._tokens = [[] for _ in tokens]
            self._cached = [0] * len(tokens)
        before = self.lengths
        self._tokens = [[*old, *new] for old, new in zip(self._tokens, tokens, strict=True)]
        if any(self._switches(*pair) for pair in zip(before, self.lengths, strict=True)):
            self._read_again()
        device = self._stage.mesh.device
        pairs = list(zip(self._tokens, self._cached, strict=True))
        counts = [len(sequence) - cached for sequence, cached in pairs]
        longest = max(counts)
        ids = torch.tensor(
            [
                [*sequence[cached:], *[0] * (longest - len(sequence) + cached)]
                for sequence, cached in pairs
            ],
            device=device,
        ).t()
        slots = torch.tensor(self._cached, device=device) + torch.arange(
            longest, device=device
        ).unsqueeze(-1)
        length = max(self._cached) + longest
        lengths = torch.tensor(self.lengths, device=device)
        positions = self._stage.positions(longest, device, slots, lengths=lengths)
        if any(self._cached):
            seen = torch.arange(length, device=device) <= slots.t().unsqueeze(-1)
            positions = replace(positions, mask=seen.unsqueeze(1))
        last = torch.tensor(counts, device=device) - 1
        continuation = Continuation(self._cache, slots, length, last, min(self._cached))
        positions = replace(positions, continuation=continuation)
        with torch.no_grad():
            logits = self._stage(ids, positions)
        self._cached = self.lengths
        return logits[0, :, : self._stage.config.vocab_size].float()  # type: ignore[no-any-return]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these sequences of the batch."""
        self._tokens = [self._tokens[row] for row in rows]
        self._cached = [self._cached[row] for row in rows]
        self._cache.keep(torch.tensor(rows, device=self._stage.mesh.device))

    def truncate(self, length: int) -> None:
        """Forget all but the first ``length`` tokens of a batch of one sequence, if any was
        read."""
        if not self._tokens:
            return
        self._tokens = [self._tokens[0][:length]]
        [cached] = self._cached
        if length >= cached:
            return
        if self._switches(length, cached) or 0 < self._stage.config.sliding_window <= cached:
            # Layers with a window have forgotten tokens that their windows reach now.
            self._read_again()
        else:
            self._cache.drop_last(cached - length)
            self._cached = [length]

    def _switches(self, shorter: int, longer: int) -> bool:
        """Whether sequences of these two lengths rotate their first tokens differently."""
        boundary = self._stage.rotaries.plain.switches_at
        return boundary is not None and shorter <= boundary < longer

    def _read_again(self) -> None:
        """Empty the cache: all tokens are read again with the next ones."""
        self._cache = KVCache()
        self._cached = [0] * len(self._tokens)


def continue_sequence(
    reader: Reader,
    tokens: Sequence[int],
    sampling: Sampling,
    *,
    stops: frozenset[int],
    generator: torch.Generator,
    longest: int,
) -> Iterator[int]:
    """Read ``tokens`` of a single sequence and yield the tokens that follow, until one of ``stops``
    (not yielded), the limit of new tokens, or ``longest`` tokens in all."""
    new = list(tokens)
    read = sum(reader.lengths) + len(tokens)
    for _ in range(min(sampling.max_new_tokens, longest - read)):
        new = [sample_token(reader.read([new])[0], sampling, generator)]
        if new[0] in stops:
            return
        yield new[0]


def generate_batch(
    stage: Stage,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    stops: frozenset[int],
    seed: int,
    ended: Container[int] = (),
) -> Iterator[tuple[int, int | FinishReason]]:
    """Continue prompts (none empty) in one batch: yield (number of the prompt, new token), and
    (number, why it ended) when a prompt is done.

    Each prompt ends as in ``continue_sequence``, or without a reason once the caller has put its
    number into ``ended`` after a token of it. Each has its own generator, so its text does not
    depend on the rest of the batch."""
    model = stage.config
    longest = longest_sequence(model.rope_scaling, model.max_position_embeddings)
    room = [min(sampling.max_new_tokens, longest - len(prompt)) for prompt in prompts]
    yield from ((number, "length") for number, left in enumerate(room) if left <= 0)
    rows = [number for number, left in enumerate(room) if left > 0]
    reader = Reader(stage)
    generators = [torch.Generator().manual_seed(seed) for _ in prompts]
    new: list[Sequence[int]] = [prompts[number] for number in rows]
    while rows:
        drawn = [
            sample_token(logits, sampling, generators[number])
            for number, logits in zip(rows, reader.read(new), strict=True)
        ]
        stay = []
        for row, (number, token) in enumerate(zip(rows, drawn, strict=True)):
            if token in stops:
                yield number, "stop"
                continue
            yield number, token
            room[number] -= 1
            if number in ended:
                continue
            if room[number] == 0:
                yield number, "length"
            else:
                stay.append(row)
        if stay and len(stay) < len(rows):
            reader.keep(stay)
        rows = [rows[row] for row in stay]
        new = [[drawn[row]] for row in stay]


def sample_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Sample a token from logits [vocab_size]: temperature, then top-k, then top-p (Holtzman et
    al., 2020)."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    sorted_logits, order = (logits / sampling.temperature).sort(descending=True)
    if sampling.top_k:
        sorted_logits = sorted_logits[: sampling.top_k]
        order = order[: sampling.top_k]
    probabilities = sorted_logits.softmax(-1)
    # The last token kept is the last one whose predecessors together have less than top_p.
    keep = probabilities.cumsum(-1) - probabilities < sampling.top_p
    probabilities = probabilities.where(keep, torch.zeros_like(probabilities))
    return int(order[torch.multinomial(probabilities.cpu(), 1, generator=generator)])
