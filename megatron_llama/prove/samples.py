"""The samples that a run must have: cut from what was written for it, as its options say.

Nothing here comes from the loader, and nothing from a file that a trainer has read: the data check
compares with it, and what is written is measured by it."""

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
    """Role and content."""
    ids: tuple[int, ...] = ()
    """Its tokens, before anything is cut; none where nobody here can render its template."""
    answers: tuple[int, ...] = ()
    """For each token 0, or the number of the answer that it belongs to, from 1."""


@dataclass(frozen=True)
class Expected:
    """One sample, or one example of it, as it has to be: s tokens each."""

    tokens: tuple[int, ...]
    labels: tuple[int, ...]
    counts: tuple[bool, ...]
    """Whether each label is in the loss."""
    positions: tuple[int, ...]
    documents: tuple[int, ...]
    """The number of each token's document within the sample; all 0 where attention crosses
    documents."""

    @property
    def window(self) -> tuple[int, ...]:
        """Its tokens, the last label among them."""
        return (*self.tokens, self.labels[-1])


def training_share(everything: Sequence[T], split: str) -> Sequence[T]:
    """Those that --split leaves to training."""
    weights = [float(weight) for weight in split.split(",")]
    return everything[: round(len(everything) * weights[0] / sum(weights))]


def stream_samples(
    documents: Sequence[Sequence[int]], config: Config, eod: int
) -> tuple[Expected, ...]:
    """The samples of the training documents of one dataset, in file order."""
    stream = [int(token) for document in documents for token in document]
    length = config.training.seq_length
    return tuple(
        expected_of(stream[start : start + length + 1], config, eod)
        for start in range(0, len(stream) - length, length)
    )


def expected_of(window: Sequence[int], config: Config, eod: int) -> Expected:
    """A sample of consecutive tokens, one more than it has places."""
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
    """The conversations that can be trained in samples of ``length`` tokens, as --loss-on and
    --on-long-sample say."""
    loss_on = options.loss_on
    found = []
    for talk in talks:
        if options.on_long_sample == "drop" and len(talk.ids) > length + 1:
            continue
        last = max(talk.answers)
        answers = [
            loss_on == "all" or (answer == last if loss_on == "last" else answer > 0)
            for answer in talk.answers
        ]
        example = example_of(talk.ids, answers, length)
        # One that has no answer left when it is cut cannot be used.
        if any(example.counts):
            found.append(example)
    return tuple(found)


def example_of(ids: Sequence[int], answers: Sequence[bool], length: int) -> Expected:
    """A conversation, cut to what a sample holds, of which only the answers count."""
    ids = tuple(int(token) for token in ids[: length + 1])
    places = len(ids) - 1
    counts = tuple(bool(answer) for answer in answers[1 : length + 1])
    return Expected(ids[:-1], ids[1:], counts, tuple(range(places)), (0,) * places)


def samples_of_examples(examples: Sequence[Expected], options: SFTConfig, length: int) -> int:
    """How many samples of ``length`` tokens hold the examples: one each, or several with
    --packing."""
    if not options.packing:
        return len(examples)
    return len(best_fit([len(example.tokens) for example in examples], length))
