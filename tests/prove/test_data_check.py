"""What ranks have read is right as it was written, and each way to read it wrongly is found by its own row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from megatron_llama.config.schema import Config, DataConfig, TrainingConfig
from megatron_llama.data.loader import Batch
from megatron_llama.prove.compare import Row
from megatron_llama.prove.data_check import (
    Expected,
    RankReads,
    Reads,
    example_of,
    rows_of_examples,
    rows_of_reads,
    rows_of_stream,
    rows_without_order,
    stream_samples,
)

EOD, LENGTH = 99, 8
CONFIG = Config(
    training=TrainingConfig(seq_length=LENGTH, global_batch_size=4, train_iters=2),
    data=DataConfig(reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True),
)
DOCUMENTS = [[10 * number + place for place in range(length)] + [EOD] for number, length in enumerate((5, 3, 11, 7, 2, 13, 6, 9, 4, 12, 5))]
SAMPLES = stream_samples(DOCUMENTS, CONFIG, EOD)
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
    return [*rows_of_reads(found, CONFIG), *rows_of_stream(found, [SAMPLES])]


def test_samples_are_cut_with_one_token_in_common_and_masks_by_the_end_tokens() -> None:
    assert len(SAMPLES) == (sum(map(len, DOCUMENTS)) - 1) // LENGTH
    first, second = SAMPLES[:2]
    assert first.window == (0, 1, 2, 3, 4, EOD, 10, 11, 12) and second.tokens[0] == first.labels[-1]
    assert first.counts == (True,) * 5 + (False, True, True)
    assert first.positions == (0, 1, 2, 3, 4, 5, 0, 1) and first.documents == (0, 0, 0, 0, 0, 0, 1, 1)


def test_what_is_right_holds() -> None:
    rows = everything(reads())
    assert all(row.holds for row in rows), [row for row in rows if not row.holds]
    assert {row.what for row in rows} >= {
        "ranks alike",
        "batch size",
        "samples",
        "labels",
        "loss mask",
        "positions",
        "documents",
        "read once",
    }


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


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (of_the_other_data_rank, "read once"),
        (on_one_rank_alone, "ranks alike"),
        (without_the_last, "batch size"),
        (replaced(tokens=other_text), "samples"),
        (replaced(labels=lambda batch: batch.tokens), "labels"),
        (replaced(loss_mask=lambda batch: torch.ones_like(batch.tokens, dtype=torch.float32)), "loss mask"),
        (replaced(position_ids=lambda batch: torch.arange(LENGTH).unsqueeze(-1)), "positions"),
        (replaced(document_ids=lambda batch: torch.zeros(LENGTH, 1, dtype=torch.int32)), "documents"),
    ],
)
def test_each_wrong_read_is_found_in_its_step(change: Change, kind: str) -> None:
    wrong = [row for row in everything(reads(change)) if not row.holds]
    assert kind in {row.what for row in wrong}, wrong
    assert {row.step for row in wrong} <= {2, None} and all(row.note for row in wrong)
    if kind not in ("read once", "ranks alike", "batch size"):
        assert {row.what for row in wrong} <= {kind, "read once"}, "nothing else is called wrong"


def test_samples_in_file_order() -> None:
    in_order = reads(order=tuple(range(8)))
    assert all(row.holds for row in rows_of_stream(in_order, [SAMPLES], in_order=True))
    assert "order" in {row.what for row in rows_of_stream(reads(), [SAMPLES], in_order=True) if not row.holds}


def test_an_order_that_is_not_rebuilt() -> None:
    assert all(row.holds for row in rows_without_order(reads(), CONFIG, EOD))
    for change, kind in ((of_the_other_data_rank, "read once"), (replaced(labels=lambda batch: batch.tokens), "labels")):
        assert kind in {row.what for row in rows_without_order(reads(change), CONFIG, EOD) if not row.holds}


def test_a_second_pass_begins_when_the_first_is_over() -> None:
    few = SAMPLES[:4]
    twice = reads(order=(2, 0, 3, 1, 1, 2, 0, 3))
    assert all(row.holds for row in rows_of_stream(twice, [few]))
    early = reads(order=(2, 0, 3, 3, 1, 2, 0, 1))
    assert all(row.holds for row in rows_of_stream(early, [few])), "over both passes each was read twice"
    assert not all(row.holds for row in rows_of_stream(reads(order=(2, 0, 3, 3, 1, 2, 0, 2)), [few]))


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


def test_conversations_are_cut_and_only_answers_count() -> None:
    assert TALKS[2].tokens == tuple(range(40, 48)) and TALKS[0].counts == (False, True, True)
    right = packed([TALKS[0], TALKS[1]], [TALKS[2]])
    assert all(row.holds for row in rows_of_examples(right, TALKS)), list(rows_of_examples(right, TALKS))


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (packed([TALKS[0], TALKS[1]], [TALKS[2]], answers=False), "loss mask"),
        (packed([TALKS[0], TALKS[1]], [TALKS[2]], padding=True), "examples"),
        (packed([TALKS[0], TALKS[1]], [TALKS[0]]), "read once"),
        (packed([TALKS[0], replace(TALKS[1], positions=(3, 4, 5, 6))]), "positions"),
        (packed([replace(TALKS[1], labels=TALKS[1].tokens)]), "labels"),
        (packed([replace(TALKS[1], tokens=(7, 7, 7, 7))]), "examples"),
    ],
    ids=["questions count", "padding counts", "twice", "positions go on", "labels", "another text"],
)
def test_wrong_conversations_are_found(found: Reads, kind: str) -> None:
    assert {row.what for row in rows_of_examples(found, TALKS) if not row.holds} == {kind}
