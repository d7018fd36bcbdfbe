"""A folder that names a padding token: what a run says of its row, what it writes, and how an older run goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_llama.model.hf import read_hf_config
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.checkpoint.cases import renew_sums
from tests.e2e.product import ITERS, TINY, TP2, VOCAB_SIZE, Product, exact_curve
from tests.launcher import Finished

EMBEDDING = "model.embed_tokens.weight"
HALF = ITERS // 2


@pytest.fixture(scope="module")
def padding(product: Product) -> int:
    """The most frequent token."""
    return int(np.bincount(np.fromfile(f"{product.data}.bin", dtype=np.uint16)).argmax())


@pytest.fixture(scope="module")
def folder(padding: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As transformers saves it."""
    torch.manual_seed(0)
    names = ("hidden_size", "intermediate_size", "num_attention_heads")
    sizes: dict[str, Any] = {name: TINY[name] for name in names} | {"num_hidden_layers": 4, "num_key_value_heads": 2}
    target = tmp_path_factory.mktemp("padding") / "hf"
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, pad_token_id=padding, **sizes))
    with torch.no_grad():
        model.get_input_embeddings().weight[padding].normal_(std=0.02)
    model.save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def train(product: Product, folder: Path) -> Callable[..., Finished]:
    """Run from the folder."""

    def run(**options: object) -> Finished:
        shape = dict.fromkeys(("num_layers", "num_query_groups"))
        return product.train(TP2, **{**shape, "init_from_hf": folder, "train_iters": ITERS, **options})

    return run


@pytest.fixture(scope="module")
def trained(train: Callable[..., Finished], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """A run with --train-pad-embedding."""
    target = tmp_path_factory.mktemp("trained")
    return target, train(train_pad_embedding=True, save=target / "save", save_interval=HALF, export_hf=target / "hf")


def change_of_row(exported: Path, folder: Path, row: int) -> float:
    """How far the row of the embedding has come from where it began."""
    found, begun = (load_file(path / "model.safetensors")[EMBEDDING][row].float() for path in (exported, folder))
    return float((found - begun).norm() / begun.norm())


@pytest.mark.long
@pytest.mark.tries("train_pad_embedding")
def test_the_start_says_which_and_checkpoint_and_export_keep_the_token(
    train: Callable[..., Finished], trained: tuple[Path, Finished], folder: Path, padding: int, tmp_path: Path
) -> None:
    ended = train(save=tmp_path / "save", train_iters=HALF, export_hf=tmp_path / "hf")
    assert f" pad token   {padding}: lookups do not train its embedding, as in transformers (--train-pad-embedding trains it)\n" in ended.out
    assert change_of_row(tmp_path / "hf", folder, padding) < 1e-3
    meta = json.loads((tmp_path / "save" / f"iter_{HALF:07}" / "meta.json").read_text())
    assert meta["model"]["pad_token_id"] == padding and meta["config"]["optimizer"]["train_pad_embedding"] is False
    again = train(save=tmp_path / "save", load=tmp_path / "save", init_from_hf=None, train_iters=HALF + 1)
    assert f" pad token   {padding}: lookups do not train" in again.out and "lookups trained" not in again.out
    target, with_option = trained
    assert f" pad token   {padding}: its embedding is trained as any other (--train-pad-embedding)\n" in with_option.out
    assert change_of_row(target / "hf", folder, padding) > 0.05
    assert [read_hf_config(exported).pad_token_id for exported in (tmp_path / "hf", target / "hf")] == [padding] * 2


def older(target: Path, trained: Path) -> Path:
    """The checkpoint of the run's half, as it was before there was an option."""
    path = target / f"iter_{HALF:07}"
    shutil.copytree(trained / "save" / path.name, path)
    meta = json.loads((path / "meta.json").read_text())
    del meta["config"]["optimizer"]["train_pad_embedding"], meta["model"]["pad_token_id"]
    (path / "meta.json").write_text(json.dumps(meta))
    renew_sums(path)
    (target / "latest_checkpointed_iteration.txt").write_text(str(HALF))
    return path


@pytest.mark.long
def test_a_run_that_is_older_than_the_option_goes_on_as_it_was(
    train: Callable[..., Finished], trained: tuple[Path, Finished], padding: int, tmp_path: Path
) -> None:
    path = older(tmp_path, trained[0])
    said = train(load=tmp_path, save=tmp_path).out
    assert f"the embedding of pad_token_id {padding} stays trained, as in the run that saved {path}" in said
    assert exact_curve(tmp_path) == exact_curve(trained[0] / "save")[HALF:]
    # What it has saved says so itself.
    said = train(load=tmp_path, save=tmp_path, train_iters=ITERS + 1).out
    assert "stays trained" in said and "lookups trained" not in said


@pytest.mark.long
def test_another_choice_in_a_run_that_goes_on_is_said(
    train: Callable[..., Finished], trained: tuple[Path, Finished], padding: int, tmp_path: Path
) -> None:
    older(tmp_path, trained[0])
    said = train(load=tmp_path, no_train_pad_embedding=True, train_iters=HALF + 1).out
    expected = f"lookups trained all rows of the embedding when the checkpoint was saved and train all rows but {padding}"
    assert f"warning: {expected}" in said and "stays trained" not in said
