"""The digest of a reference: equal for the same values wherever they lie, another for one other bit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from megatron_llama.checkpoint.model_folders.formats import open_model
from megatron_llama.config.schema import ModelConfig
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.errors import CheckpointError
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.plan.params import hf_shapes
from megatron_llama.tune.preference.digest import BLOCK_ELEMENTS, blocks, model_digest
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.converter.converting import convert, hf_folder
from tests.harness import Cluster, WorkerError
from tests.parallel.cases import MODEL, Layout, initial_weights

FIELDS = {"rms_norm_eps": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A HuggingFace folder in bf16, in several files."""
    return hf_folder(tmp_path_factory.mktemp("hf") / "model", torch.bfloat16)


@cache
def digest_of(folder: Path) -> str:
    source = open_model(folder)
    return model_digest(source, source.model, FIELDS, Mesh.single().world)


def rewritten(folder: Path, target: Path, change: str) -> Path:
    """A copy of the folder with its weights in one file, stored in another way, or changed."""
    shutil.copytree(folder, target)
    weights: dict[str, Tensor] = {}
    for path in sorted(target.glob("*.safetensors*")):
        weights |= load_file(path) if path.suffix == ".safetensors" else {}
        path.unlink()
    name = "model.layers.1.mlp.down_proj.weight"
    if change == "in fp32":
        weights = {name: weight.float() for name, weight in weights.items()}
    elif change == "in one file, in another order":
        weights = dict(reversed(weights.items()))
    elif change == "one bit":
        weights[name].view(torch.int16)[3, 5] ^= 1
    elif change == "two rows swapped":
        weights[name] = weights[name][[1, 0, *range(2, len(weights[name]))]]
    save_file({name: weight.contiguous() for name, weight in weights.items()}, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize("change", ["in fp32", "in one file, in another order", "one bit", "two rows swapped", "native", "megatron"])
def test_a_digest_is_of_values_and_not_of_how_they_are_stored(folder: Path, tmp_path: Path, change: str) -> None:
    there = change in ("native", "megatron")
    other = convert(folder, tmp_path / "other", "--to", change) if there else rewritten(folder, tmp_path / "other", change)
    assert (digest_of(other) == digest_of(folder)) is (change not in ("one bit", "two rows swapped"))


def drawn_digest(place: Place, fails: int = -1) -> str:
    mesh = build_mesh(Layout(dp=place.world_size).config(), rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))

    def source(rectangle: Rectangle, out: Tensor) -> None:
        if place.rank == fails:
            raise CheckpointError(rectangle.name, got="an I/O error", expected="its values", do="copy the file again")
        initial_weights()(rectangle, out)

    return model_digest(source, MODEL, FIELDS, mesh.world)


def test_the_digest_is_that_of_one_process(cluster: Cluster) -> None:
    assert {*cluster.run(2, drawn_digest), *cluster.run(3, drawn_digest)} == {drawn_digest(Place(0, 1, 0))}


def test_weights_that_one_rank_cannot_read_are_an_error_of_all(cluster: Cluster) -> None:
    with pytest.raises(WorkerError, match=r"rank 1: .*an I/O error"):
        cluster.run(2, drawn_digest, 1)


@pytest.mark.parametrize("model", [MODEL, replace(MODEL, vocab_size=600_000, tie_word_embeddings=True)], ids=["small", "many blocks"])
def test_blocks_are_all_weights_once_and_small(model: ModelConfig) -> None:
    rows: dict[str, int] = {}
    for block in blocks(model):
        assert block.offset[0] == rows.get(block.name, 0) and block.size[1:] == block.shape[1:]
        assert torch.Size(block.size).numel() <= BLOCK_ELEMENTS
        rows[block.name] = block.offset[0] + block.size[0]
    assert rows == {name: shape[0] for name, shape in hf_shapes(model).items()}
