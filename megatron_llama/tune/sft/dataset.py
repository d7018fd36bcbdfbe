"""Examples as tokens, and the samples of a run made of them."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_llama.data.loader import Batch, sequence_first
from megatron_llama.errors import DataError, describe, listing
from megatron_llama.tune.sft.chat import ChatTokenizer, Encoded
from megatron_llama.tune.sft.formats import Conversation, Example, detect, read_example
from megatron_llama.tune.sft.packing import grouped, side_by_side
from megatron_llama.tune.sft.problems import LISTED, Problem, UnusableError, problem_lines
from megatron_llama.tune.sft.records import records
from megatron_llama.tune.sft.sft_config import SFTConfig
from megatron_llama.tune.sft.token_store import Ragged

Content = TypeVar("Content")
Value = TypeVar("Value")
Read = TypeVar("Read", bound="Examples")
ROUND = 1024
"""Records that are read before the ranks exchange their encoded ones: with 4,096 tokens each they
are 20 MiB."""
RENDERED = "rendered"
"""The key of a day in the identity that a checkpoint keeps: some templates write the day into the
text, and a run that is resumed on another day must render the same texts."""


class ParsedRecord(NamedTuple, Generic[Content]):
    """A record of a file as an example, or the error that says why it is none."""

    where: str
    content: Content | UnusableError


@dataclass(kw_only=True)
class Examples:
    """The usable examples of files, and the counts and problems of the others.

    An example is one text here; a pair (``preference/dataset.py``) is two texts in sequence."""

    ids: Sequence[NDArray[np.int32]] = field(default_factory=list)
    """The tokens of each text."""
    loss_mask: Sequence[NDArray[np.bool_]] = field(default_factory=list)
    """Whether each of these tokens is in the loss."""
    numbers: list[int] = field(default_factory=list)
    """The position of each example among all examples of the files, which orders the shares of
    several ranks. Examples from a store are in order, and have no positions."""
    formats: dict[str, str] = field(default_factory=dict)
    """Format by file."""
    problems: list[Problem] = field(default_factory=list)
    lengths: Counter[int] = field(default_factory=Counter)
    """The number of texts by their number of tokens, before anything is cut."""
    truncated: int = 0
    dropped: int = 0
    """Number of examples that were too long and are left out."""
    cut_away: int = 0
    """Number of ``dropped`` ones that would have no answer left after truncation."""
    nulls: int = 0
    """Number of usable examples with null in tools or calls of them."""
    repairs: Counter[str] = field(default_factory=Counter)
    """Number of usable examples that were mended in each way."""

    per_example: int = 1
    """The texts of an example."""
    repaired: ClassVar[str] = "conversations"
    """The word for repaired objects."""

    def __len__(self) -> int:
        """Return the number of usable examples."""
        return len(self.ids) // self.per_example

    def texts_of(self, example: int) -> range:
        """Return the indices of an example's texts."""
        return range(self.per_example * example, self.per_example * (example + 1))

    def add_text(self, ids: Sequence[int], loss_mask: Sequence[bool]) -> None:
        """Add a text to examples that are being read, and are not from a store."""
        assert isinstance(self.ids, list) and isinstance(self.loss_mask, list)
        self.ids.append(np.array(ids, np.int32))
        self.loss_mask.append(np.array(loss_mask))

    def merge(self, others: Sequence[Self]) -> None:
        """Add the shares of other ranks, and restore the order of the files."""
        parts = [self, *others]
        numbers = [number for share in parts for number in share.numbers]
        # The sort is stable: the examples of one record stay in their order.
        examples = sorted(range(len(numbers)), key=numbers.__getitem__)
        self.numbers = [numbers[example] for example in examples]
        self.reorder(parts, [text for example in examples for text in self.texts_of(example)])
        for share in others:
            self.add_counts(share)
        self.problems.sort(key=lambda problem: problem.number)

    def reorder(self, parts: Sequence[Self], order: Sequence[int]) -> None:
        """Take the texts of all ``parts``, end to end, in this order."""
        self.ids = reordered([share.ids for share in parts], order)
        self.loss_mask = reordered([share.loss_mask for share in parts], order)

    def add_counts(self, other: Self) -> None:
        """Add the counts and problems of ``other``, without its examples."""
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
        """Take the examples from columns of a ``TokenStore``, without a copy."""
        self.ids = Ragged(columns["ids"], columns["lengths"])
        self.loss_mask = Ragged(columns["loss_mask"], columns["lengths"])

    def about(self) -> dict[str, Any]:
        """Return the counts and problems of the examples, for JSON."""
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
        """Take up the result of ``about``."""
        self.formats = dict(about["formats"])
        self.problems = [Problem(**problem) for problem in about["problems"]]
        self.lengths = Counter(dict(about["lengths"]))
        self.truncated = about["truncated"]
        self.dropped = about["dropped"]
        self.cut_away = about["cut_away"]
        self.nulls = about["nulls"]
        self.repairs = Counter(about["repairs"])

    def report(self, most: int | None = LISTED) -> Iterator[str]:
        """Yield lines on the read and left-out examples, with the first ``most`` problems; None:
        all problems."""
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
        """Yield the numbers of examples and tokens."""
        yield f"{len(self):,} examples, {tokens:,} tokens, {counted} of them in the loss{share}"


def reordered(parts: Sequence[Sequence[Value]], order: Sequence[int]) -> list[Value]:
    """Return the values of all parts, end to end, in this order."""
    values = [value for column in parts for value in column]
    return [values[index] for index in order]


