"""Compares the samples that the ranks of a run have read with those that were written for it: every
sample comes once, labels are the next tokens, masks and positions follow the options, datasets of a
blend follow their weights, and the run has the right number of samples.

``samples.py`` says what a sample has to be. Nothing here comes from the loader."""

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
    """The microbatches that one rank has read in one step."""

    data_rank: int
    microbatches: tuple[Batch, ...]


Reads = Mapping[int, Sequence[RankReads]]
"""Reads of each rank in the order of ranks, by step from 1."""


FIELDS: Mapping[str, Callable[[Expected], object]] = MappingProxyType(
    {
        "labels": attrgetter("labels"),
        "loss mask": attrgetter("counts"),
        "positions": attrgetter("positions"),
        "documents": attrgetter("documents"),
    }
)
"""Fields of a sample that follow from its tokens, by their names in rows."""


@dataclass(frozen=True)
class Read:
    """One sample as a rank has read it."""

    place: int
    """Place in the global batch."""
    data_rank: int
    found: Expected

    def __str__(self) -> str:
        return f"data rank {self.data_rank}, sample {self.place} of the step"


SamplesRead = Mapping[int, Sequence[Read]]
"""Samples by step, in the order of the run."""


@dataclass(frozen=True)
class Part:
    """A dataset of a run, which may stand in the blend more than once."""

    documents: Sequence[Sequence[int]]
    """Documents for training."""
    samples: Sequence[Expected]
    """Samples in file order."""
    share: float
    """Share of all samples of the run."""
    largest: float
    """The largest share of one entry, if the blend has several entries of the dataset."""
    times: int
    """Number of entries in the blend."""


def rows_of_data(reads: Reads, config: Config, materials: Materials, case: Case) -> Iterator[Row]:
    """Yield the comparison of the samples that a run has read with those that were written. Raises
    NotComparedError if the samples are not known here."""
    yield from rows_of_reads(reads, config)
    read = samples_of(reads, config)
    # A run that goes back leaves out samples, so its passes have gaps.
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
    """Return the datasets of a run, as they were written."""
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
    """Return bounds on the samples of one pass. They are exact without weights, or if a repeat is
    among the samples ``read``: with weights a pass ends before a dataset begins again. Otherwise
    each dataset may be ahead of its weight or behind by ``spread``."""
    off = spread(parts) if blend.weights is not None else 0.0
    if off and all(dataset.times == 1 for dataset in parts):
        unread = Counter(sample.window for dataset in parts for sample in dataset.samples)
        windows = (sample_read.found.window for in_step in read.values() for sample_read in in_step)
        for place, window in enumerate(windows):
            unread[window] -= 1
            if unread[window] < 0:
                return place, place
    least, most = (
        min((len(dataset.samples) + more) / dataset.largest for dataset in parts)
        for more in (-off, off)
    )
    return least, most


def spread(parts: Sequence[Part]) -> float:
    """Return the samples by which a dataset may be ahead of its weight, or behind: half of
    ceil(log2(n)) in a blend of n entries, but at least 1."""
    return max(1.0, math.ceil(math.log2(sum(dataset.times for dataset in parts))) / 2)


def rows_of_reads(reads: Reads, config: Config) -> Iterator[Row]:
    """Yield the comparison of the ranks with each other. Ranks that share samples have read the
    same, and all together have read as many samples as a step has. Each sample has a label that
    counts. No label counts in the places that the last step of --epochs leaves empty."""
    sizes = BatchSizes.from_training(config.training)
    consumed = 0
    for step in sorted(reads):
        first: dict[int, RankReads] = {}
        wrong = ""
        for rank, read in enumerate(reads[step]):
            first_read = first.setdefault(read.data_rank, read)
            if not _same(read, first_read):
                wrong = wrong or f"rank {rank} has read others than rank 0 of its data rank"
        yield Row(CHECK, "ranks alike", float(bool(wrong)), 0.0, step, note=wrong)
        in_order = _in_order(reads[step])
        wanted = sizes.places(consumed)
        note = "" if len(in_order) == wanted else f"{len(in_order)} samples instead of {wanted}"
        got = abs(len(in_order) - wanted) / wanted
        yield Row(CHECK, "batch size", got, 0.0, step, note=note)
        samples = sizes.at(consumed)
        odd = [read for read in in_order if any(read.found.counts) != (read.place < samples)]
        note = "" if not odd else f"{odd[0]}: no label counts"
        if odd and odd[0].place >= samples:
            note = f"{odd[0]}: its labels count, but the step has {samples} samples"
        yield Row(CHECK, "samples that count", len(odd) / wanted, 0.0, step, note=note)
        consumed += samples


