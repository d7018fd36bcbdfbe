"""Megatron's order of samples, against megatron.core.datasets itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron_llama.config.schema import Config, DataConfig, ModelConfig, TrainingConfig
from megatron_llama.data import megatron_order
from megatron_llama.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron_llama.data.megatron_order import blended_places
from megatron_llama.data.stream import megatron_split, normalized
from megatron_llama.errors import DataError
from megatron_llama.train.setup import megatron_inputs
from megatron_llama.train.setup.build import build_loader
from megatron_llama.train.setup.checks.run import data_order_problems
from megatron_llama.train.setup.inputs import TRAINING, VALIDATION, stream_samples
from megatron_llama.train.setup.start import data_changes, sample_changes

from tests.refused import refused

VOCAB = 1000
LENGTHS = {
    "short": (40, 2, 0, 3, 1, 7, 5, 1, 30, 0, 9, 12),
    "web": (200, 31, 77, 15, 64, 0, 128, 90, 33, 12, 250),
    "more": (74, 41, 60, 0, 77, 50, 33, 64, 49),
}


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Datasets whose documents have lengths of every kind: none, one token, shorter and longer than a sample."""
    folder = tmp_path_factory.mktemp("datasets")
    random = np.random.default_rng(5)
    found = {}
    for name, lengths in LENGTHS.items():
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            for length in lengths:
                writer.add(random.integers(0, VOCAB, length, np.uint16))
        found[name] = str(folder / name)
    return found


