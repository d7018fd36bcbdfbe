"""Compares what the ranks of a run have read with what was written for it: every sample once, the
labels the next tokens, masks and positions as the options say, the parts of a blend by their
weights, and as many samples as the run has.

What a sample has to be comes from ``samples.py``; nothing here comes from the loader."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType

import torch

from megatron_llama.config.batch_ramp import BatchSizes
from megatron_llama.config.blend import Blend, read_blend
from megatron_llama.config.schema import Config
from megatron_llama.data.loader import Batch
from megatron_llama.prove.case import Case
from megatron_llama.prove.compare import Row
from megatron_llama.prove.materials import Materials, parsed_options
from megatron_llama.prove.reference import NotComparedError
from megatron_llama.prove.samples import (
    Expected,
    expected_of,
    samples_of_examples,
    stream_samples,
    trained_examples,
    training_share,
)
from megatron_llama.tune.sft.sft_config import SFTConfig

CHECK = "data"


@dataclass(frozen=True)
class RankReads:
    """What one rank has read in one step."""

    data_rank: int
    microbatches: tuple[Batch, ...]


Reads = Mapping[int, Sequence[RankReads]]
"""By step, from 1: what each rank has read, in the order of the ranks."""


FIELDS: Mapping[str, Callable[[Expected], object]] = MappingProxyType(
    {
        "labels": attrgetter("labels"),
        "loss mask": attrgetter("counts"),
        "positions": attrgetter("positions"),
        "documents": attrgetter("documents"),
    }
)
"""What of a sample follows from its tokens, by what the rows call it."""


@dataclass(frozen=True)
class Read:
    """One sample as a rank has read it."""

    place: int
    """Its place in the global batch."""
    data_rank: int
    found: Expected

    def __str__(self) -> str:
        return f"data rank {self.data_rank}, sample {self.place} of the step"


SamplesRead = Mapping[int, Sequence[Read]]
"""By step: its samples, in the order of the run."""


@dataclass(frozen=True)
class Part:
    """A dataset of a run, which may stand in the blend more than once."""

    documents: Sequence[Sequence[int]]
    """Those of training."""
    samples: Sequence[Expected]
    """In file order."""
    share: float
    """Of all samples of the run."""
    largest: float
    """The largest of its shares, where it stands in the blend more than once."""
    times: int
    """How often it stands in the blend."""


def rows_of_data(reads: Reads, config: Config, materials: Materials, case: Case) -> Iterator[Row]:
    """Compare what a run has read with what was written for it. Raises NotComparedError for what
    nobody here knows."""
    yield from rows_of_reads(reads, config)
    read = samples_of(reads, config)
    # A run that goes back leaves out samples, so that its passes have gaps.
    in_passes = config.training.on_bad_step != "rollback"
    if case.sft:
        length = config.training.seq_length
        if not all(talk.ids for talk in materials.talks):
            raise NotComparedError(
                "the conversations: transformers, which renders a built-in template a second time, "
                "is not installed (pip install transformers)"
            )
        sft = parsed_options(case).get(SFTConfig)
        examples: Sequence[Expected] = trained_examples(materials.talks, sft, length)
        if not materials.valid_talks:
            examples = training_share(examples, config.data.split)
        yield from rows_of_examples(read, examples, in_passes=in_passes)
        a_pass = samples_of_examples(examples, sft, length)
        yield from rows_of_length(read, config, a_pass, a_pass)
        return
    blend = read_blend(config.data.data_path)
    parts = parts_of(blend, config, materials)
    if config.data.megatron_data_order:
        yield from rows_without_order(read, parts, config, materials.eod)
        return
    in_order = config.data.data_order == "sequential" and len(blend.prefixes) == 1
    yield from rows_of_stream(read, parts, in_order=in_order, in_passes=in_passes)
    yield from rows_of_length(read, config, *pass_over(blend, parts, read))


def parts_of(blend: Blend, config: Config, materials: Materials) -> tuple[Part, ...]:
    """The datasets of a run, as they were written."""
    documents = {
        prefix: training_share(materials.documents[prefix], config.data.split)
        for prefix in dict.fromkeys(blend.prefixes)
    }
    samples = {
        prefix: stream_samples(of_prefix, config, materials.eod)
        for prefix, of_prefix in documents.items()
    }
    weights = blend.weights or tuple(len(samples[prefix]) for prefix in blend.prefixes)
    shares: dict[str, list[float]] = {prefix: [] for prefix in documents}
    for prefix, weight in zip(blend.prefixes, weights, strict=True):
        shares[prefix].append(weight / sum(weights))
    return tuple(
        Part(documents[prefix], samples[prefix], sum(of_prefix), max(of_prefix), len(of_prefix))
        for prefix, of_prefix in shares.items()
    )


def pass_over(blend: Blend, parts: Sequence[Part], read: SamplesRead) -> tuple[float, float]:
    """The least and the most samples that a pass may have. Of datasets without weights it is all
    that they have. With weights it ends before some dataset begins again: where one does so among
    the samples that were ``read`` it is known; else that one may be ahead of its weight or
    behind."""
    off = spread(parts) if blend.weights is not None else 0.0
    if off and all(part.times == 1 for part in parts):
        left = Counter(sample.window for part in parts for sample in part.samples)
        windows = (one.found.window for in_step in read.values() for one in in_step)
        for place, window in enumerate(windows):
            left[window] -= 1
            if left[window] < 0:
                return place, place
    least, most = (
        min((len(part.samples) + more) / part.largest for part in parts) for more in (-off, off)
    )
    return least, most


def spread(parts: Sequence[Part]) -> float:
    """By how many samples a dataset may be ahead of its weight, or behind: half of one for every
    time that the datasets of a blend are halved until one is left, and one at least."""
    return max(1.0, math.ceil(math.log2(sum(part.times for part in parts))) / 2)


def rows_of_reads(reads: Reads, config: Config) -> Iterator[Row]:
    """Compare the ranks with each other: those that share samples have read the same, and all
    together as many as a step has, of each of which some label counts. Nothing counts in the places
    that the last step of --epochs leaves empty."""
    sizes = BatchSizes.from_training(config.training)
    consumed = 0
    for step in sorted(reads):
        first: dict[int, RankReads] = {}
        wrong = ""
        for rank, read in enumerate(reads[step]):
            other = first.setdefault(read.data_rank, read)
            if not _same(read, other):
                wrong = wrong or f"rank {rank} has read others than rank 0 of its data rank"
        yield Row(CHECK, "ranks alike", float(bool(wrong)), 0.0, step, note=wrong)
        found = _in_order(reads[step])
        wanted = sizes.places(consumed)
        note = "" if len(found) == wanted else f"{len(found)} samples instead of {wanted}"
        got = abs(len(found) - wanted) / wanted
        yield Row(CHECK, "batch size", got, 0.0, step, note=note)
        samples = sizes.at(consumed)
        odd = [read for read in found if any(read.found.counts) != (read.place < samples)]
        note = "" if not odd else f"{odd[0]}: no label counts"
        if odd and odd[0].place >= samples:
            note = f"{odd[0]}: its labels count, but the step has {samples} samples"
        yield Row(CHECK, "samples that count", len(odd) / wanted, 0.0, step, note=note)
        consumed += samples


def _same(read: RankReads, other: RankReads) -> bool:
    if len(read.microbatches) != len(other.microbatches):
        return False
    tensors = [
        (one.tensors(), two.tensors())
        for one, two in zip(read.microbatches, other.microbatches, strict=True)
    ]
    return all(
        one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
        for one, two in tensors
    )


def samples_of(reads: Reads, config: Config) -> SamplesRead:
    """What was read, sample by sample, in the order of the run, without the places that the last
    step of --epochs leaves empty."""
    sizes = BatchSizes.from_training(config.training)
    found: dict[int, list[Read]] = {}
    consumed = 0
    for step in sorted(reads):
        samples = sizes.at(consumed)
        found[step] = [read for read in _in_order(reads[step]) if read.place < samples]
        consumed += samples
    return found


def _in_order(ranks_read: Sequence[RankReads]) -> list[Read]:
    """What the ranks have read in a step, in the order of the global batch."""
    ranks = {read.data_rank: read for read in reversed(ranks_read)}
    most = max(len(read.microbatches) for read in ranks.values())
    read = [
        (rank, found)
        for number in range(most)
        for rank in sorted(ranks)
        for batch in ranks[rank].microbatches[number : number + 1]
        for found in _rows_of(batch)
    ]
    return [Read(place, rank, found) for place, (rank, found) in enumerate(read)]


def _rows_of(batch: Batch) -> Iterator[Expected]:
    length, samples = batch.tokens.shape
    mask = batch.loss_mask
    positions = batch.position_ids
    documents = batch.document_ids
    places = torch.arange(length).unsqueeze(-1).expand(length, samples)
    columns = (
        batch.tokens,
        batch.labels,
        torch.ones(length, samples, dtype=torch.bool) if mask is None else mask > 0,
        places if positions is None else positions,
        torch.zeros(length, samples) if documents is None else documents,
    )
    for sample in range(samples):
        yield Expected(*(tuple(column[:, sample].tolist()) for column in columns))


def rows_of_stream(
    read: SamplesRead, parts: Sequence[Part], *, in_order: bool = False, in_passes: bool = True
) -> Iterator[Row]:
    """Compare each sample with those that were written, by its tokens, and how many are of each
    dataset with its share. ``in_order``: the run reads them from the first to the last.
    ``in_passes``: a pass over a dataset ends before the next one begins."""
    by_window = {sample.window: sample for part in parts for sample in part.samples}
    by_tokens = {sample.tokens: sample for part in parts for sample in part.samples}
    times: list[tuple[int, ...]] = []
    place = 0
    for step, read_in_step in read.items():
        wrong = dict.fromkeys(("samples", *FIELDS), "")
        if in_order:
            wrong["order"] = ""
        for one in read_in_step:
            # With wrong labels the last one is wrong, too.
            sample = by_window.get(one.found.window, by_tokens.get(one.found.tokens))
            if sample is None:
                wrong["samples"] = wrong["samples"] or f"{one}: no such text was written"
                continue
            times.append(sample.window)
            for name, field in FIELDS.items():
                if field(one.found) != field(sample):
                    wrong[name] = wrong[name] or str(one)
            first = parts[0].samples
            if in_order and sample.window != first[place % len(first)].window:
                wrong["order"] = wrong["order"] or str(one)
            place += 1
        for name, note in wrong.items():
            yield Row(CHECK, name, float(bool(note)), 0.0, step, note=note)
    owned = [{sample.window for sample in part.samples} for part in parts]
    if len(parts) > 1:
        yield from rows_of_blend(read, parts, [own.__contains__ for own in owned], spread(parts))
    for number, part in enumerate(parts):
        of_part = [window for window in times if window in owned[number]]
        windows = [sample.window for sample in part.samples]
        passes = in_passes and part.times == 1
        again = part.times - 1
        yield _once(windows, of_part, f"dataset {number}", in_passes=passes, again=again)


def rows_of_blend(
    read: SamplesRead,
    parts: Sequence[Part],
    is_of: Sequence[Callable[[tuple[int, ...]], bool]],
    most: float,
) -> Iterator[Row]:
    """Compare how many samples have been read of each dataset, up to the end of every step, with
    its share. ``is_of`` says for each whether a window is of it. A dataset may be ``most`` samples
    ahead or behind for every time that it stands in the blend."""
    counts = [0] * len(parts)
    total = unclear = 0
    for step, read_in_step in read.items():
        for one in read_in_step:
            owners = [number for number, owns in enumerate(is_of) if owns(one.found.window)]
            total += 1
            # The same text may have been written twice.
            unclear += len(owners) != 1
            if len(owners) == 1:
                counts[owners[0]] += 1
        behind = [
            abs(count - total * part.share) / part.times
            for count, part in zip(counts, parts, strict=True)
        ]
        bound = most + unclear
        number = behind.index(max(behind))
        note = ""
        if behind[number] > bound:
            wanted = total * parts[number].share
            note = f"{counts[number]} of {total} samples are of dataset {number}, not {wanted:.1f}"
        yield Row(CHECK, "blend", behind[number], bound, step, note=note)


def rows_without_order(
    read: SamplesRead, parts: Sequence[Part], config: Config, eod: int
) -> Iterator[Row]:
    """Look each sample up in the documents that were written, compare it with what follows from its
    own tokens, and see that none comes twice: for an order of documents that is not rebuilt
    here."""
    texts = [Texts(part.documents, config.training.seq_length, eod) for part in parts]
    seen: set[tuple[int, ...]] = set()
    for step, read_in_step in read.items():
        wrong = dict.fromkeys(("samples", *FIELDS, "read once"), "")
        for one in read_in_step:
            window = one.found.window
            # With wrong labels the last one is wrong, too.
            if not any(text.has(window) or text.has(window[:-1]) for text in texts):
                wrong["samples"] = wrong["samples"] or f"{one}: no such text was written"
            expected = expected_of(window, config, eod)
            for name, field in FIELDS.items():
                if field(one.found) != field(expected):
                    wrong[name] = wrong[name] or str(one)
            if window in seen:
                wrong["read once"] = wrong["read once"] or f"{one} was read before"
            seen.add(window)
        for name, note in wrong.items():
            yield Row(CHECK, name, float(bool(note)), 0.0, step, note=note)
    if len(parts) > 1:
        # Megatron takes the next sample of the dataset that is furthest behind, which lets the
        # others fall behind a little more.
        yield from rows_of_blend(read, parts, [text.has for text in texts], spread(parts) + 1)


class Texts:
    """The documents of a dataset, to look up samples that are cut from them in any order."""

    def __init__(self, documents: Sequence[Sequence[int]], length: int, eod: int) -> None:
        """``length``: the tokens of a sample, of which a window has one more."""
        self._eod = eod
        self._whole = {tuple(document) for document in documents}
        self._ends = {each[start:] for each in self._whole for start in range(len(each))}
        self._begins = {each[:stop] for each in self._whole for stop in range(len(each))}
        self._within = {
            each[start : start + count]
            for each in self._whole
            for count in (length, length + 1)
            for start in range(len(each) - count)
        }

    def has(self, window: tuple[int, ...]) -> bool:
        """Whether it is the end of a document, whole ones, and the beginning of one, or lies within
        one."""
        pieces: list[tuple[int, ...]] = []
        start = 0
        for place, token in enumerate(window):
            if token == self._eod:
                pieces.append(window[start : place + 1])
                start = place + 1
        rest = window[start:]
        if not pieces:
            return rest in self._within or rest in self._begins
        whole = all(piece in self._whole for piece in pieces[1:])
        return pieces[0] in self._ends and whole and rest in self._begins


def rows_of_examples(
    read: SamplesRead, examples: Sequence[Expected], *, in_passes: bool = True
) -> Iterator[Row]:
    """Compare each example of each sample with the conversation that has its tokens. What follows
    the last one is padding, of which nothing may count."""
    by_window = {example.window: example for example in examples}
    by_tokens = {example.tokens: example for example in examples}
    times: list[tuple[int, ...]] = []
    for step, read_in_step in read.items():
        wrong = dict.fromkeys(("examples", "labels", "loss mask", "positions"), "")
        for one in read_in_step:
            for part in _documents_of(one.found):
                example = by_window.get(part.window, by_tokens.get(part.tokens))
                if example is None:
                    if any(part.counts):
                        wrong["examples"] = wrong["examples"] or f"{one}: no such conversation"
                    continue
                times.append(example.window)
                for name in ("labels", "loss mask", "positions"):
                    if FIELDS[name](part) != FIELDS[name](example):
                        wrong[name] = wrong[name] or str(one)
        for name, note in wrong.items():
            yield Row(CHECK, name, float(bool(note)), 0.0, step, note=note)
    windows = [example.window for example in examples]
    yield _once(windows, times, "the conversations", in_passes=in_passes)


def rows_of_length(read: SamplesRead, config: Config, least: float, most: float) -> Iterator[Row]:
    """Compare the samples of a run of --epochs with those of so many passes, each of which has
    ``least`` to ``most``."""
    training = config.training
    # A run that goes back says what it leaves out, which is not known here.
    if not training.epochs or training.on_bad_step == "rollback":
        return
    found = training.train_samples
    if max(read) >= training.train_iters:
        found = sum(any(one.found.counts) for in_step in read.values() for one in in_step)
    wanted = max(1, round(training.epochs * (least + most) / 2))
    bound = training.epochs * (most - least) / 2 + 2 * (most > least)
    note = "" if abs(found - wanted) <= bound else f"{found} samples instead of {wanted}"
    yield Row(CHECK, "samples of the run", float(abs(found - wanted)), bound, note=note)


def _documents_of(sample: Expected) -> Iterator[Expected]:
    start = 0
    for stop in range(1, len(sample.documents) + 1):
        ends = stop == len(sample.documents) or sample.documents[stop] != sample.documents[start]
        if ends:
            yield Expected(
                sample.tokens[start:stop],
                sample.labels[start:stop],
                sample.counts[start:stop],
                sample.positions[start:stop],
                (0,) * (stop - start),
            )
            start = stop


def _once(
    keys: Sequence[tuple[int, ...]],
    read: Sequence[tuple[int, ...]],
    of: str,
    *,
    in_passes: bool,
    again: int = 0,
) -> Row:
    """Whether a pass over the samples ends before one of them comes again. ``read`` holds what was
    read, in the order of the run. Where it is no order of passes it is seen in the end: how often
    they were read differs by one at most, by more where ``again`` other passes go over the same
    samples. Equal samples are counted together."""
    written = Counter(keys)
    for start in range(0, len(read) if in_passes else 0, len(keys)):
        if Counter(read[start : start + len(keys)]) - written:
            number = start // len(keys) + 1
            note = f"{of}: one of {len(keys)} was read again before pass {number} had ended"
            return Row(CHECK, "read once", 1.0, 0.0, note=note)
    times = Counter(read)
    least = len(read) // len(keys) - again
    most = -(-len(read) // len(keys)) + again
    for key, copies in written.items():
        if not least * copies <= times[key] <= most * copies:
            note = f"{of}: one of {len(keys)} was read {times[key]} times, of {len(read)} in all"
            return Row(CHECK, "read once", 1.0, 0.0, note=note)
    return Row(CHECK, "read once", 0.0, 0.0)
