"""Scores of texts for a program on rank 0, with the model in any layout.

The program runs in a thread of rank 0, and asks for scores as if the model were in one process. The
main threads of all ranks meet: its requests go to every rank, and all compute them together.
Without a request they meet again and again, so the program may take any time, and an error of any
rank ends all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_llama.config.schema import Config
from megatron_llama.data.loader import Batch
from megatron_llama.engine.comm.device import start_thread
from megatron_llama.engine.comm.object_collectives import MEETING_SECONDS, on_rank0, sum_over_ranks
from megatron_llama.engine.mesh import Mesh
from megatron_llama.errors import TrainingError
from megatron_llama.model.nn.rotary import Rotary
from megatron_llama.pipeline.runtime import PipelineRuntime
from megatron_llama.pipeline.scoring import score_tokens
from megatron_llama.train.setup.checks.parallel import sequence_unit

T = TypeVar("T")
MESSAGE_TOKENS = 2**22
"""Approximate number of tokens in one message to the other ranks."""


class Request(NamedTuple):
    """A text of which the last tokens are to be scored."""

    tokens: tuple[int, ...]
    scored: int
    """Number of tokens. The first token of a text cannot be scored: nothing is before it."""


class Score(NamedTuple):
    """The model's scores of the last tokens of a text."""

    logprob: float
    """The logarithm of their probability after the tokens before them."""
    greedy: bool
    """Whether each of them is the most likely one, of equal ones the first."""


Ask = Callable[[Sequence[Request]], list[Score]]
"""A function that returns the scores of texts, in their order."""


