"""What ranks have read is right as it was written, and each way to read it wrongly is found by its own row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from megatron_llama.config.blend import read_blend
from megatron_llama.config.schema import Config, DataConfig, TrainingConfig
from megatron_llama.data.loader import Batch
from megatron_llama.prove.compare import Row
from megatron_llama.prove.data_check import (
    Part,
    RankReads,
    Reads,
    parts_of,
    rows_of_examples,
    rows_of_length,
    rows_of_reads,
    rows_of_stream,
    rows_without_order,
    samples_of,
)
from megatron_llama.prove.materials import Materials
from megatron_llama.prove.samples import Expected, example_of, stream_samples

from tests.launcher import ROOT

EOD, LENGTH = 99, 8
CONFIG = Config(
    training=TrainingConfig(seq_length=LENGTH, global_batch_size=4, train_iters=2),
    data=DataConfig(reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True),
)
DOCUMENTS = [[10 * number + place for place in range(length)] + [EOD] for number, length in enumerate((5, 3, 11, 7, 2, 13, 6, 9, 4, 12, 5))]
SAMPLES = stream_samples(DOCUMENTS, CONFIG, EOD)
WHOLE = Part(DOCUMENTS, SAMPLES, share=1.0, largest=1.0, times=1)
ORDER = (6, 1, 3, 0, 7, 2, 5, 4)
Change = Callable[[list[list[Batch]]], None]


def batch_of(samples: list[Expected]) -> Batch:
    def columns(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(sample, name) for sample in samples]).to(dtype).t().contiguous()

    return Batch(
        columns("tokens", torch.int64),
        columns("labels", torch.int64),
        columns("counts", torch.float32),
        columns("positions", torch.int64),
        columns("documents", torch.int32),
    )


def reads(change: Change | None = None, order: tuple[int, ...] = ORDER) -> Reads:
    """Two steps of four samples, on two data ranks of two ranks each, one sample in a microbatch."""
    found = {}
    for step in (1, 2):
        ranks = []
        for rank in range(4):
            places = [4 * (step - 1) + 2 * microbatch + rank // 2 for microbatch in range(2)]
            ranks.append([batch_of([SAMPLES[order[place]]]) for place in places])
        if change is not None and step == 2:
            change(ranks)
        found[step] = [RankReads(rank // 2, tuple(batches)) for rank, batches in enumerate(ranks)]
    return found


def everything(found: Reads) -> list[Row]:
    return [*rows_of_reads(found, CONFIG), *rows_of_stream(samples_of(found, CONFIG), [WHOLE])]


def test_samples_are_cut_with_one_token_in_common_and_masks_by_the_end_tokens() -> None:
    assert len(SAMPLES) == (sum(map(len, DOCUMENTS)) - 1) // LENGTH
    first, second = SAMPLES[:2]
    assert first.window == (0, 1, 2, 3, 4, EOD, 10, 11, 12) and second.tokens[0] == first.labels[-1]
    assert first.counts == (True,) * 5 + (False, True, True)
    assert first.positions == (0, 1, 2, 3, 4, 5, 0, 1) and first.documents == (0, 0, 0, 0, 0, 0, 1, 1)


def test_what_is_right_holds() -> None:
    rows = everything(reads())
    assert all(row.holds for row in rows), [row for row in rows if not row.holds]
    compared = {"ranks alike", "batch size", "samples that count", "samples", "labels", "loss mask", "positions", "documents", "read once"}
    assert {row.what for row in rows} >= compared
    in_order = reads(order=tuple(range(8)))
    assert all(row.holds for row in rows_of_stream(samples_of(in_order, CONFIG), [WHOLE], in_order=True))
    shuffled = rows_of_stream(samples_of(reads(), CONFIG), [WHOLE], in_order=True)
    assert "order" in {row.what for row in shuffled if not row.holds}


def replaced(**fields: Callable[[Batch], torch.Tensor]) -> Change:
    """On both ranks of the second data rank, in the first microbatch."""

    def change(ranks: list[list[Batch]]) -> None:
        for rank in (2, 3):
            batch = ranks[rank][0]
            ranks[rank][0] = replace(batch, **{name: of(batch) for name, of in fields.items()})  # type: ignore[arg-type]

    return change


def of_the_other_data_rank(ranks: list[list[Batch]]) -> None:
    ranks[2:] = ranks[:2]


def on_one_rank_alone(ranks: list[list[Batch]]) -> None:
    ranks[3] = ranks[1]


def without_the_last(ranks: list[list[Batch]]) -> None:
    for batches in ranks:
        batches.pop()


def other_text(batch: Batch) -> torch.Tensor:
    return torch.where(batch.tokens == EOD, batch.tokens, batch.tokens + 500)


WRONG: list[tuple[Change, str]] = [
    (of_the_other_data_rank, "read once"),
    (on_one_rank_alone, "ranks alike"),
    (without_the_last, "batch size"),
    (replaced(tokens=other_text), "samples"),
    (replaced(labels=lambda batch: batch.tokens), "labels"),
    (replaced(loss_mask=lambda batch: torch.ones_like(batch.tokens, dtype=torch.float32)), "loss mask"),
    (replaced(position_ids=lambda batch: torch.arange(LENGTH).unsqueeze(-1)), "positions"),
    (replaced(document_ids=lambda batch: torch.zeros(LENGTH, 1, dtype=torch.int32)), "documents"),
    (replaced(loss_mask=lambda batch: torch.zeros(LENGTH, 1)), "samples that count"),
]


def test_each_wrong_read_is_found_in_its_step() -> None:
    for change, kind in WRONG:
        wrong = [row for row in everything(reads(change)) if not row.holds]
        assert kind in {row.what for row in wrong}, wrong
        assert {row.step for row in wrong} <= {2, None} and all(row.note for row in wrong)
        if kind not in ("read once", "ranks alike", "batch size", "samples that count"):
            assert {row.what for row in wrong} <= {kind, "read once"}, "nothing else is called wrong"


def without_order(change: Change | None = None) -> list[Row]:
    return list(rows_without_order(samples_of(reads(change), CONFIG), [WHOLE], CONFIG, EOD))


def half_of_another(batch: Batch) -> torch.Tensor:
    """A sample whose second half is that of another one."""
    return torch.cat([batch.tokens[:4], torch.tensor(SAMPLES[7].tokens[4:]).unsqueeze(-1)])


def test_an_order_that_is_not_rebuilt() -> None:
    assert all(row.holds for row in without_order())
    for change, kind in (
        (of_the_other_data_rank, "read once"),
        (replaced(labels=lambda batch: batch.tokens), "labels"),
        (replaced(tokens=other_text), "samples"),
        (replaced(tokens=half_of_another), "samples"),
    ):
        assert kind in {row.what for row in without_order(change) if not row.holds}


def test_a_second_pass_begins_when_the_first_is_over() -> None:
    few = replace(WHOLE, samples=SAMPLES[:4])
    early = samples_of(reads(order=(2, 0, 3, 3, 1, 2, 0, 1)), CONFIG)
    assert all(row.holds for row in rows_of_stream(samples_of(reads(order=(2, 0, 3, 1, 1, 2, 0, 3)), CONFIG), [few]))
    (wrong,) = [row for row in rows_of_stream(early, [few]) if not row.holds]
    assert "one of 4 was read again before pass 1 had ended" in wrong.note
    # Where a run goes back, samples are missing: only the counts of all passes are known.
    assert all(row.holds for row in rows_of_stream(early, [few], in_passes=False))
    thrice = samples_of(reads(order=(2, 0, 3, 3, 1, 2, 0, 2)), CONFIG)
    assert not all(row.holds for row in rows_of_stream(thrice, [few], in_passes=False))


def ends_in_a_part_of_a_step(ranks: list[list[Batch]]) -> None:
    """One of the four samples of the second step is left."""
    for place, batches in ((1, ranks[0]), (1, ranks[1]), (0, ranks[2]), (1, ranks[2]), (0, ranks[3]), (1, ranks[3])):
        batches[place] = replace(batches[place], loss_mask=torch.zeros(LENGTH, 1))


def in_passes(epochs: float, samples: int, steps: int = 2) -> Config:
    return replace(CONFIG, training=replace(CONFIG.training, epochs=epochs, train_samples=samples, train_iters=steps))


def length_rows(config: Config, found: Reads, least: float, most: float) -> list[Row]:
    return list(rows_of_length(samples_of(found, config), config, least, most))


def test_the_last_step_of_passes_has_what_is_left() -> None:
    config = in_passes(0.5, 5)
    right = reads(ends_in_a_part_of_a_step)
    rows = [*rows_of_reads(right, config), *rows_of_stream(samples_of(right, config), [WHOLE]), *length_rows(config, right, 10, 10)]
    assert all(row.holds for row in rows), [row for row in rows if not row.holds]
    for found, told in ((reads(), "sample 1 of the step: its labels count, but the step has 1 samples"), (right, "")):
        (wrong,) = [row for row in rows_of_reads(found, config) if row.what == "samples that count" and row.step == 2]
        assert told in wrong.note and wrong.holds == (told == "")


@pytest.mark.parametrize(
    ("config", "wanted"),
    [(in_passes(0.5, 8), 6), (in_passes(1.6, 20, steps=5), 24), (in_passes(1.0, 4, steps=1), 8)],
    ids=["it goes on", "it would not go on", "its last step is missing"],
)
def test_a_run_that_does_not_end_after_its_passes_is_found(config: Config, wanted: int) -> None:
    found = reads() if config.training.train_iters > 1 else {1: reads()[1]}
    a_pass = wanted / config.training.epochs
    (row,) = length_rows(config, found, a_pass, a_pass)
    assert not row.holds and f"instead of {wanted}" in row.note
    assert all(row.holds for row in length_rows(config, found, a_pass - 8, a_pass + 8)), "within what weights allow"


PARTS = tuple([[token + 100 * part for token in document[:-1]] + [EOD] for document in DOCUMENTS] for part in range(3))


def blend_rows(paths: tuple[str, ...], order: tuple[int, ...]) -> list[Row]:
    """What is said of the blend where the samples are those of parts ``order``, one after the other."""
    config = replace(CONFIG, data=replace(CONFIG.data, data_path=paths, split="1"))
    documents = {name: tuple(map(tuple, PARTS[number])) for number, name in enumerate("abc") if name in paths}
    written = Materials({}, ROOT, ROOT, 400, EOD, documents)
    parts = parts_of(read_blend(paths), config, written)
    numbers = [0] * len(parts)
    batches = []
    for part in order:
        batches.append(batch_of([parts[part].samples[numbers[part]]]))
        numbers[part] += 1
    found = {step: [RankReads(0, tuple(batches[4 * step - 4 : 4 * step]))] for step in (1, 2)}
    return [row for row in rows_of_stream(samples_of(found, config), parts) if not row.holds]


BLENDS = {
    "weights": (("3", "a", "1", "b"), (0, 0, 1, 0, 0, 1, 0, 0), (0, 1, 0, 1, 0, 1, 0, 1)),
    "all that they have": (("a", "b"), (0, 1, 0, 1, 1, 0, 1, 0), (0, 0, 0, 0, 0, 0, 1, 0)),
    "one of them twice": (("2", "a", "1", "b", "1", "a"), (0, 0, 1, 0, 0, 0, 1, 0), (0, 1, 1, 0, 1, 0, 1, 1)),
}


def test_the_parts_of_a_blend_are_counted() -> None:
    for name, (paths, right, wrong) in BLENDS.items():
        assert not blend_rows(paths, right), name
        found = blend_rows(paths, wrong)
        assert {row.what for row in found} == {"blend"} and all("samples are of dataset" in row.note for row in found), name


TALKS = [
    example_of(range(start, start + length), [place > 1 for place in range(length)], LENGTH)
    for start, length in ((0, 4), (20, 5), (40, 12))
]


def packed(*groups: list[Expected], answers: bool = True, padding: bool = False) -> Reads:
    """One rank, one step, a sample of each group."""
    rows = []
    for group in groups:
        rest = LENGTH - sum(len(part.tokens) for part in group)
        rows.append(
            Expected(
                (*(token for part in group for token in part.tokens), *[0] * rest),
                (*(label for part in group for label in part.labels), *[0] * rest),
                (*(counts or not answers for part in group for counts in part.counts), *[padding] * rest),
                (*(position for part in group for position in part.positions), *range(rest)),
                (*(number for number, part in enumerate(group) for _ in part.tokens), *[len(group)] * rest),
            )
        )
    return {1: [RankReads(0, (batch_of(rows),))]}


def examples_rows(found: Reads) -> list[Row]:
    samples = found[1][0].microbatches[0].tokens.shape[1]
    config = replace(CONFIG, training=replace(CONFIG.training, global_batch_size=samples))
    return list(rows_of_examples(samples_of(found, config), TALKS))


MISREAD = [
    (packed([TALKS[0], TALKS[1]], [TALKS[2]]), ""),
    (packed([TALKS[0], TALKS[1]], [TALKS[2]], answers=False), "loss mask"),  # questions count
    (packed([TALKS[0], TALKS[1]], [TALKS[2]], padding=True), "examples"),  # padding counts
    (packed([TALKS[0], TALKS[1]], [TALKS[0]]), "read once"),  # twice
    (packed([TALKS[0], replace(TALKS[1], positions=(3, 4, 5, 6))]), "positions"),
    (packed([replace(TALKS[1], labels=TALKS[1].tokens)]), "labels"),
    (packed([replace(TALKS[1], tokens=(7, 7, 7, 7))]), "examples"),  # another text
]


def test_wrong_conversations_are_found() -> None:
    assert TALKS[2].tokens == tuple(range(40, 48)) and TALKS[0].counts == (False, True, True), "they are cut, and only answers count"
    for found, kind in MISREAD:
        assert {row.what for row in examples_rows(found) if not row.holds} == ({kind} if kind else set())
