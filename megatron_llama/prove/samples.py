"""The samples that a run must have, cut from documents and conversations by its options.

Nothing here comes from the loader or from a file that a trainer has read. The data check compares
with these samples, and materials are sized by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from megatron_llama.config.schema import Config
from megatron_llama.tune.sft.packing import best_fit
from megatron_llama.tune.sft.sft_config import SFTConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Talk:
    """An example of instruction tuning."""

    messages: tuple[tuple[str, str], ...]
    """(role, content) of each message."""
    ids: tuple[int, ...] = ()
    """Tokens before any cut; empty if the template cannot be rendered here."""
    answers: tuple[int, ...] = ()
    """For each token the number of its answer from 1, or 0 outside answers."""


@dataclass(frozen=True)
class Expected:
    """The required values of one sample, or of one example in it, with s tokens."""

    tokens: tuple[int, ...]
    labels: tuple[int, ...]
    counts: tuple[bool, ...]
    """Whether each label is in the loss."""
    positions: tuple[int, ...]
    documents: tuple[int, ...]
    """Number of each token's document within the sample; all 0 if attention crosses documents."""

    @property
    def window(self) -> tuple[int, ...]:
        """The tokens and the last label."""
        return (*self.tokens, self.labels[-1])


def training_share(everything: Sequence[T], split: str) -> Sequence[T]:
    """Return the items that --split gives to training."""
    weights = [float(weight) for weight in split.split(",")]
    return everything[: round(len(everything) * weights[0] / sum(weights))]


def stream_samples(
    documents: Sequence[Sequence[int]], config: Config, eod: int
) -> tuple[Expected, ...]:
    """Return the samples of one dataset's training documents, in file order."""
    stream = [int(token) for document in documents for token in document]
    length = config.training.seq_length
    return tuple(
        expected_of(stream[start : start + length + 1], config, eod)
        for start in range(0, len(stream) - length, length)
    )


def expected_of(window: Sequence[int], config: Config, eod: int) -> Expected:
    """Return the sample of a window of consecutive tokens, which has one token more."""
    data = config.data
    positions = []
    documents = []
    position = document = 0
    for token in window[:-1]:
        positions.append(position)
        documents.append(document)
        position += 1
        if token == eod:
            position = 0 if data.reset_position_ids else position
            document += data.reset_attention_mask
    counts = tuple(not (data.eod_mask_loss and token == eod) for token in window[:-1])
    return Expected(
        tuple(window[:-1]), tuple(window[1:]), counts, tuple(positions), tuple(documents)
    )


def trained_examples(
    talks: Sequence[Talk], options: SFTConfig, length: int
) -> tuple[Expected, ...]:
    """Return the conversations that can be trained in samples of ``length`` tokens, by --loss-on
    and --on-long-sample."""
    loss_on = options.loss_on
    examples = []
    for talk in talks:
        if options.on_long_sample == "drop" and len(talk.ids) > length + 1:
            continue
        last = max(talk.answers)
        answers = [
            loss_on == "all" or (answer == last if loss_on == "last" else answer > 0)
            for answer in talk.answers
        ]
        example = example_of(talk.ids, answers, length)
        # An example without an answer after the cut cannot be used.
        if any(example.counts):
            examples.append(example)
    return tuple(examples)


def example_of(ids: Sequence[int], answers: Sequence[bool], length: int) -> Expected:
    """Return a conversation, cut to the length of a sample, in which only the answers count."""
    ids = tuple(int(token) for token in ids[: length + 1])
    places = len(ids) - 1
    counts = tuple(bool(answer) for answer in answers[1 : length + 1])
    return Expected(ids[:-1], ids[1:], counts, tuple(range(places)), (0,) * places)


def samples_of_examples(examples: Sequence[Expected], options: SFTConfig, length: int) -> int:
    """Return the number of samples of ``length`` tokens that hold the examples: one example each,
    or several with --packing."""
    if not options.packing:
        return len(examples)
    return len(best_fit([len(example.tokens) for example in examples], length))
