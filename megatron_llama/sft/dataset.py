"""Files of examples as tokens in memory, read by all ranks together, and as samples of batches."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_llama.data.loader import Batch, sequence_first
from megatron_llama.errors import DataError, describe, listing
from megatron_llama.sft.chat import ChatTokenizer, Encoded
from megatron_llama.sft.formats import Example, detect, read_example
from megatron_llama.sft.packing import best_fit
from megatron_llama.sft.problems import LISTED, Problem, UnusableError, problem_lines
from megatron_llama.sft.records import records
from megatron_llama.sft.sft_config import SFTConfig

RENDERED = "rendered"
"""The name of a day in an identity: with it a resumed run renders the same texts on another day."""


@dataclass
class Examples:
    """Those of some files that can be used, and what became of the others."""

    ids: list[NDArray[np.int32]] = field(default_factory=list)
    loss_mask: list[NDArray[np.bool_]] = field(default_factory=list)
    """Of each token whether the loss counts it."""
    numbers: list[int] = field(default_factory=list)
    """Place of each among all examples of the files, so that the shares of several ranks can be put
    in order."""
    formats: dict[str, str] = field(default_factory=dict)
    """By file."""
    problems: list[Problem] = field(default_factory=list)
    lengths: Counter[int] = field(default_factory=Counter)
    """How many examples have so many tokens, before anything was cut."""
    truncated: int = 0
    dropped: int = 0
    """Examples that were too long."""

    def __len__(self) -> int:
        """How many can be used."""
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
        order = sorted(range(len(self)), key=self.numbers.__getitem__)
        self.ids = [self.ids[i] for i in order]
        self.loss_mask = [self.loss_mask[i] for i in order]
        self.numbers = [self.numbers[i] for i in order]
        self.problems.sort(key=lambda problem: problem.number)

    def report(self, most: int | None = LISTED) -> Iterator[str]:
        """What was read and what was left out, line by line; with the first ``most`` of what cannot
        be used."""
        for file, name in self.formats.items():
            yield f"{file}: format {name}"
        tokens = sum(map(len, self.ids))
        loss_mask = sum(int(mask.sum()) for mask in self.loss_mask)
        share = f" ({loss_mask / tokens:.0%})" if tokens else ""
        yield f"{len(self):,} examples, {tokens:,} tokens, {loss_mask:,} of them learned{share}"
        if self.truncated or self.dropped:
            yield f"too long: {self.truncated:,} examples truncated, {self.dropped:,} dropped"
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
) -> Examples:
    """Every n-th example of the files from the r-th on, for ``share`` (r, n); what cannot be used
    is in ``problems``.

    Raises DataError if a file cannot be read at all."""
    examples = Examples()
    for number, (where, found) in enumerate(parsed_examples(files, options, examples.formats)):
        if number % share[1] != share[0]:
            continue
        try:
            if isinstance(found, UnusableError):
                raise found
            _add(
                examples,
                number,
                tokenizer.read(found, options.loss_on),
                options.on_long_sample,
                seq_length,
            )
        except UnusableError as problem:
            examples.problems.append(problem.at(where, number))
    return examples


def parsed_examples(
    files: Sequence[Path], options: SFTConfig, formats: dict[str, str]
) -> Iterator[tuple[str, Example | UnusableError]]:
    """Place and content of every example. Where the format is to be detected, the first example
    that has one decides for its file."""
    for file in files:
        name: str | None = None if options.data_format == "auto" else options.data_format
        for record in records(file):
            try:
                if isinstance(record.value, UnusableError):
                    raise record.value
                name = formats.setdefault(str(file), name or detect(record.value))
                yield record.where, read_example(record.value, name)
            except UnusableError as problem:
                yield record.where, problem


def _add(
    examples: Examples, number: int, encoded: Encoded, on_long_sample: str, seq_length: int
) -> None:
    """Raises UnusableError if the example is too long for what is asked."""
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


def refuse_problems(examples: Examples, files: Sequence[Path], options: SFTConfig) -> None:
    """Raises DataError if there are examples that cannot be used and nobody said to drop them, or
    if none is left."""
    if examples.problems and options.on_bad_sample == "stop":
        title = f"{len(examples.problems):,} examples cannot be used (--on-bad-sample drop leaves them out):"
        raise DataError(listing(title, problem_lines(examples.problems)))
    if not examples.ids:
        got = f"no example that can be used ({len(examples.problems):,} cannot, {examples.dropped:,} are too long)"
        do = "run data check on the file"
        raise DataError(
            describe(", ".join(map(str, files)), got=got, expected="one or more", do=do)
        )


@dataclass(frozen=True)
class Noise:
    """NEFTune (Jain et al., 2023): uniform, at most alpha / sqrt(length of the example x
    hidden_size)."""

    alpha: float
    hidden_size: int


class ExampleSamples:
    """Samples of ``seq_length`` tokens, each filled with one example, or with several that share
    it.

    An example of n tokens takes n - 1 places: each of its tokens but the last is read, each but the
    first may be a label. Examples of a sample see only themselves and have positions of their own;
    so does what pads its end, which is never a label."""

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
        """``rendered``: the day that the texts say it is; None if they do not."""
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
        """Share of the places that examples take."""

    def __len__(self) -> int:
        """See Samples."""
        return len(self._rows)

    def identity(self) -> dict[str, Any]:
        """See Samples: counts for people, and a digest of every token, whether it is learned, and
        which examples share a sample."""
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
            "learned tokens": sum(int(loss_mask[index].sum()) for index in order),
            "samples": len(self),
            "seq_length": self._seq_length,
            "digest": digest.hexdigest(),
            RENDERED: self._rendered,
        }

    def batch(self, indices: Sequence[int]) -> Batch:
        """See Samples."""
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