class Scorer:
    """Scores texts on all ranks together."""

    def __init__(self, config: Config, mesh: Mesh, runtime: PipelineRuntime) -> None:
        """``runtime`` holds the weights. Texts have at most ``seq_length`` tokens besides the
        last."""
        self._mesh = mesh
        self._runtime = runtime
        self._rows = config.training.micro_batch_size
        # With this many microbatches the ramps of a pipeline are a small part of a step.
        self._microbatches = 4 * mesh.pp.size if mesh.pp.size > 1 else 1
        self._unit = sequence_unit(config.parallel)
        self._by_length = Rotary.of(config.model).depends_on_length
        self._step = self._rows * self._microbatches * mesh.data_size
        rounds = max(1, MESSAGE_TOKENS // (self._step * config.training.seq_length))
        self.at_once = self._step * rounds
        """The most texts for one call of ``score``."""

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Return the scores of texts, given alike by all ranks, on all ranks. Neighbours should be
        of similar length. Each text is scored as if it were alone. Collective. Raises TrainingError
        if a score is not a finite number."""
        scores = torch.zeros(len(requests), 2, dtype=torch.float64)
        mesh = self._mesh
        # One rank of each data-parallel replica gives the scores, which all its ranks know.
        speaks = mesh.pp.rank == mesh.cp.rank == mesh.tp.rank == 0
        for start in range(0, len(requests), self._step):
            starts = [
                start + (number * mesh.data_size + mesh.data_rank) * self._rows
                for number in range(self._microbatches)
            ]
            rows = [requests[first : first + self._rows] for first in starts]
            batches = [self._batch(texts or _NOTHING) for texts in rows]
            scored = score_tokens(self._runtime, [batch for batch, _ in batches])
            if not speaks:
                continue
            microbatches = zip(starts, rows, batches, scored, strict=True)
            for first, texts, (batch, counts), (losses, likeliest) in microbatches:
                if texts:
                    logprobs = losses.double().neg().where(counts, 0.0).sum(0)
                    greedy = ((likeliest == batch.labels) | ~counts).all(0)
                    scores[first : first + len(texts)] = torch.stack((logprobs, greedy), 1).cpu()
        sum_over_ranks(scores, mesh.world)
        if not scores.isfinite().all():
            do = "look at the weights, or go back to an earlier checkpoint"
            wrong = scores[~scores.isfinite().all(1)][0, 0].item()
            where = "the log-likelihood of a text"
            raise TrainingError(where, got=wrong, expected="a finite number", do=do)
        return [Score(logprob, bool(greedy)) for logprob, greedy in scores.tolist()]

    def _batch(self, texts: Sequence[Request]) -> tuple[Batch, Tensor]:
        """Return a microbatch, and which of its labels count, bool [s, b]. Short texts are padded
        at the end, which no counted token sees."""
        longest = max(len(text.tokens) for text in texts) - 1
        length = -(-longest // self._unit) * self._unit
        ids = torch.zeros(length + 1, len(texts), dtype=torch.int64)
        counts = torch.zeros(length, len(texts), dtype=torch.bool)
        lengths = torch.tensor([len(text.tokens) - 1 for text in texts])
        for column, (tokens, scored) in enumerate(texts):
            ids[: len(tokens), column] = torch.tensor(tokens)
            counts[len(tokens) - 1 - scored : len(tokens) - 1, column] = True
        positions = None
        if self._by_length:
            # A rotary scaling that depends on the length of a sequence reads its last position.
            positions = torch.arange(length).unsqueeze(-1).minimum(lengths - 1)
        device = self._mesh.device
        batch = Batch(ids[:-1], ids[1:], position_ids=positions).to(device)
        return batch, counts.to(device)


_NOTHING = (Request((0, 0), 1),)


def serve(program: Callable[[Ask], T], scorer: Scorer, mesh: Mesh) -> T | None:
    """Run ``program`` on rank 0 with a function that scores texts, and return its result there; on
    the other ranks None. Collective. Raises UserErrors of the program, and those of
    ``Scorer.score``, on every rank."""
    desk = _Desk(program, scorer.at_once) if mesh.rank == 0 else None
    try:
        while True:
            # Only rank 0, which has a desk, calls the function.
            requests = on_rank0(lambda: desk.asked() if desk else None, mesh.world)
            if requests is None:
                return desk.result if desk else None
            if requests:
                scores = scorer.score(requests)
                if desk:
                    desk.answer(scores)
    finally:
        if desk:
            desk.close()


@dataclass(frozen=True)
class _End(Generic[T]):
    """The end of a program."""

    result: T | None = None
    error: BaseException | None = None


class _ClosedError(Exception):
    """The error of a request after the ranks' last answer."""


class _Desk(Generic[T]):
    """The place where a program asks in its own thread, and the main thread answers."""

    def __init__(self, program: Callable[[Ask], T], at_once: int) -> None:
        self._program = program
        self._at_once = at_once
        self._asked = SimpleQueue[Sequence[Request] | _End[T]]()
        self._answers = SimpleQueue[list[Score] | None]()
        self.result: T | None = None
        """The result of the program."""
        start_thread(self._run, name="scored program")

    def asked(self) -> Sequence[Request] | None:
        """Return the program's requests: none if it takes longer than a moment, and None if it has
        ended. Raises its error."""
        try:
            message = self._asked.get(timeout=MEETING_SECONDS)
        except Empty:
            return ()
        if not isinstance(message, _End):
            return message
        if message.error is not None:
            raise message.error
        self.result = message.result
        return None

    def answer(self, scores: list[Score]) -> None:
        """Give the program its scores."""
        self._answers.put(scores)

    def close(self) -> None:
        """End the answers. A program that still runs ends at its next question."""
        self._answers.put(None)

    def _run(self) -> None:
        with suppress(_ClosedError):
            try:
                end = _End(self._program(self._ask))
            except _ClosedError:
                raise
            except BaseException as error:
                end = _End[T](error=error)
            self._asked.put(end)

    def _ask(self, requests: Sequence[Request]) -> list[Score]:
        # Neighbours share a microbatch, so they should be equally long. The longest come first, so
        # that a lack of memory shows at once.
        order = sorted(range(len(requests)), key=lambda number: -len(requests[number].tokens))
        scores: dict[int, Score] = {}
        with tqdm(total=len(order), unit=" texts", desc="scored", disable=None) as bar:
            for start in range(0, len(order), self._at_once):
                chunk = order[start : start + self._at_once]
                self._asked.put([requests[number] for number in chunk])
                answer = self._answers.get()
                if answer is None:
                    raise _ClosedError
                scores.update(zip(chunk, answer, strict=True))
                bar.update(len(chunk))
        return [scores[number] for number in range(len(requests))]
