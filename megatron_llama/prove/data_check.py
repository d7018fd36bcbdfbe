"""Compares what the ranks of a run have read with what was written for it: every sample once, the
labels the next tokens, masks and positions as the options say.

Nothing here comes from the loader: samples are cut from the documents, and examples are known from
the conversations, as they were written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import TypeVar

import torch

from megatron_llama.config.batch_ramp import BatchSizes
from megatron_llama.config.blend import read_blend
from megatron_llama.config.schema import Config
from megatron_llama.data.loader import Batch
from megatron_llama.prove.case import Case
from megatron_llama.prove.compare import Row
from megatron_llama.prove.materials import Materials, Talk

CHECK = "data"


@dataclass(frozen=True)
class RankReads:
    """What one rank has read in one step."""

    data_rank: int
    microbatches: tuple[Batch, ...]


Reads = Mapping[int, Sequence[RankReads]]
"""By step, from 1: what each rank has read, in the order of the ranks."""


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

    step: int
    place: int
    """Its place in the global batch."""
    data_rank: int
    found: Expected


def rows_of_data(reads: Reads, config: Config, materials: Materials, case: Case) -> Iterator[Row]:
    """Compare what a run has read with what was written for it."""
    yield from rows_of_reads(reads, config)
    if case.sft:
        talks: Sequence[Talk] = materials.talks
        if not materials.valid_talks:
            talks = _training_share(talks, config)
        # A built-in template has made the tokens, so they are not known.
        if all(talk.ids for talk in talks):
            yield from rows_of_examples(reads, _examples(talks, config, case))
        return
    if config.data.megatron_data_order:
        yield from rows_without_order(reads, config, materials.eod)
        return
    prefixes = read_blend(config.data.data_path).prefixes
    parts = [
        stream_samples(_training_share(documents, config), config, materials.eod)
        for documents in materials.documents.values()
    ]
    in_order = config.data.data_order == "sequential" and len(prefixes) == 1
    again = len(prefixes) - len(parts)
    yield from rows_of_stream(reads, parts, in_order=in_order, again=again)


T = TypeVar("T")


def _training_share(everything: Sequence[T], config: Config) -> Sequence[T]:
    weights = [float(weight) for weight in config.data.split.split(",")]
    return everything[: round(len(everything) * weights[0] / sum(weights))]


def _examples(talks: Sequence[Talk], config: Config, case: Case) -> tuple[Expected, ...]:
    """The conversations that are trained, as --loss-on and --on-long-sample say."""
    length = config.training.seq_length
    loss_on = case.options.get("loss_on", "assistant")
    found = []
    for talk in talks:
        if case.options.get("on_long_sample") == "drop" and len(talk.ids) > length + 1:
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


def example_of(ids: Sequence[int], answers: Sequence[bool], length: int) -> Expected:
    """A conversation, cut to what a sample holds, of which only the answers count."""
    ids = tuple(int(token) for token in ids[: length + 1])
    places = len(ids) - 1
    counts = tuple(bool(answer) for answer in answers[1 : length + 1])
    return Expected(ids[:-1], ids[1:], counts, tuple(range(places)), (0,) * places)


def rows_of_reads(reads: Reads, config: Config) -> Iterator[Row]:
    """Compare the ranks with each other: those that share samples have read the same, and all
    together as many as a step has."""
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
        found = sum(batch.tokens.shape[1] for read in first.values() for batch in read.microbatches)
        wanted = sizes.places(consumed)
        note = "" if found == wanted else f"{found} samples instead of {wanted}"
        yield Row(CHECK, "batch size", abs(found - wanted) / wanted, 0.0, step, note=note)
        consumed += sizes.at(consumed)


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


def samples_of(reads: Reads) -> Iterator[Read]:
    """What was read, sample by sample, in the order of the run. Places that the last step of
    --epochs leaves empty, where no label counts, are left out."""
    for step in sorted(reads):
        ranks = {read.data_rank: read for read in reversed(reads[step])}
        place = 0
        for microbatches in zip(*(ranks[rank].microbatches for rank in sorted(ranks)), strict=True):
            for rank, batch in zip(sorted(ranks), microbatches, strict=True):
                for found in _rows_of(batch):
                    if any(found.counts):
                        yield Read(step, place, rank, found)
                    place += 1


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
    reads: Reads, parts: Sequence[Sequence[Expected]], *, in_order: bool = False, again: int = 0
) -> Iterator[Row]:
    """Compare each sample with those that were written, by its tokens. ``parts``: the samples of
    each dataset. ``in_order``: the run reads them from the first to the last. ``again``: how many
    datasets stand in the blend a second time."""
    by_window = {sample.window: sample for part in parts for sample in part}
    by_tokens = {sample.tokens: sample for part in parts for sample in part}
    times: Counter[tuple[int, ...]] = Counter()
    place = 0
    for step, read_in_step in _by_step(reads):
        wrong = dict.fromkeys(("samples", *FIELDS), "")
        if in_order:
            wrong["order"] = ""
        for read in read_in_step:
            where = f"data rank {read.data_rank}, sample {read.place} of the step"
            # With wrong labels the last one is wrong, too.
            sample = by_window.get(read.found.window, by_tokens.get(read.found.tokens))
            if sample is None:
                wrong["samples"] = wrong["samples"] or f"{where}: no such text was written"
                continue
            times[sample.window] += 1
            for name, field in FIELDS.items():
                if field(read.found) != field(sample):
                    wrong[name] = wrong[name] or where
            if in_order and sample.window != parts[0][place % len(parts[0])].window:
                wrong["order"] = wrong["order"] or where
            place += 1
        for name, note in wrong.items():
            yield Row(CHECK, name, float(bool(note)), 0.0, step, note=note)
    for number, part in enumerate(parts):
        windows = [sample.window for sample in part]
        yield _once(windows, times, f"dataset {number}", again)


def rows_without_order(reads: Reads, config: Config, eod: int) -> Iterator[Row]:
    """Compare each sample with what follows from its own tokens, and see that none comes twice:
    for an order of documents that is not rebuilt here."""
    seen: set[tuple[int, ...]] = set()
    for step, read_in_step in _by_step(reads):
        wrong = dict.fromkeys((*FIELDS, "read once"), "")
        for read in read_in_step:
            where = f"data rank {read.data_rank}, sample {read.place} of the step"
            expected = expected_of(read.found.window, config, eod)
            for name, field in FIELDS.items():
                if field(read.found) != field(expected):
                    wrong[name] = wrong[name] or where
            if read.found.window in seen:
                wrong["read once"] = wrong["read once"] or f"{where} was read before"
            seen.add(read.found.window)
        for name, note in wrong.items():
            yield Row(CHECK, name, float(bool(note)), 0.0, step, note=note)


def rows_of_examples(reads: Reads, examples: Sequence[Expected]) -> Iterator[Row]:
    """Compare each example of each sample with the conversation that has its tokens. What follows
    the last one is padding, of which nothing may count."""
    by_window = {example.window: example for example in examples}
    by_tokens = {example.tokens: example for example in examples}
    times: Counter[tuple[int, ...]] = Counter()
    for step, read_in_step in _by_step(reads):
        wrong = dict.fromkeys(("examples", "labels", "loss mask", "positions"), "")
        for read in read_in_step:
            where = f"data rank {read.data_rank}, sample {read.place} of the step"
            for part in _documents_of(read.found):
                example = by_window.get(part.window, by_tokens.get(part.tokens))
                if example is None:
                    if any(part.counts):
                        wrong["examples"] = wrong["examples"] or f"{where}: no such conversation"
                    continue
                times[example.window] += 1
                for name in ("labels", "loss mask", "positions"):
                    if FIELDS[name](part) != FIELDS[name](example):
                        wrong[name] = wrong[name] or where
        for name, note in wrong.items():
            yield Row(CHECK, name, float(bool(note)), 0.0, step, note=note)
    yield _once([example.window for example in examples], times, "the conversations")


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


def _by_step(reads: Reads) -> Iterator[tuple[int, list[Read]]]:
    found: dict[int, list[Read]] = {step: [] for step in sorted(reads)}
    for read in samples_of(reads):
        found[read.step].append(read)
    yield from found.items()


def _once(
    keys: Sequence[tuple[int, ...]], times: Counter[tuple[int, ...]], of: str, again: int = 0
) -> Row:
    """Whether a pass over the samples ends before one of them comes again: how often they were
    read differs by one at most, by more where ``again`` other passes go over the same samples.
    Equal samples are counted together."""
    written = Counter(keys)
    read = sum(times[key] for key in written)
    least = read // len(keys) - again
    most = -(-read // len(keys)) + again
    for key, copies in written.items():
        if not least * copies <= times[key] <= most * copies:
            note = (
                f"{of}: one of {len(keys)} was read {times[key]} times, when {read} had been read"
            )
            return Row(CHECK, "read once", 1.0, 0.0, note=note)
    return Row(CHECK, "read once", 0.0, 0.0)
