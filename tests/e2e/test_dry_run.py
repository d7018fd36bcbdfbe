"""A dry run does what the run does up to its first step: what the run refuses there, it refuses in the same words.

That is tried for every refusal that any test provokes (``tests/refusals.py``). Here are some of their own, and what is special to dry runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from megatron_llama.checkpoint.model_folders.hf.reader import HFWeights
from megatron_llama.checkpoint.model_folders.hf.writer import export_hf
from megatron_llama.cli import main
from megatron_llama.errors import CheckpointError
from megatron_llama.train.setup import deciders

from tests.checkpoint.model_folders.test_hf import written
from tests.e2e.product import EVALUATED, SHAPELESS, VOCAB_SIZE, Product, contents, copy_tokens, words
from tests.refusals import TRAINING, RehearsalError

Changes = Mapping[str, Any]


def small_tokenizer(product: Product, folder: Path) -> Changes:
    """With fewer tokens than the dataset has ids, which nothing but its ids says."""
    copy_tokens(product.data, folder / "docs")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(product.texts), model_prefix=str(folder / "small"), vocab_size=VOCAB_SIZE // 2, model_type="bpe"
    )
    return {"data_path": folder / "docs", "tokenizer_model": folder / "small.model"}


def occupied(product: Product, folder: Path) -> Changes:
    """A folder to export into in which somebody else's files are."""
    (folder / "letters").mkdir()
    (folder / "letters" / "to_a_friend.txt").touch()
    return {"export_hf": folder / "letters"}


def begun_with(*, ours: bool) -> Callable[[Product, Path], Changes]:
    """A folder to export into that holds the model with which the run begins, or another model of transformers."""

    def make(product: Product, folder: Path) -> Changes:
        theirs = written(folder / "theirs", vocab_size=VOCAB_SIZE)
        base = export_hf(folder / "base", HFWeights(theirs).model, HFWeights(theirs), "float32")
        return {**SHAPELESS, "init_from_hf": base, "export_hf": base / ".." / "base" if ours else theirs}

    return make


def behind_a_file(option: str) -> Callable[[Product, Path], Changes]:
    """A folder to write that cannot be made."""

    def make(product: Product, folder: Path) -> Changes:
        (folder / "file").touch()
        return {option: folder / "file" / "new"}

    return make


def without_weights(product: Product, folder: Path) -> Changes:
    """A checkpoint of which a file is missing."""
    product.train(save=folder / "run", train_iters=1)
    next((folder / "run" / "iter_0000001").glob("*.distcp")).unlink()
    return {"load": folder / "run", "save": folder / "new"}


CASES: Mapping[str, tuple[Changes | Callable[[Product, Path], Changes], str]] = {
    "nothing to train on": ({"split": "0,100,0"}, "0 tokens in the training split, expected at least 33 tokens"),
    "nothing to evaluate on": ({"split": "9999,1,0", **EVALUATED}, "tokens in the validation split, expected at least 33 tokens"),
    "a small tokenizer": (small_tokenizer, "docs.bin: document "),
    "long samples": ({"seq_length": 2**20}, "tokens in the training split, expected at least 1048577 tokens"),
    "a small vocabulary": ({"vocab_size": 100}, "--vocab-size: got 100, expected at least the tokenizer's 512"),
    "steps of an epoch": (
        {"epochs": 0.01, "train_iters": None, "lr_decay_iters": None, "lr_warmup_iters": 50},
        "These options do not fit a run of 3 steps (--epochs 0.01):",
    ),
    "prompts without room": ({"sample_prompt": "a" * 99, "sample_interval": 2}, "tokens with their continuation, expected 1 to 32"),
    "an occupied folder": (occupied, "letters: got a folder with to_a_friend.txt"),
    "the model it began with": (begun_with(ours=True), "base: got the folder from which the run took its weights"),
    "a model of transformers": (begun_with(ours=False), "theirs: got a model that no export of this program has written"),
    "incomplete weights": (without_weights, "iter_0000001 is incomplete:"),
}
WRITTEN = ("save", "tensorboard_dir", "profile_dir", "record_timeline")


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_what_the_run_refuses(name: str, product: Product, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the run (and so by the strict dry run), and by the plain one, since everything that it needs is here; nothing is written."""
    changes, says = CASES[name]
    given = changes(product, tmp_path) if callable(changes) else changes
    before = contents(tmp_path), sorted(tmp_path.rglob("*"))
    refused = [main(product.command(**{"save": tmp_path / "new", **given, "dry_run": dry_run})) for dry_run in (None, "yes")]
    assert refused[0] == refused[1] != 0
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2 and errors[0] == errors[1] and says in errors[0]
    assert (contents(tmp_path), sorted(tmp_path.rglob("*"))) == before


@pytest.mark.long
@pytest.mark.parametrize("option", WRITTEN)
def test_a_folder_that_cannot_be_made(option: str, product: Product, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another machine may have it: to a plain dry run it is a warning."""
    traced = {"profile_step_start": 1, "profile_step_end": 3} if option in ("profile_dir", "record_timeline") else {}
    given = {"profile": True if option == "profile_dir" else None, **traced, **behind_a_file(option)(product, tmp_path)}
    assert main(product.command(**given)) == 1
    cause = "got Not a directory" if option == "record_timeline" else f"got {tmp_path}/file: Not a directory"
    assert f"{cause}, expected a folder in which files can be written; give another folder" in capsys.readouterr().err
    assert main(product.command(**given, dry_run="yes")) == 0
    assert cause in capsys.readouterr().out


def test_examples_that_cannot_be_used(product: Product, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"messages": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]}
    (tmp_path / "good.jsonl").write_text(f"{json.dumps(good)}\n" * 20)
    (tmp_path / "bad.jsonl").write_text(f'{json.dumps(good)}\n{{"messages": []}}\n')
    command = [*product.command(data_path=None, vocab_size=VOCAB_SIZE, tokenizer_model=f"{product.data}-tokenizer")[1:]]
    for changes, says in (
        ({"train_data": tmp_path / "bad.jsonl"}, "1 examples cannot be used"),
        ({"train_data": tmp_path / "good.jsonl", "split": "0,100,0"}, "--split 0,100,0: got none of 20 examples for training"),
        ({"train_data": tmp_path / "good.jsonl", "chat_template": "gpt5"}, "gpt5: got "),
    ):
        without_split = _without(command, "--split") if "split" in changes else command
        for dry_run in (None, "yes"):
            if dry_run and "chat_template" in changes:
                continue  # a template may be a file of another machine
            assert main(["sft", *without_split, *words({**changes, "dry_run": dry_run})]) == 1, changes
            assert says in capsys.readouterr().err
    assert main(["sft", *command, *words({"train_data": tmp_path / "good.jsonl", "dry_run": "strict"})]) == 0
    assert "18 training examples, one to each of 18 samples" in capsys.readouterr().out


def _without(command: list[str], name: str) -> list[str]:
    at = command.index(name)
    return command[:at] + command[at + 2 :]


def test_a_refusal_that_only_the_run_knows_is_noticed(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever tests it: that is the test of all the others."""

    def refuse(*inputs: object) -> None:
        raise CheckpointError("moon", got="full", expected="new", do="wait")

    monkeypatch.setattr(deciders, "read_first_step", refuse)
    with pytest.raises(RehearsalError, match="the run: moon: got full"):
        main(product.command())
    assert {"pretrain", "sft", "align"} == set(TRAINING)


@pytest.fixture(autouse=True)
def no_step(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert " iteration " not in capsys.readouterr().out