def _same(read: RankReads, other: RankReads) -> bool:
    if len(read.microbatches) != len(other.microbatches):
        return False
    pairs = [
        (batch.tensors(), other_batch.tensors())
        for batch, other_batch in zip(read.microbatches, other.microbatches, strict=True)
    ]
    return all(
        tensors.keys() == others.keys()
        and all(torch.equal(tensors[name], others[name]) for name in tensors)
        for tensors, others in pairs
    )


def samples_of(reads: Reads, config: Config) -> SamplesRead:
    """Return the samples that were read by step, in the order of the run, without the places that
    the last step of --epochs leaves empty."""
    sizes = BatchSizes.from_training(config.training)
    by_step: dict[int, list[Read]] = {}
    consumed = 0
    for step in sorted(reads):
        samples = sizes.at(consumed)
        by_step[step] = [read for read in _in_order(reads[step]) if read.place < samples]
        consumed += samples
    return by_step


def _in_order(ranks_read: Sequence[RankReads]) -> list[Read]:
    """Return the samples that the ranks have read in a step, in the order of the global batch."""
    ranks = {read.data_rank: read for read in reversed(ranks_read)}
    most = max(len(read.microbatches) for read in ranks.values())
    read = [
        (rank, sample)
        for number in range(most)
        for rank in sorted(ranks)
        for batch in ranks[rank].microbatches[number : number + 1]
        for sample in _rows_of(batch)
    ]
    return [Read(place, rank, sample) for place, (rank, sample) in enumerate(read)]


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
    """Yield the comparison of each sample with the written sample that has its tokens, and of the
    samples of each dataset with its share. ``in_order`` says that the run reads samples in file
    order, ``in_passes`` that a pass over a dataset ends before the next one begins."""
    by_window = {sample.window: sample for dataset in parts for sample in dataset.samples}
    by_tokens = {sample.tokens: sample for dataset in parts for sample in dataset.samples}
    times: list[tuple[int, ...]] = []
    place = 0
    for step, read_in_step in read.items():
        wrong = dict.fromkeys(("samples", *FIELDS), "")
        if in_order:
            wrong["order"] = ""
        for reading in read_in_step:
            # A window ends with the last label. If that is wrong, the tokens still match.
            sample = by_window.get(reading.found.window, by_tokens.get(reading.found.tokens))
            if sample is None:
                wrong["samples"] = wrong["samples"] or f"{reading}: no such text was written"
                continue
            times.append(sample.window)
            for name, field in FIELDS.items():
                if field(reading.found) != field(sample):
                    wrong[name] = wrong[name] or str(reading)
            first = parts[0].samples
            if in_order and sample.window != first[place % len(first)].window:
                wrong["order"] = wrong["order"] or str(reading)
            place += 1
        for name, note in wrong.items():
            yield Row(CHECK, name, float(bool(note)), 0.0, step, note=note)
    owned = [{sample.window for sample in dataset.samples} for dataset in parts]
    if len(parts) > 1:
        yield from rows_of_blend(read, parts, [own.__contains__ for own in owned], spread(parts))
    for number, dataset in enumerate(parts):
        of_part = [window for window in times if window in owned[number]]
        windows = [sample.window for sample in dataset.samples]
        passes = in_passes and dataset.times == 1
        again = dataset.times - 1
        yield _once(windows, of_part, f"dataset {number}", in_passes=passes, again=again)


