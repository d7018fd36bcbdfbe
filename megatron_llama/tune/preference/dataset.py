"""Pairs of completions as tokens, and the samples of a run made of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from megatron_llama.data.loader import Batch, sequence_first
from megatron_llama.errors import DataError, describe
from megatron_llama.pipeline.objective import OBJECTIVE
from megatron_llama.tune.preference.align_config import AlignConfig, Method
from megatron_llama.tune.preference.methods import CHOSEN, REJECTED
from megatron_llama.tune.preference.pairs import (
    EncodedCompletion,
    Preference,
    detect,
    encode_pair,
    encode_unpaired,
    has_null,
    paired,
    read_preference,
    refuse_marks,
    unpaired,
)
from megatron_llama.tune.sft.chat import ChatTokenizer
from megatron_llama.tune.sft.dataset import (
    RENDERED,
    Examples,
    ParsedRecord,
    encoded_rounds,
    parsed_records,
    refuse_beyond,
    reordered,
)
from megatron_llama.tune.sft.packing import grouped, side_by_side
from megatron_llama.tune.sft.problems import UnusableError
from megatron_llama.tune.sft.sft_config import SFTConfig

Likelihood = Literal["completion", "whole"]
"""The tokens whose likelihood a method adds to its loss: those of chosen completions, or of their
prompts too."""


def likelihood_of(align: AlignConfig) -> Likelihood | None:
    """Return the tokens whose likelihood a method adds to its loss. ORPO's is that of prompt and
    completion, as in the code of its authors (and TRL's); RPO's that of the completion."""
    if align.method == "orpo":
        return "whole"
    return "completion" if align.sft_loss_weight else None


@dataclass
class Pairs(Examples):
    """The usable examples of files, and the counts and problems of the others.

    An example is a pair, or one completion that was judged alone. Its texts are its completions,
    each after its prompt; the chosen one of a pair comes first. ``loss_mask`` has the tokens of the
    completion. ``lengths`` counts completions."""

    per_example: int = 2
    """Completions of an example: 2, or 1 where they are judged alone."""
    prompts: Sequence[int] = field(default_factory=list)
    """Number of tokens of each text that are the prompt's."""
    kinds: Sequence[int] = field(default_factory=list)
    """CHOSEN or REJECTED, of each completion."""
    merged: int = 0
    """Examples in which the tokenizer joins the end of the prompt with the completion."""
    repaired: ClassVar[str] = "prompts"

    def add_completion(self, completion: EncodedCompletion, longest: int | None, kind: int) -> None:
        """Add a completion, cut after ``longest`` tokens, as ``add_text`` does."""
        assert isinstance(self.prompts, list) and isinstance(self.kinds, list)
        self.add_text(completion.ids[:longest], completion.loss_mask[:longest])
        self.prompts.append(completion.prompt)
        self.kinds.append(kind)

    def reorder(self, parts: Sequence[Self], order: Sequence[int]) -> None:
        super().reorder(parts, order)
        self.prompts = reordered([share.prompts for share in parts], order)
        self.kinds = reordered([share.kinds for share in parts], order)

    def add_counts(self, other: Self) -> None:
        assert other.per_example == self.per_example
        super().add_counts(other)
        self.merged += other.merged

    def columns(self) -> dict[str, NDArray[Any]]:
        return super().columns() | {
            "prompts": np.array(self.prompts, np.int32),
            "kinds": np.array(self.kinds, np.uint8),
        }

    def take(self, columns: Mapping[str, NDArray[Any]]) -> None:
        super().take(columns)
        # The elements of ``data`` are Python integers.
        self.prompts = columns["prompts"].data
        self.kinds = columns["kinds"].data

    def about(self) -> dict[str, Any]:
        return super().about() | {"merged": self.merged}

    def recall(self, about: Mapping[str, Any]) -> None:
        super().recall(about)
        self.merged = about["merged"]

    def summary(self, tokens: int, counted: str, share: str) -> Iterator[str]:
        good = sum(kind == CHOSEN for kind in self.kinds)
        what = (
            f"{len(self):,} pairs"
            if self.per_example == 2
            else f"{len(self):,} completions, {good:,} good and {len(self.kinds) - good:,} bad"
        )
        yield f"{what}, {tokens:,} tokens, {counted} of them in completions{share}"
        if self.merged:
            yield (
                f"in {self.merged:,} examples the tokenizer joins the end of the prompt with the "
                "completion; that token counts as one of the completion"
            )


def read_pairs(
    files: Sequence[Path],
    tokenizer: ChatTokenizer,
    options: SFTConfig,
    align: AlignConfig,
    seq_length: int,
    *,
    vocab_size: int | None = None,
) -> Pairs:
    """Read all records of the files. Unusable records are in ``problems``, for a model of
    ``vocab_size`` also those with a token without a row. Raises DataError if a file cannot be read
    at all."""
    pairs = no_pairs(align)
    pairs.merge([*pair_rounds(files, tokenizer, options, align, seq_length, vocab_size=vocab_size)])
    return pairs


def no_pairs(align: AlignConfig) -> Pairs:
    """Return no examples, of the kind that the method reads."""
    return Pairs(1 if align.method == "kto" else 2)


def pair_rounds(
    files: Sequence[Path],
    tokenizer: ChatTokenizer,
    options: SFTConfig,
    align: AlignConfig,
    seq_length: int,
    *,
    share: tuple[int, int] = (0, 1),
    vocab_size: int | None = None,
) -> Iterator[Pairs]:
    """Read as ``read_pairs`` does, in rounds of ROUND records: of each round every n-th record from
    the r-th on, for ``share`` (r, n)."""
    formats: dict[str, str] = {}

    def add(pairs: Pairs, number: int, preference: Preference) -> None:
        encoded, kinds, repairs = encode_preference(tokenizer, preference, align.method)
        for completion in encoded:
            refuse_beyond(completion.ids, vocab_size or tokenizer.vocab_size, tokenizer)
        kept = _kept(pairs, encoded, options.on_long_sample, seq_length, align.method)
        for example, longest in kept:
            pairs.numbers.append(number)
            for index in example:
                pairs.add_completion(encoded[index], longest, kinds[index])
        pairs.repairs.update(repairs)
        pairs.nulls += has_null(preference)

    parsed = parsed_preferences(files, options, align, formats)
    return encoded_rounds(parsed, formats, partial(no_pairs, align), add, share)


def parsed_preferences(
    files: Sequence[Path], options: SFTConfig, align: AlignConfig, formats: dict[str, str]
) -> Iterator[ParsedRecord[Preference]]:
    """Yield place and content of every record. If the format is to be detected, the first record of
    a known one decides for its file, and ``formats`` gets it."""

    def read(record: Mapping[str, Any], name: str) -> Preference:
        return read_preference(record, name, options.repair_conversations, options.ignore_keys)

    return parsed_records(files, align.preference_format, detect, read, formats)


def encode_preference(
    tokenizer: ChatTokenizer, found: Preference, method: Method
) -> tuple[list[EncodedCompletion], tuple[int, ...], tuple[str, ...]]:
    """Encode the completions of a record: return them, the kind of each, and the repairs of their
    prompt. For kto a pair is two completions, each judged alone. Raises UnusableError."""
    if method == "kto":
        alone = unpaired(found)
        kinds = tuple(CHOSEN if single.desirable else REJECTED for single in alone)
        encoded = [encode_unpaired(tokenizer, single) for single in alone]
        return encoded, kinds, alone[0].completion.repairs
    pair = paired(found)
    if method in ("orpo", "reward"):
        refuse_marks(pair, method)
    return encode_pair(tokenizer, pair), (CHOSEN, REJECTED), pair.chosen.repairs


def places_of(tokens: int, method: Method) -> int:
    """Return the number of places of a prompt with its completion in a sample: all tokens but the
    last are inputs. A reward model reads the score at the last one, so there it is an input too."""
    return tokens if method == "reward" else tokens - 1


def most_tokens(lengths: Sequence[int], seq_length: int, method: Method) -> int:
    """Return the most tokens for each completion of an example such that all fit into one sample.
    It is the same for both halves of a pair; a long one may take the places that a short one leaves
    free."""
    room = seq_length + len(lengths) * (1 - places_of(1, method))
    if len(lengths) == 1:
        return room
    return max(room // 2, room - min(lengths))


def _kept(
    pairs: Pairs,
    encoded: Sequence[EncodedCompletion],
    on_long_sample: str,
    seq_length: int,
    method: Method,
) -> list[tuple[range, int | None]]:
    """Return the examples of a record, as indices of ``encoded``, each with the tokens after which
    its completions are cut, or None. Long examples are cut or left out as --on-long-sample says;
    truncation leaves out those with nothing left to learn. Raises UnusableError if an example is
    too long."""
    size = pairs.per_example
    examples = [range(start, start + size) for start in range(0, len(encoded), size)]
    pairs.lengths.update(len(completion.ids) for completion in encoded)
    kept: list[tuple[range, int | None]] = []
    for example in examples:
        lengths = [len(encoded[i].ids) for i in example]
        longest = most_tokens(lengths, seq_length, method)
        if max(lengths) <= longest:
            kept.append((example, None))
            continue
        halves = [encoded[i] for i in example]
        if on_long_sample == "stop":
            raise _too_long(halves, seq_length)
        if on_long_sample == "truncate" and _is_useful(halves, longest):
            kept.append((example, longest))
        else:
            pairs.cut_away += on_long_sample == "truncate"
    pairs.dropped += len(examples) - len(kept)
    pairs.truncated += sum(longest is not None for _, longest in kept)
    pairs.merged += sum(encoded[example[0]].merged > 0 for example, _ in kept)
    return kept


def _too_long(halves: Sequence[EncodedCompletion], seq_length: int) -> UnusableError:
    lengths = " and ".join(f"{len(half.ids)}" for half in halves)
    both = " for both halves together" if len(halves) == 2 else ""
    return UnusableError(
        "too long",
        got=f"{lengths} tokens",
        expected=f"at most {seq_length} (seq_length){both}",
        do="raise --seq-length, or give --on-long-sample drop",
    )


def _is_useful(halves: Sequence[EncodedCompletion], longest: int) -> bool:
    """Whether completions that are cut after ``longest`` tokens still have something to learn: each
    has a token of its own, and the halves of a pair differ."""
    if not all(any(half.loss_mask[:longest]) for half in halves):
        return False
    return len(halves) == 1 or halves[0].ids[:longest] != halves[1].ids[:longest]


class _Row(NamedTuple):
    """A completion in a sample."""

    ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    kind: int
    reference: float


class PairSamples:
    """Samples of ``seq_length`` tokens, each filled with one example, or packed with several.

    The completions of a sample, each after its prompt, lie side by side: both halves of a pair are
    in one sample, the chosen one first. Each is its own document: it attends only to itself, and
    its positions start at 0. So does the padding at the end. A completion of n tokens, prompt
    included, takes n - 1 places, for a reward model n. ``completion_ids`` has its number at every
    label that is a token of the completion; for a reward model only at the last token, where the
    score is read.

    For kto each sample has a mismatched one (Ethayarajh et al., 2024, section 4.1): the same
    prompts in the same places, each with the completion of the example a fixed number of places
    before it in the files; the first ones get those of the last. Its end is cut if it is too long.
    It belongs to the sample, so no layout and no batch size changes it.

    Completions are numbered in the order of the files, from 0: the chosen one of pair p is 2p, the
    rejected one 2p + 1. Reference log-probabilities come in this order."""

    def __init__(
        self,
        pairs: Pairs,
        chosen: range,
        seq_length: int,
        *,
        packing: bool,
        method: Method,
        likelihood: Likelihood | None = None,
        rendered: str | None = None,
        objective: Mapping[str, Any] | None = None,
    ) -> None:
        """``chosen``: the examples. ``likelihood``: the tokens of chosen completions in
        ``loss_mask``, for a method that adds their likelihood; None: there is no mask.
        ``rendered``: the day in the texts, if the template writes it. ``objective``: the loss of
        the run, which a checkpoint keeps with the identity. Raises DataError for kto if over half
        of the examples have one prompt."""
        self._pairs = pairs
        self._chosen = chosen
        self._seq_length = seq_length
        self._method = method
        self._likelihood = likelihood
        self._rendered = rendered
        self._objective = objective
        self._logps: NDArray[np.float64] | None = None
        self._kl_logps: NDArray[np.float64] | None = None
        self._completions = [i for k in chosen for i in pairs.texts_of(k)]
        self.shift = self._distance() if method == "kto" else 0
        """For kto: the distance from an example back to the one whose completion its prompt has in
        the mismatched sample."""
        places = [
            sum(self._places(number) for number in self._numbers_of(place))
            for place in range(len(chosen))
        ]
        self._rows = grouped(places, seq_length, packing=packing)
        self._width = pairs.per_example * max(map(len, self._rows), default=0)
        own = sum(places_of(len(pairs.ids[i]), method) for i in self._completions)
        self.filled = own / max(1, len(self) * seq_length)
        """The share of places with completions and their prompts; the rest is padding."""

    def _numbers_of(self, place: int) -> range:
        return self._pairs.texts_of(place)

    def _places(self, number: int) -> int:
        """Return the places of a completion; for kto enough for its mismatched twin too."""
        places = places_of(len(self._pairs.ids[self._completions[number]]), self._method)
        if not self.shift:
            return places
        return max(places, len(self._mismatched(number)[0]) - 1)

    def _distance(self) -> int:
        """Return the length of the longest run of equal prompts, wrapped around the end: at this
        distance no two examples of one run meet."""
        prompts = [self._prompt(i) for i in self._completions]
        runs = [0]
        for before, prompt in zip([None, *prompts], prompts, strict=False):
            if before == prompt:
                runs[-1] += 1
            else:
                runs.append(1)
        if len(runs) > 2 and prompts[0] == prompts[-1]:
            runs.append(runs[1] + runs[-1])
        # A longer run would meet itself around the end of the files.
        if 2 * max(runs) > len(prompts):
            raise DataError(
                describe(
                    "--method kto",
                    got=f"{max(runs)} of {len(prompts)} completions in a row with one prompt",
                    expected="at most half: the others are compared with them",
                    do="give more examples, or another --split",
                )
            )
        return max(runs)

    def _prompt(self, index: int) -> bytes:
        return self._pairs.ids[index][: self._pairs.prompts[index]].tobytes()

    def _mismatched(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return the prompt of a completion with the completion ``shift`` places before, and the
        mask of the completion's tokens."""
        pairs = self._pairs
        own = self._completions[number]
        partner = self._completions[number - self.shift]
        ids = [pairs.ids[own][: pairs.prompts[own]], pairs.ids[partner][pairs.prompts[partner] :]]
        mask = pairs.loss_mask[partner][pairs.prompts[partner] :]
        before = np.zeros(len(ids[0]), np.bool_)
        longest = self._seq_length + 1
        return np.concatenate(ids)[:longest], np.concatenate([before, mask])[:longest]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def completions(self) -> int:
        """Number of completions."""
        return len(self._completions)

    def numbers(self, index: int) -> list[int]:
        """Return the numbers of a sample's completions, in the order of ``completion_kinds``."""
        return [number for place in self._rows[index] for number in self._numbers_of(place)]

    def with_references(
        self, logps: NDArray[np.float64], kl_logps: NDArray[np.float64] | None = None
    ) -> PairSamples:
        """Return the same samples with the reference's log-probabilities of all completions, and
        for kto of all mismatched ones, [completions] each."""
        assert logps.shape == (self.completions,), logps.shape
        assert (kl_logps is not None) == (self._method == "kto"), "kto alone has mismatched ones"
        assert kl_logps is None or kl_logps.shape == logps.shape, kl_logps.shape
        samples = copy(self)
        samples._logps = logps
        samples._kl_logps = kl_logps
        return samples

    def digest(self) -> str:
        """Return a digest of all completions in their order, whatever their samples: of all that a
        reference scores."""
        pairs = self._pairs
        lengths = np.array([len(pairs.ids[index]) for index in self._completions])
        kind = "last" if self._method == "reward" else "all"
        digest = hashlib.blake2b(
            f"{kind} {self.shift} {self._seq_length if self.shift else 0} ".encode()
            + lengths.tobytes(),
            digest_size=16,
        )
        for index in self._completions:
            digest.update(pairs.ids[index].data)
            digest.update(pairs.loss_mask[index].data)
            digest.update(bytes([pairs.kinds[index]]))
            digest.update(pairs.prompts[index].to_bytes(8, "little") if self.shift else b"")
        return digest.hexdigest()

    def identity(self) -> dict[str, Any]:
        """Return the identity of the samples for checkpoints: counts for people, and a digest of
        every token, mask and kind, and of the examples of each sample."""
        pairs = self._pairs
        sizes = np.array([len(row) for row in self._rows])
        rows = np.array([place for row in self._rows for place in row])
        digest = hashlib.blake2b(
            self.digest().encode() + sizes.tobytes() + rows.tobytes(), digest_size=16
        )
        return {
            "pairs" if pairs.per_example == 2 else "completions": len(self._chosen),
            "tokens": sum(len(pairs.ids[index]) for index in self._completions),
            "learned tokens": sum(int(pairs.loss_mask[i].sum()) for i in self._completions),
            "samples": len(self),
            "seq_length": self._seq_length,
            "digest": digest.hexdigest(),
            RENDERED: self._rendered,
            OBJECTIVE: self._objective,
        }

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return these samples as a batch, for kto with their mismatched ones."""
        pairs = self._pairs
        rows = [
            [
                _Row(pairs.ids[i], pairs.loss_mask[i], pairs.kinds[i], reference)
                for i, reference in self._with_reference(index, self._logps)
            ]
            for index in indices
        ]
        mismatched = None
        if self.shift:
            twins = [
                [
                    _Row(*self._mismatched(number), CHOSEN, reference)
                    for number, (_, reference) in zip(
                        self.numbers(index),
                        self._with_reference(index, self._kl_logps),
                        strict=True,
                    )
                ]
                for index in indices
            ]
            mismatched = self._laid_out(twins)
        return self._laid_out(rows, mismatched)

    def _with_reference(
        self, index: int, logps: NDArray[np.float64] | None
    ) -> Iterator[tuple[int, float]]:
        for number in self.numbers(index):
            yield self._completions[number], 0.0 if logps is None else float(logps[number])

    def _laid_out(self, rows: Sequence[Sequence[_Row]], mismatched: Batch | None = None) -> Batch:
        """Lay the completions of each sample side by side."""
        lengths = [
            [places_of(len(completion.ids), self._method) for completion in row] for row in rows
        ]
        places, positions, documents = side_by_side(lengths, self._seq_length)
        tokens, labels = (np.zeros_like(positions) for _ in range(2))
        completions = np.zeros_like(documents)
        kinds = np.zeros((len(rows), self._width), np.int8)
        references = np.zeros((len(rows), self._width), np.float64)
        likely = np.zeros(positions.shape, np.float32)
        for at, row in enumerate(rows):
            for number, (completion, place) in enumerate(zip(row, places[at], strict=True)):
                tokens[at, place] = completion.ids[: lengths[at][number]]
                # The last token has no label, even where it has a place.
                labels[at, place.start : place.start + len(completion.ids) - 1] = completion.ids[1:]
                if self._method == "reward":
                    completions[at, place.stop - 1] = number + 1
                else:
                    completions[at, place] = (number + 1) * completion.loss_mask[1:]
                if self._likelihood is not None and completion.kind == CHOSEN:
                    likely[at, place] = self._likelihood == "whole" or completion.loss_mask[1:]
                kinds[at, number] = completion.kind
                references[at, number] = completion.reference
        return Batch(
            tokens=sequence_first(tokens),
            labels=sequence_first(labels),
            loss_mask=sequence_first(likely) if self._likelihood is not None else None,
            position_ids=sequence_first(positions),
            document_ids=sequence_first(documents),
            completion_ids=sequence_first(completions),
            completion_kinds=sequence_first(kinds),
            reference_logps=sequence_first(references) if self._logps is not None else None,
            mismatched=mismatched,
        )
