"""No command brings weights, datasets and tokenizers together that were made for another: tried on the command line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
from megatron_llama.data.tokenizer.load import load_tokenizer
from transformers import AutoTokenizer

from tests.e2e.product import VOCAB_SIZE, Product, Refuse, copy_tokens, words

ONE_STEP = {"train_iters": 1, "lr_decay_iters": 1, "split": "100,0,0"}


@pytest.fixture(scope="module")
def other(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of another tokenizer that has the same size and the same end token: nothing but its tokens tells them apart."""
    prefix = tmp_path_factory.mktemp("other") / "docs"
    prefix.with_suffix(".txt").write_text("\n".join(product.texts).upper())
    made = ["--input", prefix.with_suffix(".txt"), "--output-prefix", prefix, "--append-eod", "--workers", 1]
    product.run("preprocess", *made, "--train-tokenizer", "--vocab-size", VOCAB_SIZE).ok()
    return prefix


def named(text: str) -> bool:
    return re.search(r"token \d+ is '.*' here, '.*' there", text) is not None


@pytest.mark.long
@pytest.mark.parametrize("dry_run", [None, "strict"])
def test_training(
    dry_run: str | None, product: Product, other: Path, exported: Path, straight: Callable[[str], Path], refuse: Refuse, tmp_path: Path
) -> None:
    """A dataset and a tokenizer, a dataset and weights, a run that goes on with another tokenizer: nothing is written."""
    mine = f"{product.data}-tokenizer"
    theirs = f"{other}-tokenizer"
    shape = dict.fromkeys(("num_layers", "num_query_groups"))
    shutil.copytree(straight("one"), tmp_path / "run")
    for changes in (
        {"data_path": other, "tokenizer_model": mine, "export_hf": tmp_path / "hf"},
        {"data_path": other, "init_from_hf": exported, "save": tmp_path / "new", **shape},
        {"tokenizer_model": theirs, "init_from_hf": exported, "save": tmp_path / "new", **shape},
        {"tokenizer_model": theirs, "load": tmp_path / "run", "save": tmp_path / "run", "train_iters": 8},
        {"data_path": other, "load": tmp_path / "run", "save": tmp_path / "run", "train_iters": 8},
        {"data_path": (1, product.data, 1, other)},
    ):
        text = refuse(product.command(**{**changes, "dry_run": dry_run}), code=1)
        assert named(text), text
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.long
def test_commands_with_a_model(product: Product, other: Path, exported: Path, straight: Callable[[str], Path], refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "text.txt").write_text("a few words of text " * 50)
    theirs = ["--tokenizer-model", f"{other}-tokenizer"]
    few = words({"seq_length": 32, "global_batch_size": 1, "train_iters": 1, "lr": 1e-3, "split": "100,0,0"})
    for command in (
        ["sft", "--init-from-hf", exported, "--train-data", tmp_path / "pairs.jsonl", "--chat-template", "plain", *few, *theirs],
        ["evaluate", "--load", straight("one"), "--text", tmp_path / "text.txt", *theirs],
        ["evaluate", "--init-from-hf", exported, "--data-path", other],
        ["generate", "--load", straight("one"), "--prompt", "a", *theirs],
        ["chat", "--init-from-hf", exported, *theirs],
        ["export", "--load", straight("one"), "--output", tmp_path / "hf", *theirs],
    ):
        text = refuse(command, code=1)
        assert named(text), (command[0], text)
    assert not (tmp_path / "hf").exists()


@pytest.mark.long
def test_a_moved_dataset_and_a_run_that_never_saved(product: Product, layouts: Path, tmp_path: Path) -> None:
    """A unigram model from text to transformers: the dataset brings its tokenizer along, which takes the place of one that an attempt
    without a checkpoint has left in --save."""
    shutil.copytree(layouts / "unigram", tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "tokenizer.json").unlink()
    settings = tmp_path / "tokenizer" / "tokenizer_config.json"  # its class has no other file than the one that is gone
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "tokenizer_class": "LlamaTokenizer"}))
    made = ["--input", product.data.with_suffix(".jsonl"), "--output-prefix", tmp_path / "made" / "docs", "--append-eod", "--workers", 1]
    product.run("preprocess", *made, "--tokenizer-model", tmp_path / "tokenizer").ok()
    shutil.rmtree(tmp_path / "tokenizer")
    (tmp_path / "made").rename(tmp_path / "moved")
    save = tmp_path / "run"
    shutil.copytree(layouts / "gpt2", save / "tokenizer")
    ended = product.train(data_path=tmp_path / "moved" / "docs", save=save, load="auto", export_hf=tmp_path / "hf", **ONE_STEP)
    assert "warning" not in ended.out
    assert not (save / "tokenizer" / "vocab.json").exists() and not list(save.glob("*.incomplete"))
    text = "A class definition is an executable statement."
    kept = load_tokenizer(layouts / "unigram" / "tokenizer.model").encode(text)
    for folder in (save / "tokenizer", tmp_path / "hf"):
        assert AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"] == kept
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (600, 2)
    prompt = ["--prompt", "A class", "--max-new-tokens", 2]
    assert product.run("generate", "--load", save, *prompt).ok().out.startswith("A class")
    shutil.rmtree(tmp_path / "moved" / "docs-tokenizer")
    alone = product.train(data_path=tmp_path / "moved" / "docs", save=tmp_path / "alone", **ONE_STEP)
    assert f" warning: no tokenizer is known ({tmp_path}/moved/docs-tokenizer/tokenizer.model, which " in alone.out


@pytest.mark.long
def test_a_tokenizer_that_no_checkpoint_can_keep(product: Product, refuse: Refuse, tmp_path: Path) -> None:
    """Refused at the start, and by the dry run; nothing is left behind."""
    model = {"model_prefix": tmp_path / "tokenizer", "vocab_size": 300, "hard_vocab_limit": False, "user_defined_symbols": ["<x>"]}
    sentences = "\n".join(product.texts).split("\n")
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(sentences), model_type="bpe", minloglevel=2, **model)
    copy_tokens(product.data, tmp_path / "tokens")
    before = sorted(tmp_path.iterdir())
    options = {"data_path": tmp_path / "tokens", "tokenizer_model": tmp_path / "tokenizer.model", "vocab_size": VOCAB_SIZE}
    for dry_run in (None, "strict"):
        text = refuse(product.command(**options, save=tmp_path / "run", dry_run=dry_run), code=1)
        assert "tokenizer.model: got a model that tokenizer.json cannot express" in text and "user-defined symbols" in text
    assert sorted(path for path in tmp_path.iterdir() if path.name != "run") == before
    assert not any((tmp_path / "run").glob("*"))