def rows_of_blend(
    read: SamplesRead,
    parts: Sequence[Part],
    is_of: Sequence[Callable[[tuple[int, ...]], bool]],
    most: float,
) -> Iterator[Row]:
    """Yield for each step the comparison of the samples read so far of each dataset with its share.
    ``is_of`` has a function for each dataset that says whether a window is of it. A dataset may be
    ``most`` samples ahead or behind for each of its entries in the blend."""
    counts = [0] * len(parts)
    total = unclear = 0
    for step, read_in_step in read.items():
        for sample_read in read_in_step:
            owners = [number for number, owns in enumerate(is_of) if owns(sample_read.found.window)]
            total += 1
            # The same text may have been written twice.
            unclear += len(owners) != 1
            if len(owners) == 1:
                counts[owners[0]] += 1
        behind = [
            abs(count - total * dataset.share) / dataset.times
            for count, dataset in zip(counts, parts, strict=True)
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
    """Yield rows for an order of documents that is not rebuilt here: each sample is in the written
    documents, has the fields that follow from its own tokens, and does not come twice."""
    texts = [Texts(dataset.documents, config.training.seq_length, eod) for dataset in parts]
    seen: set[tuple[int, ...]] = set()
    for step, read_in_step in read.items():
        wrong = dict.fromkeys(("samples", *FIELDS, "read once"), "")
        for sample_read in read_in_step:
            window = sample_read.found.window
            # A window ends with the last label, which may be wrong while the tokens are right.
            if not any(text.has(window) or text.has(window[:-1]) for text in texts):
                wrong["samples"] = wrong["samples"] or f"{sample_read}: no such text was written"
            expected = expected_of(window, config, eod)
            for name, field in FIELDS.items():
                if field(sample_read.found) != field(expected):
                    wrong[name] = wrong[name] or str(sample_read)
            if window in seen:
                wrong["read once"] = wrong["read once"] or f"{sample_read} was read before"
            seen.add(window)
        for name, note in wrong.items():
            yield Row(CHECK, name, float(bool(note)), 0.0, step, note=note)
    if len(parts) > 1:
        # Megatron takes the next sample from the dataset that is furthest behind. The others can
        # fall behind a little more.
        yield from rows_of_blend(read, parts, [text.has for text in texts], spread(parts) + 1)


class Texts:
    """The documents of a dataset, for looking up samples that are cut from them in any order."""

    def __init__(self, documents: Sequence[Sequence[int]], length: int, eod: int) -> None:
        """``length`` is the tokens of a sample; a window has one more."""
        self._eod = eod
        self._whole = {tuple(document) for document in documents}
        self._ends = {text[start:] for text in self._whole for start in range(len(text))}
        self._begins = {text[:stop] for text in self._whole for stop in range(len(text))}
        self._within = {
            text[start : start + count]
            for text in self._whole
            for count in (length, length + 1)
            for start in range(len(text) - count)
        }

    def has(self, window: tuple[int, ...]) -> bool:
        """Whether a window lies within one document, or consists of the end of a document, whole
        documents, and the beginning of a document."""
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
    """Yield the comparison of each example of each sample with the conversation that has its
    tokens. After the last example comes padding, which may not count."""
    by_window = {example.window: example for example in examples}
    by_tokens = {example.tokens: example for example in examples}
    times: list[tuple[int, ...]] = []
    for step, read_in_step in read.items():
        wrong = dict.fromkeys(("examples", "labels", "loss mask", "positions"), "")
        for sample in read_in_step:
            for document in _documents_of(sample.found):
                example = by_window.get(document.window, by_tokens.get(document.tokens))
                if example is None:
                    if any(document.counts):
                        wrong["examples"] = wrong["examples"] or f"{sample}: no such conversation"
                    continue
                times.append(example.window)
                for name in ("labels", "loss mask", "positions"):
                    if FIELDS[name](document) != FIELDS[name](example):
                        wrong[name] = wrong[name] or str(sample)
        for name, note in wrong.items():
            yield Row(CHECK, name, float(bool(note)), 0.0, step, note=note)
    windows = [example.window for example in examples]
    yield _once(windows, times, "the conversations", in_passes=in_passes)


def rows_of_length(read: SamplesRead, config: Config, least: float, most: float) -> Iterator[Row]:
    """Yield the comparison of the samples of a run of --epochs with those of its passes, each of
    ``least`` to ``most`` samples."""
    training = config.training
    # The samples that a run leaves out when it goes back are not known here.
    if not training.epochs or training.on_bad_step == "rollback":
        return
    samples = training.train_samples
    if max(read) >= training.train_iters:
        samples = sum(any(sample.found.counts) for in_step in read.values() for sample in in_step)
    wanted = max(1, round(training.epochs * (least + most) / 2))
    bound = training.epochs * (most - least) / 2 + 2 * (most > least)
    note = "" if abs(samples - wanted) <= bound else f"{samples} samples instead of {wanted}"
    yield Row(CHECK, "samples of the run", float(abs(samples - wanted)), bound, note=note)


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
    """Return the row that says whether a pass over the samples ``keys`` ends before one comes
    again. ``read`` has the samples in the order of the run. Without ``in_passes`` only the counts
    in the end are compared: they differ by one at most, or by more if ``again`` other passes go
    over the same samples. Equal samples are counted together."""
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