def read_examples(
    files: Sequence[Path],
    tokenizer: ChatTokenizer,
    options: SFTConfig,
    seq_length: int,
    *,
    vocab_size: int | None = None,
) -> Examples:
    """Read all examples of the files. Unusable examples are in ``problems``, for a model of
    ``vocab_size`` also those with a token without a row. Raises DataError if a file cannot be read
    at all."""
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
    """Read as ``read_examples`` does, in rounds of ROUND records: of each round every n-th record
    from the r-th on, for ``share`` (r, n)."""
    formats: dict[str, str] = {}

    def add(examples: Examples, number: int, example: Example) -> None:
        encoded = tokenizer.read(example, options.loss_on)
        refuse_beyond(encoded.ids, vocab_size or tokenizer.vocab_size, tokenizer)
        kept = _kept(examples, encoded, options.on_long_sample, seq_length)
        if kept is not None:
            examples.numbers.append(number)
            examples.add_text(encoded.ids[:kept], encoded.loss_mask[:kept])
        if isinstance(example, Conversation):
            examples.repairs.update(example.repairs)
            examples.nulls += example.has_null

    parsed = parsed_examples(files, options, formats)
    return encoded_rounds(parsed, formats, Examples, add, share)


def encoded_rounds(
    parsed: Iterable[ParsedRecord[Content]],
    formats: dict[str, str],
    none: Callable[[], Read],
    add: Callable[[Read, int, Content], None],
    share: tuple[int, int],
) -> Iterator[Read]:
    """Encode in rounds of ROUND records: of each round every n-th record from the r-th on, for
    ``share`` (r, n).

    ``formats``: the mapping into which ``parsed`` writes formats. ``none`` returns the empty
    examples of a round. ``add`` adds those of one record, whose position it gets, or none if it
    raises UnusableError."""
    rank, ranks = share
    numbered = enumerate(parsed)
    while batch := list(islice(numbered, ROUND)):
        examples = none()
        examples.formats = formats
        for number, (where, content) in batch:
            if number % ranks != rank:
                continue
            try:
                if isinstance(content, UnusableError):
                    raise content
                add(examples, number, content)
            except UnusableError as problem:
                examples.problems.append(problem.at(where, number))
        yield examples


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
) -> Iterator[ParsedRecord[Example]]:
    """Yield place and content of every example. If the format is to be detected, the first example
    of a known one decides for its file, and ``formats`` gets it."""

    def read(record: Mapping[str, Any], name: str) -> Example:
        return read_example(record, name, options.repair_conversations, options.ignore_keys)

    return parsed_records(files, options.data_format, detect, read, formats)


def parsed_records(
    files: Sequence[Path],
    wanted: str,
    detect: Callable[[Mapping[str, Any]], str],
    read: Callable[[Mapping[str, Any], str], Content],
    formats: dict[str, str],
) -> Iterator[ParsedRecord[Content]]:
    """Yield the place of every record, and the result of ``read`` for it in the format ``wanted``.
    If that is ``auto``, the first record of a format that ``detect`` knows decides for its file.
    ``formats`` gets the format of each file."""
    for file in files:
        name: str | None = None if wanted == "auto" else wanted
        for record in records(file):
            try:
                if isinstance(record.value, UnusableError):
                    raise record.value
                # A table of two formats has null in the fields of the other format.
                present = {
                    field: value for field, value in record.value.items() if value is not None
                }
                name = formats.setdefault(str(file), name or detect(present))
                yield ParsedRecord(record.where, read(record.value, name))
            except UnusableError as problem:
                yield ParsedRecord(record.where, problem)


def _kept(examples: Examples, encoded: Encoded, on_long_sample: str, seq_length: int) -> int | None:
    """Return the number of tokens of an example that are kept, as --on-long-sample says. None if it
    is left out, also by truncation if no answer would be left. Raises UnusableError if it is too
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
    """Raise DataError if there are unusable examples and --on-bad-sample is not ``drop``, or if no
    example is left."""
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
    first may be labels. Each example of a packed sample is its own document: it attends only to
    itself, and its positions start at 0. So does the padding at the end, which is never a label."""

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
        """``rendered``: the day in the texts, if the template writes it."""
        self._examples = examples
        self._seq_length = seq_length
        self._noise = noise
        self._rendered = rendered
        lengths = [len(examples.ids[index]) - 1 for index in chosen]
        groups = grouped(lengths, seq_length, packing=packing)
        self._rows = [[chosen[index] for index in group] for group in groups]
        self.filled = sum(lengths) / max(1, len(groups) * seq_length)
        """The share of places with examples; the rest is padding."""

    def __len__(self) -> int:
        return len(self._rows)

    def identity(self) -> dict[str, Any]:
        """Return the identity of the samples for checkpoints: counts for people, and a digest of
        every token, of the loss mask, and of the examples of each sample."""
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
        ids = self._examples.ids
        rows = [self._rows[index] for index in indices]
        lengths = [[len(ids[number]) - 1 for number in row] for row in rows]
        places, positions, documents = side_by_side(lengths, self._seq_length)
        tokens, labels = (np.zeros_like(positions) for _ in range(2))
        mask, scale = (np.zeros(positions.shape, np.float32) for _ in range(2))
        for at, row in enumerate(rows):
            for number, length, place in zip(row, lengths[at], places[at], strict=True):
                tokens[at, place] = ids[number][:-1]
                labels[at, place] = ids[number][1:]
                mask[at, place] = self._examples.loss_mask[number][1:]
                if self._noise is not None:
                    spread = math.sqrt(length * self._noise.hidden_size)
                    scale[at, place] = self._noise.alpha / spread
        noise = None if self._noise is None else sequence_first(scale)
        return Batch(
            tokens=sequence_first(tokens),
            labels=sequence_first(labels),
            loss_mask=sequence_first(mask),
            position_ids=sequence_first(positions),
            document_ids=sequence_first(documents),
            noise_scale=noise,
        )
