"""Examples as tokens in memory, and the samples of a run that are made of them."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_llama.data.loader import Batch, sequence_first
from megatron_llama.errors import DataError, describe, listing
from megatron_llama.sft.chat import ChatTokenizer, Encoded
from megatron_llama.sft.formats import Conversation, Example, detect, read_example
from megatron_llama.sft.packing import best_fit
from megatron_llama.sft.problems import LISTED, Problem, UnusableError, problem_lines
from megatron_llama.sft.records import records
from megatron_llama.sft.sft_config import SFTConfig

Content = TypeVar("Content")
RENDERED = "rendered"
"""The key of a day in the identity that a checkpoint keeps: some templates write the day into the
text, and a run that is resumed on another day has to render the same texts."""


@dataclass
class Examples:
    """The examples of some files that can be used, and what became of the others."""

    ids: list[NDArray[np.int32]] = field(default_factory=list)
    loss_mask: list[NDArray[np.bool_]] = field(default_factory=list)
    """Whether each token of an example is in the loss."""
    numbers: list[int] = field(default_factory=list)
    """The position of each example among all examples of the files, by which the shares of several
    ranks are put in order."""
    formats: dict[str, str] = field(default_factory=dict)
    """Format by file."""
    problems: list[Problem] = field(default_factory=list)
    lengths: Counter[int] = field(default_factory=Counter)
    """How many examples have a given number of tokens, before anything is cut."""
    truncated: int = 0
    dropped: int = 0
    """Examples that were too long."""
    repairs: Counter[str] = field(default_factory=Counter)
    """How many of the examples that can be used were mended in each way."""

    def __len__(self) -> int:
        """The number of examples that can be used."""
        return len(self.ids)

    def merge(self, others: Iterable[Examples]) -> None:
        """Add the shares of other ranks, and restore the order of the files."""
        for other in others:
            self.ids += other.ids
            self.loss_mask += other.loss_mask
            self.numbers += other.numbers
            self.formats |= other.formats
            self.problems += other.problems
            self.lengths += other.lengths
            self.truncated += other.truncated
            self.dropped += other.dropped
            self.repairs += other.repairs
        order = sorted(range(len(self)), key=self.numbers.__getitem__)
        self.ids = [self.ids[i] for i in order]
        self.loss_mask = [self.loss_mask[i] for i in order]
        self.numbers = [self.numbers[i] for i in order]
        self.problems.sort(key=lambda problem: problem.number)

    def report(self, most: int | None = LISTED) -> Iterator[str]:
        """Yield lines that say what was read and what was left out, with the first ``most``
        problems; None: all of them."""
        for file, name in self.formats.items():
            yield f"{file}: format {name}"
        tokens = sum(map(len, self.ids))
        counted = sum(int(mask.sum()) for mask in self.loss_mask)
        share = f" ({counted / tokens:.0%})" if tokens else ""
        yield f"{len(self):,} examples, {tokens:,} tokens, {counted:,} of them in the loss{share}"
        if self.truncated or self.dropped:
            yield f"too long: {self.truncated:,} examples truncated, {self.dropped:,} dropped"
        if self.repairs:
            counts = ", ".join(f"{name} {many:,}" for name, many in sorted(self.repairs.items()))
            yield f"repaired conversations: {counts}"
        if self.problems:
            yield f"unusable: {len(self.problems):,} examples"
            yield from (f"  {line}" for line in problem_lines(self.problems, most))


def read_examples(
    files: Sequence[Path],
    tokenizer: ChatTokenizer,
    options: SFTConfig,
    seq_length: int,
    *,
    share: tuple[int, int] = (0, 1),
    vocab_size: int | None = None,
) -> Examples:
    """Read every n-th example of the files from the r-th on, for ``share`` (r, n). Examples that
    cannot be used are in ``problems``, for a model of ``vocab_size`` also those with a token that
    it has no row for. Raises DataError if a file cannot be read at all."""
    examples = Examples()
    for number, (where, found) in enumerate(parsed_examples(files, options, examples.formats)):
        if number % share[1] != share[0]:
            continue
        try:
            if isinstance(found, UnusableError):
                raise found
            encoded = tokenizer.read(found, options.loss_on)
            refuse_beyond(encoded.ids, vocab_size or tokenizer.vocab_size, tokenizer)
            _add(examples, number, encoded, options.on_long_sample, seq_length)
            if isinstance(found, Conversation):
                examples.repairs.update(found.repairs)
        except UnusableError as problem:
            examples.problems.append(problem.at(where, number))
    return examples


def refuse_beyond(ids: Sequence[int], vocab_size: int, tokenizer: ChatTokenizer) -> None:
    """Raise UnusableError if a model of ``vocab_size`` has no row for one of the tokens."""
    beyond = next((id for id in ids if id >= vocab_size), None)
    if beyond is not None:
        raise UnusableError(
            "a token that the model does not have",
            got=f"the token {tokenizer.token(beyond)!r} (id {beyond})",
            expected=f"tokens of the model, whose vocab_size is {vocab_size}",
            do="give --resize-embeddings to add rows, or leave the example out",
        )


def parsed_examples(
    files: Sequence[Path], options: SFTConfig, formats: dict[str, str]
) -> Iterator[tuple[str, Example | UnusableError]]:
    """Yield place and content of every example. Where the format is to be detected, the first
    example with a known one decides for its file, and ``formats`` gets it."""

    def read(record: Mapping[str, Any], name: str) -> Example:
        return read_example(record, name, options.repair_conversations)

    return parsed_records(files, options.data_format, detect, read, formats)


def parsed_records(
    files: Sequence[Path],
    wanted: str,
    detect: Callable[[Mapping[str, Any]], str],
    read: Callable[[Mapping[str, Any], str], Content],
    formats: dict[str, str],
) -> Iterator[tuple[str, Content | UnusableError]]:
    """Yield the place of every record, and what ``read`` makes of it as one of the format
    ``wanted``. Where that is ``auto``, the first record with a format that ``detect`` knows decides
    for its file. ``formats`` gets the format of each file."""
    for file in files:
        name: str | None = None if wanted == "auto" else wanted
        for record in records(file):
            try:
                if isinstance(record.value, UnusableError):
                    raise record.value
                name = formats.setdefault(str(file), name or detect(record.value))
                yield record.where, read(record.value, name)
            except UnusableError as problem:
                yield record.where, problem


def _add(
    examples: Examples, number: int, encoded: Encoded, on_long_sample: str, seq_length: int
) -> None:
    """Add an example, cut or left out as --on-long-sample says. Raises UnusableError if it is too
    long for that."""
    count = len(encoded.ids)
    longest = seq_length + 1
    ids = np.array(encoded.ids, np.int32)
    loss_mask = np.array(encoded.loss_mask)
    examples.lengths[count] += 1
    if count > longest:
        expected = f"at most {longest} (seq_length + 1)"
        do = "raise --seq-length, or give --on-long-sample drop"
        if on_long_sample == "stop":
            raise UnusableError("too long", got=f"{count} tokens", expected=expected, do=do)
        if on_long_sample == "drop":
            examples.dropped += 1
            return
        ids = ids[:longest]
        loss_mask = loss_mask[:longest]
        if not loss_mask[1:].any():
            got = f"{count} tokens, none of an answer among the first {longest}"
            raise UnusableError(
                "zero target tokens after truncation", got=got, expected=expected, do=do
            )
        examples.truncated += 1
    examples.ids.append(ids)
    examples.loss_mask.append(loss_mask)
    examples.numbers.append(number)


class ReadExamples(Protocol):
    """What was read from files: examples that can be used, and those that cannot."""

    problems: list[Problem]
    dropped: int

    def __len__(self) -> int:
        """Return the number of examples that can be used."""


def refuse_problems(examples: ReadExamples, files: Sequence[Path], options: SFTConfig) -> None:
    """Raise DataError if there are examples that cannot be used and --on-bad-sample is not
    ``drop``, or if no example is left."""
    if examples.problems and options.on_bad_sample == "stop":
        title = (
            f"{len(examples.problems):,} examples cannot be used (--on-bad-sample drop leaves "
            "them out):"
        )
        raise DataError(listing(title, problem_lines(examples.problems)))
    if not len(examples):
        got = (
            f"no example that can be used ({len(examples.problems):,} cannot, "
            f"{examples.dropped:,} are too long)"
        )
        do = "run data check on the file"
        raise DataError(
            describe(", ".join(map(str, files)), got=got, expected="one or more", do=do)
        )


@dataclass(frozen=True)
class Noise:
    """NEFTune (Jain et al., 2023): uniform noise of at most alpha / sqrt(length of the example x
    hidden_size) on the embeddings of training samples."""

    alpha: float
    hidden_size: int


class ExampleSamples:
    """Samples of ``seq_length`` tokens, each filled with one example, or packed with several.

    An example of n tokens takes n - 1 places: all its tokens but the last are inputs, all but the
    first may be labels. Each example of a packed sample is a document of its own: it attends only
    to itself, and its positions start at 0. So does the padding at the end, which is never a
    label."""

    def __init__(
        self,
        examples: Examples,
        chosen: range,
        seq_length: int,
        *,
        packing: bool,
        noise: Noise | None = None,
        rendered: str | None = None,
    ) -> None:
        """``rendered``: the day that the template has written into the texts, if it does."""
        self._examples = examples
        self._seq_length = seq_length
        self._noise = noise
        self._rendered = rendered
        lengths = [len(examples.ids[index]) - 1 for index in chosen]
        groups = (
            best_fit(lengths, seq_length) if packing else [[index] for index in range(len(lengths))]
        )
        self._rows = [[chosen[index] for index in group] for group in groups]
        self.filled = sum(lengths) / max(1, len(groups) * seq_length)
        """The share of all places that examples take; the rest is padding."""

    def __len__(self) -> int:
        return len(self._rows)

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint keeps to recognize the samples: counts for people, and a digest
        of every token, of the loss mask, and of which examples share a sample."""
        ids = self._examples.ids
        loss_mask = self._examples.loss_mask
        order = [index for row in self._rows for index in row]
        lengths = np.array([len(ids[index]) for index in order])
        sizes = np.array([len(row) for row in self._rows])
        digest = hashlib.blake2b(sizes.tobytes() + lengths.tobytes(), digest_size=16)
        for index in order:
            digest.update(ids[index].data)
            digest.update(loss_mask[index].data)
        return {
            "examples": len(order),
            "tokens": int(lengths.sum()),
            # This key is in saved checkpoints, with which a resumed run compares.
            "learned tokens": sum(int(loss_mask[index].sum()) for index in order),
            "samples": len(self),
            "seq_length": self._seq_length,
            "digest": digest.hexdigest(),
            RENDERED: self._rendered,
        }

    def batch(self, indices: Sequence[int]) -> Batch:
        shape = (len(indices), self._seq_length)
        tokens, labels, positions = (np.zeros(shape, np.int64) for _ in range(3))
        mask = np.zeros(shape, np.float32)
        documents = np.zeros(shape, np.int32)
        scale = np.zeros(shape, np.float32)
        for row, index in enumerate(indices):
            start = 0
            for document, number in enumerate(self._rows[index]):
                ids = self._examples.ids[number]
                loss_mask = self._examples.loss_mask[number]
                count = len(ids) - 1
                place = slice(start, start + count)
                tokens[row, place] = ids[:-1]
                labels[row, place] = ids[1:]
                mask[row, place] = loss_mask[1:]
                positions[row, place] = np.arange(count)
                documents[row, place] = document
                if self._noise is not None:
                    scale[row, place] = self._noise.alpha / math.sqrt(
                        count * self._noise.hidden_size
                    )
                start += count
            positions[row, start:] = np.arange(self._seq_length - start)
            documents[row, start:] = len(self._rows[index])
        noise = None if self._noise is None else sequence_first(scale)
        return Batch(
            tokens=sequence_first(tokens),
            labels=sequence_first(labels),
            loss_mask=sequence_first(mask),
            position_ids=sequence_first(positions),
            document_ids=sequence_first(documents),
            noise_scale=noise,
        )