def megatron_dataset(words: list[str], split: str, sizes: list[int], seq_length: int, seed: int) -> object:
    """The training samples that Megatron-LM's training loop would build. `sizes`: of training, validation and test."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=get_blend_from_list(words),
        split=split,
        path_to_cache=None,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=SimpleNamespace(vocab_size=VOCAB, eod=-5, unique_identifiers={}),  # a tokenizer without a pad token, as sentencepiece's
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]


def our_config(words: list[str], split: str, seq_length: int, seed: int, iterations: int, batch: int) -> Config:
    return Config(
        model=ModelConfig(vocab_size=VOCAB),
        training=TrainingConfig(seq_length=seq_length, seed=seed, train_iters=iterations, global_batch_size=batch),
        data=DataConfig(data_path=tuple(words), split=split, megatron_data_order=True),
    )


@pytest.mark.tries("megatron_data_order")
@pytest.mark.parametrize("split", ["100,0,0", "70,30", "1,1,1"])
@pytest.mark.parametrize(
    ("words", "iterations"),
    [
        ("web", 1),  # a part of one epoch
        ("web", 19),  # 1.36 epochs: the last one is shuffled by itself
        ("web", 27),  # 1.93 epochs: the last one is mixed with the others
        ("web", 90),
        ("more", 7),  # one token short of one epoch
        ("short", 60),
        ("1 web", 25),  # one dataset with a weight is a blend: Megatron makes more samples than it reads
        ("0.7 web 0.3 short", 40),
        ("0.1 short 0.2 web 0.7 web", 61),
        ("web more", 4),  # without weights each dataset is read once
    ],
)
def test_the_samples_are_megatrons(words: str, iterations: int, split: str, prefixes: dict[str, str]) -> None:
    """Position by position, for all samples that Megatron has made."""
    named = [prefixes.get(word, word) for word in words.split()]
    seq_length, batch = 32, 2
    wanted = [iterations * batch, 2 * batch, batch]
    for seed in (1234, 7):
        theirs = megatron_dataset(named, split, wanted, seq_length, seed)
        ours = stream_samples(our_config(named, split, seq_length, seed, iterations, batch), TRAINING, eod=None)
        assert len(ours) == len(theirs)
        for position in range(len(theirs)):
            sample, batched = theirs[position], ours.batch([position])
            assert np.array_equal(batched.tokens[:, 0], sample["tokens"]), position
            assert np.array_equal(batched.labels[:, 0], sample["labels"]), position


def test_a_blend_is_that_of_megatrons_helper() -> None:
    """Also where datasets are equally far behind but for the rounding of doubles, which decides."""
    from megatron.core.datasets.helpers import build_blending_indices

    for weights in ([0.5, 0.5], [0.7, 0.2, 0.1], [0.1] * 10, [1 / 3, 2 / 3], [3.0, 1e-3, 17.5, 0.3]):
        shares = normalized(weights)
        places, numbers = np.zeros(5000, np.int16), np.zeros(5000, np.int64)
        build_blending_indices(places, numbers, shares, len(shares), len(places), False)
        assert np.array_equal(blended_places(shares, len(places)), places)


@pytest.mark.parametrize("split", ["969,30,1", "1,1,1", "99,1", "0.7,0.2,0.1", "5,3"])
def test_documents_are_split_as_megatron_splits_them(split: str) -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import convert_split_vector_to_split_matrix, parse_and_normalize_split

    vector = parse_and_normalize_split(split)
    bounds = convert_split_vector_to_split_matrix(vector)
    for documents in range(400):
        ranges = [(round(found[0] * documents), round(found[1] * documents)) for found in bounds[:2] if found is not None]
        assert list(megatron_split(split, documents))[: len(ranges)] == ranges


def test_datasets_without_weights_end_where_they_have_been_read_once(prefixes: dict[str, str]) -> None:
    words = [prefixes["web"], prefixes["short"]]
    with pytest.raises(DataError, match=r"--megatron-data-order: got 31 samples.*expected 32.*give each dataset of --data-path its weight"):
        stream_samples(our_config(words, "100,0,0", 32, 1, 16, 2), TRAINING, eod=None)


def test_documents_of_several_sequences_are_refused(prefixes: dict[str, str], tmp_path: Path) -> None:
    """Megatron splits and shuffles sequences, which are documents only where each has one."""
    for suffix in (".bin", ".idx"):
        (tmp_path / f"split{suffix}").write_bytes(Path(prefixes["web"] + suffix).read_bytes())
    index = bytearray((tmp_path / "split.idx").read_bytes())
    documents = np.frombuffer(index, np.int64, offset=len(index) - 8 * 12)
    documents[3] = 4  # the third document has two sequences, the fourth none
    (tmp_path / "split.idx").write_bytes(index)
    with pytest.raises(DataError, match=r"split\.idx: got documents of several sequences, expected one sequence a document"):
        stream_samples(our_config([str(tmp_path / "split")], "100,0,0", 32, 1, 3, 2), TRAINING, eod=None)


def test_the_loader_reads_position_by_position_and_validation_keeps_its_documents(prefixes: dict[str, str]) -> None:
    """A step after `consumed` samples has Megatron's positions from there on, in every layout; validation has Megatron's range."""
    config = our_config([prefixes["web"]], "70,30", 32, 1234, 20, 4)
    ours = stream_samples(config, TRAINING, eod=None)
    theirs = megatron_dataset([prefixes["web"]], "70,30", [80, 8, 0], 32, 1234)
    for size in (1, 2):
        ranks = [build_loader(config, ours, data_rank=rank, data_size=size).microbatches(36) for rank in range(size)]
        tokens = torch.cat([batch.tokens for step in zip(*ranks, strict=True) for batch in step], dim=1)
        assert torch.equal(tokens, torch.stack([theirs[position]["tokens"] for position in range(36, 40)], dim=1))
    validation = stream_samples(config, VALIDATION, eod=None)
    first = sum(LENGTHS["web"][: round(0.7 * len(LENGTHS["web"]))])
    assert np.array_equal(validation.batch([0]).tokens[:, 0], IndexedDataset(prefixes["web"]).tokens(first, first + 32))


def test_what_the_order_cannot_go_with_is_refused_together() -> None:
    config = our_config(["web"], "100,0,0", 32, 1, 3, 2)
    assert list(data_order_problems(config)) == []
    wrong = replace(
        config, data=replace(config.data, data_order="sequential"), training=replace(config.training, epochs=2.0, on_bad_step="rollback")
    )
    assert [problem.split(", expected")[0] for problem in data_order_problems(wrong)] == [
        "--megatron-data-order: got --data-order sequential",
        "--megatron-data-order: got --epochs",
        "--megatron-data-order: got --on-bad-step rollback",
    ]


def test_another_length_of_the_run_is_another_order(prefixes: dict[str, str]) -> None:
    """Megatron shuffles for as many samples as the run asks for: a resumed run of another length is told so."""
    before, now = (stream_samples(our_config([prefixes["web"]], "100,0,0", 32, 1, steps, 2), TRAINING, eod=None) for steps in (19, 60))
    assert sample_changes(before.identity(), now.identity()) == "samples in Megatron's order 56, now 140"
    assert list(data_changes({"training": {"seed": 1, "seq_length": 32}}, Config(training=TrainingConfig(seed=1, seq_length=32)))) == []


@pytest.mark.long
def test_more_documents_than_megatron_can_number(prefixes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy would number them from the smallest negative one on, in silence."""
    documents = len(LENGTHS["web"])
    config = our_config([prefixes["web"]], "100,0,0", 32, 1, 19, 2)
    monkeypatch.setattr(megatron_order, "LARGEST_NUMBER", documents)
    stream_samples(config, TRAINING, eod=None)
    monkeypatch.setattr(megatron_order, "LARGEST_NUMBER", documents - 1)
    with pytest.raises(DataError) as error:
        stream_samples(config, TRAINING, eod=None)
    assert refused(error.value).got == f"{documents} documents"


def test_an_order_that_memory_cannot_hold_is_refused_before_it_is_made(prefixes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of trillions of tokens it takes more than a machine has, in each of its processes."""
    config = our_config([prefixes["web"]], "100,0,0", 32, 1, 19, 2)
    dataset = stream_samples(config, TRAINING, eod=None)
    documents = 2 * len(IndexedDataset(Path(prefixes["web"])).lengths)  # two epochs, of which the last is not read to its end
    needed = 28 * documents + 8 * len(dataset)
    monkeypatch.setattr(megatron_inputs, "free_bytes", lambda: needed)
    assert len(stream_samples(config, TRAINING, eod=None)) == len(dataset)
    monkeypatch.setattr(megatron_inputs, "free_bytes", lambda: needed - 1)
    with pytest.raises(DataError) as error:
        stream_samples(config, TRAINING, eod=None)
    assert f"{documents:,} documents" in refused(error.value).got
