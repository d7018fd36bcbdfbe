"""Examples as tokens, and the samples of a run that are made of them."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_llama.data.loader import Batch, sequence_first
from megatron_llama.errors import DataError, describe, listing
from megatron_llama.tune.sft.chat import ChatTokenizer, Encoded
from megatron_llama.tune.sft.formats import Conversation, Example, detect, read_example
from megatron_llama.tune.sft.packing import best_fit
from megatron_llama.tune.sft.problems import LISTED, Problem, UnusableError, problem_lines
from megatron_llama.tune.sft.records import records
from megatron_llama.tune.sft.sft_config import SFTConfig
from megatron_llama.tune.sft.token_store import Ragged

Content = TypeVar("Content")
Value = TypeVar("Value")
ROUND = 1024
"""Records that are read before the ranks exchange what they have encoded: with 4,096 tokens each
they are 20 MiB."""
RENDERED = "rendered"
"""The key of a day in the identity that a checkpoint keeps: some templates write the day into the
text, and a run that is resumed on another day has to render the same texts."""


@dataclass(kw_only=True)
class Examples:
    """The examples of some files that can be used, and what became of the others.

    An example is one text here; a pair (``preference/dataset.py``) is two, one behind the other."""

    ids: Sequence[NDArray[np.int32]] = field(default_factory=list)
    """The tokens of each text."""
    loss_mask: Sequence[NDArray[np.bool_]] = field(default_factory=list)
    """Whether each of these tokens is in the loss."""
    numbers: Sequence[int] = field(default_factory=list)
    """The position of each example among all examples of the files, by which the shares of several
    ranks are put in order. Examples that a store has kept are in order, and have none."""
    formats: dict[str, str] = field(default_factory=dict)
    """Format by file."""
    problems: list[Problem] = field(default_factory=list)
    lengths: Counter[int] = field(default_factory=Counter)
    """How many texts have a given number of tokens, before anything is cut."""
    truncated: int = 0
    dropped: int = 0
    """Examples that were too long and are left out."""
    cut_away: int = 0
    """How many of these ``dropped`` would have had no answer left after they were truncated."""
    nulls: int = 0
    """How many of the examples that can be used have null in tools or calls of them."""
    repairs: Counter[str] = field(default_factory=Counter)
    """How many of the examples that can be used were mended in each way."""

    per_example: int = 1
    """The texts of an example."""
    repaired: ClassVar[str] = "conversations"
    """What repairs mend."""

    def __len__(self) -> int:
        """The number of examples that can be used."""
        return len(self.ids) // self.per_example

    def texts_of(self, example: int) -> range:
        """Return the indices of an example's texts."""
        return range(self.per_example * example, self.per_example * (example + 1))

    def merge(self, others: Sequence[Self]) -> None:
        """Add the shares of other ranks, and restore the order of the files."""
        parts = [self, *others]
        numbers = [number for part in parts for number in part.numbers]
        # The sort is stable: what comes of one record stays in its order.
        examples = sorted(range(len(numbers)), key=numbers.__getitem__)
        self.numbers = [numbers[example] for example in examples]
        self.reorder(parts, [text for example in examples for text in self.texts_of(example)])
        for other in others:
            self.count(other)
        self.problems.sort(key=lambda problem: problem.number)

    def reorder(self, parts: Sequence[Self], order: Sequence[int]) -> None:
        """Take the texts of all ``parts``, end to end, in this order."""
        self.ids = reordered([part.ids for part in parts], order)
        self.loss_mask = reordered([part.loss_mask for part in parts], order)

    def count(self, other: Self) -> None:
        """Add what ``other`` says of its examples, without the examples themselves."""
        self.formats |= other.formats
        self.problems += other.problems
        self.lengths += other.lengths
        self.truncated += other.truncated
        self.dropped += other.dropped
        self.cut_away += other.cut_away
        self.nulls += other.nulls
        self.repairs += other.repairs

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the examples as columns of a ``TokenStore``."""
        return {
            "lengths": np.array([len(text) for text in self.ids], np.int32),
            "ids": np.concatenate([np.empty(0, np.int32), *self.ids]),
            "loss_mask": np.concatenate([np.empty(0, np.bool_), *self.loss_mask]),
        }

    def take(self, columns: Mapping[str, NDArray[Any]]) -> None:
        """Take the examples that columns of a ``TokenStore`` have, and leave them there."""
        self.ids = Ragged(columns["ids"], columns["lengths"])
        self.loss_mask = Ragged(columns["loss_mask"], columns["lengths"])

    def about(self) -> dict[str, Any]:
        """Return what there is to say of the examples, for JSON."""
        return {
            "formats": self.formats,
            "problems": [asdict(problem) for problem in self.problems],
            "lengths": sorted(self.lengths.items()),
            "truncated": self.truncated,
            "dropped": self.dropped,
            "cut_away": self.cut_away,
            "nulls": self.nulls,
            "repairs": self.repairs,
        }

    def recall(self, about: Mapping[str, Any]) -> None:
        """Take up what ``about`` has returned."""
        self.formats = dict(about["formats"])
        self.problems = [Problem(**problem) for problem in about["problems"]]
        self.lengths = Counter(dict(about["lengths"]))
        self.truncated = about["truncated"]
        self.dropped = about["dropped"]
        self.cut_away = about["cut_away"]
        self.nulls = about["nulls"]
        self.repairs = Counter(about["repairs"])

    def report(self, most: int | None = LISTED) -> Iterator[str]:
        """Yield lines that say what was read and what was left out, with the first ``most``
        problems; None: all of them."""
        for file, name in self.formats.items():
            yield f"{file}: format {name}"
        tokens = sum(map(len, self.ids))
        counted = sum(int(mask.sum()) for mask in self.loss_mask)
        share = f" ({counted / tokens:.0%})" if tokens else ""
        yield from self.summary(tokens, f"{counted:,}", share)
        if self.truncated or self.dropped:
            why = (
                f" ({self.cut_away:,} of them since the cut leaves no answer to learn)"
                if self.cut_away
                else ""
            )
            yield f"too long: {self.truncated:,} examples truncated, {self.dropped:,} dropped{why}"
        if self.nulls:
            yield (
                f"null in tools or calls of them: {self.nulls:,} examples, and the template gets "
                "it; where a program wrote it for fields that an example does not have, as to_json "
                "of datasets does, give the table itself (parquet)"
            )
        if self.repairs:
            counts = ", ".join(f"{name} {many:,}" for name, many in sorted(self.repairs.items()))
            yield f"repaired {self.repaired}: {counts}"
        if self.problems:
            yield f"unusable: {len(self.problems):,} examples"
            yield from (f"  {line}" for line in problem_lines(self.problems, most))

    def summary(self, tokens: int, counted: str, share: str) -> Iterator[str]:
        """Yield how many examples and tokens there are."""
        yield f"{len(self):,} examples, {tokens:,} tokens, {counted} of them in the loss{share}"


def reordered(parts: Sequence[Sequence[Value]], order: Sequence[int]) -> list[Value]:
    """Return the values of all parts, end to end, in this order."""
    values = [value for part in parts for value in part]
    return [values[index] for index in order]


def read_examples(
    files: Sequence[Path],
    tokenizer: ChatTokenizer,
    options: SFTConfig,
    seq_length: int,
    *,
    vocab_size: int | None = None,
) -> Examples:
    """Read all examples of the files. Examples that cannot be used are in ``problems``, for a model
    of ``vocab_size`` also those with a token that it has no row for. Raises DataError if a file
    cannot be read at all."""
    examples = Examples()
    examples.merge([*example_rounds(files, tokenizer, options, seq_length, vocab_size=vocab_size)])
    return examples


def example_rounds(
    files: Sequence[Path],
    tokenizer: ChatTokenizer,
    options: SFTConfig,
    seq_length: int,
    *,
    share: tuple[int, int] = (0, 1),
    vocab_size: int | None = None,
) -> Iterator[Examples]:
    """Read as ``read_examples`` does, of ROUND records after another every n-th from the r-th on,
    for ``share`` (r, n)."""
    formats: dict[str, str] = {}
    for batch in rounds(parsed_examples(files, options, formats)):
        examples = Examples(formats=formats)
        ids, loss_mask, numbers = [], [], []
        for number, (where, found) in batch:
            if number % share[1] != share[0]:
                continue
            try:
                if isinstance(found, UnusableError):
                    raise found
                encoded = tokenizer.read(found, options.loss_on)
                refuse_beyond(encoded.ids, vocab_size or tokenizer.vocab_size, tokenizer)
                kept = _kept(examples, encoded, options.on_long_sample, seq_length)
                if kept is not None:
                    ids.append(np.array(encoded.ids[:kept], np.int32))
                    loss_mask.append(np.array(encoded.loss_mask[:kept]))
                    numbers.append(number)
                if isinstance(found, Conversation):
                    examples.repairs.update(found.repairs)
                    examples.nulls += found.has_null
            except UnusableError as problem:
                examples.problems.append(problem.at(where, number))
        examples.ids, examples.loss_mask, examples.numbers = ids, loss_mask, numbers
        yield examples


def rounds(found: Iterable[Value]) -> Iterator[list[tuple[int, Value]]]:
    """Number what was found, and yield ROUND of it after another."""
    numbered = enumerate(found)
    while batch := list(islice(numbered, ROUND)):
        yield batch


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
        return read_example(record, name, options.repair_conversations, options.ignore_keys)

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
                # A table of two formats has null in the fields of the other one.
                present = {
                    field: value for field, value in record.value.items() if value is not None
                }
                name = formats.setdefault(str(file), name or detect(present))
                yield record.where, read(record.value, name)
            except UnusableError as problem:
                yield record.where, problem


def _kept(examples: Examples, encoded: Encoded, on_long_sample: str, seq_length: int) -> int | None:
    """Return how many tokens of an example are kept, as --on-long-sample says; None if it is left
    out: truncation leaves out what would then have no answer. Raises UnusableError if it is too
    long."""
    count = len(encoded.ids)
    longest = seq_length + 1
    examples.lengths[count] += 1
    if count <= longest:
        return count
    if on_long_sample == "stop":
        raise UnusableError(
            "too long",
            got=f"{count} tokens",
            expected=f"at most {longest} (seq_length + 1)",
            do="raise --seq-length, or give --on-long-sample drop",
        )
    if on_long_sample == "truncate" and any(encoded.loss_mask[1:longest]):
        examples.truncated += 1
        return longest
    examples.dropped += 1
    examples.cut_away += on_long_sample == "truncate"
    return None


def refuse_problems(examples: Examples, files: Sequence[Path], options: SFTConfig) -> None:
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
