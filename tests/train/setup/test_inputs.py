"""What the ranks of a run find: the same files, or one error of all of them."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from megatron_llama.config.schema import Config, DataConfig, ModelConfig, TrainingConfig
from megatron_llama.data.indexed import IndexedDataset
from megatron_llama.data.loader import Samples
from megatron_llama.errors import DataError
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.prove.pool import Place
from megatron_llama.train.setup.inputs import TRAINING, VALIDATION, open_samples, stream_samples
from tools.range_server import serving

from tests.data.conftest import VOCAB_SIZE, dataset, documents, texts, tokenizer  # noqa: F401
from tests.harness import Cluster
from tests.ready import ready_for


def config_of(word: str, cache: Path) -> Config:
    data = DataConfig(data_path=(word,), data_cache_path=str(cache), split="80,20,0")
    return Config(model=ModelConfig(vocab_size=VOCAB_SIZE), data=data, training=TrainingConfig(seq_length=64, train_iters=2, eval_interval=1))


def open_while_a_file_changes(place: Place, words: list[str], cache: Path, changed: tuple[int, Path, Path] | None) -> str:
    """Open samples on each rank, the second after the first (``driver.py``); before that it replaces files, if the part is the one that
    ``changed`` names. Each rank is a machine with a cache of its own."""
    config = config_of(words[place.rank], cache / str(place.rank))
    world = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu")).world

    def source(config: Config, part: int) -> Samples:
        if place.rank == 1 and changed is not None and part == changed[0]:
            for suffix in (".bin", ".idx"):
                os.replace(changed[1].with_suffix(suffix), changed[2].with_suffix(suffix))
        return stream_samples(config, part, eod=None)

    try:
        ready_for(config, world, source)
    except DataError as error:
        return str(error)
    return ""


@pytest.fixture
def folder(dataset: IndexedDataset, tmp_path: Path) -> Path:  # noqa: F811
    for name in ("docs", "new"):
        (tmp_path / "there").mkdir(exist_ok=True)
        for suffix in (".bin", ".idx"):
            shutil.copy(dataset.prefix + suffix, tmp_path / "there" / (name + suffix))
    (tmp_path / "cache").mkdir()
    return tmp_path


@pytest.mark.few(2)
@pytest.mark.parametrize("part", [TRAINING, VALIDATION])
@pytest.mark.parametrize("store", ["http", "file"])
def test_a_remote_file_that_is_replaced_between_two_ranks(store: str, part: int, folder: Path, cluster: Cluster) -> None:
    """It has the same size and the same documents: nothing but its version differs."""
    there = folder / "there"
    with serving(there) as server:
        word = f"{server.url}/docs" if store == "http" else f"file://{there}/docs"
        assert cluster.run(2, open_while_a_file_changes, [word] * 2, folder / "cache", None) == ["", ""]
        found = cluster.run(2, open_while_a_file_changes, [word] * 2, folder / "cache", (part, there / "new", there / "docs"))
    first, second = found
    assert first == second
    assert first.startswith(f"rank 1: {word}: got .idx of ") and "expected what rank 0 has found: .idx of " in first, first
    assert first.endswith("wait until the files are the same for all machines, and start again")


def open_alone(place: Place, words: list[str], cache: Path) -> str:
    config = config_of(words[place.rank], cache)
    world = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu")).world
    try:
        open_samples(partial(stream_samples, eod=None), config, TRAINING, world)
    except DataError as error:
        return str(error)
    return ""


def test_machines_whose_copies_differ(folder: Path, cluster: Cluster, dataset: IndexedDataset) -> None:  # noqa: F811
    """Of a dataset on their disks, one of which is a copy that was not finished; of a blend; of a dataset and its twin on a server."""
    short = folder / "short"
    with serving(folder / "there") as server:
        ours = str(folder / "there" / "docs")
        write_head(dataset, short)
        assert cluster.run(2, open_alone, [ours] * 2, folder) == ["", ""]
        for words in ([ours, str(short)], [ours, f"{server.url}/docs"]):
            first, second = cluster.run(2, open_alone, words, folder)
            assert first == second and first.startswith(f"rank 1: {words[1]}: got "), first
            assert f"expected what rank 0 has found: {dataset.num_documents} documents with {dataset.num_tokens} tokens" in first


def write_head(dataset: IndexedDataset, prefix: Path) -> None:  # noqa: F811
    from megatron_llama.data.indexed import IndexedDatasetWriter

    with IndexedDatasetWriter(prefix, dataset.dtype) as writer:
        for number in range(dataset.num_documents - 1):
            writer.add(dataset.tokens(dataset.document_start(number), dataset.document_start(number + 1)))
