"""A tokenizer with more tokens than its model has rows, as adding ``[PAD]`` makes it: in the way of nothing, refused where the token is
used, and with --resize-embeddings a row of its own."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from megatron_llama.checkpoint.model_folders.hf.writer import export_hf
from megatron_llama.cli import main
from megatron_llama.config.schema import ModelConfig
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.model.init import InitialWeights
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.data.tokenizer.layouts import TIKTOKEN
from tests.e2e.product import LAYOUTS, SPREAD, Refuse, state, words
from tests.launcher import Launcher

ROWS = 603
"""Token ids of the model; [PAD] is the next one."""
WITH, WITHOUT = ("with.jsonl", "without.jsonl")
TRAIN = {"seq_length": 16, "micro_batch_size": 2, "global_batch_size": 4, "train_iters": 1, "lr": 1e-3, "split": "50,50,0"}
TABLES = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.fixture(scope="module")
def hf(layouts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder, in which transformers has saved its tokenizer with [PAD]; beside it texts and datasets with the token and without."""
    folder = tmp_path_factory.mktemp("resize")
    tokenizer = AutoTokenizer.from_pretrained(layouts / "qwen")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(folder / "tokenizer")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = ModelConfig(vocab_size=ROWS, head_dim=8, max_position_embeddings=256, **shape)
    export_hf(folder / "hf", model, InitialWeights(3, 0.3), "float32", load_tokenizer(folder / "tokenizer"))
    for name, text in ((WITHOUT, "A statement is a line. " * 6), (WITH, "A statement is [PAD] a line. " * 6)):
        (folder / name).write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": text.upper()}) + "\n")
        argv = ["--input", folder / name, "--output-prefix", folder / name, "--append-eod", "--workers", 1]
        assert main(["preprocess", *map(str, argv), "--tokenizer-model", str(folder / "hf")]) == 0
    return folder / "hf"


def command(name: str, hf: Path, text: str, **options: object) -> list[str]:
    """A command that reads ``text``, one of the files beside the model."""
    file = hf.parent / text
    if name == "pretrain":
        return ["pretrain", *words({"init_from_hf": hf, **TRAIN, "data_path": file, **options})]
    if name == "sample":
        prompt = json.loads(file.read_text().splitlines()[0])["text"][:20]
        data = {"data_path": hf.parent / WITHOUT, "sample_interval": 1, "sample_tokens": 2, "sample_prompt": prompt}
        return ["pretrain", *words({"init_from_hf": hf, **TRAIN, **data, **options})]
    if name == "sft":
        return ["sft", *words({"init_from_hf": hf, **TRAIN, "seq_length": 64, "split": "50,50,0", "train_data": file, **options})]
    if name == "evaluate":
        return ["evaluate", *words({"init_from_hf": hf, "text": file, **options})]
    return ["generate", *words({"load": hf, "prompt_file": file, "max_new_tokens": 2, **options})]


COMMANDS = ("pretrain", "sample", "sft", "evaluate", "generate")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_token_without_a_row_is_refused_where_it_is_used(name: str, hf: Path, refuse: Refuse) -> None:
    """By name, before the first step, with the remedy."""
    said = refuse(command(name, hf, WITH), code=2 if name == "sample" else 1)
    assert f"got the token '[PAD]' (id {ROWS}), expected" in said and "--resize-embeddings" in said


def test_a_message_is_refused_and_the_next_one_answered(hf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (hf.parent / "template").write_text("{% for message in messages %}{{ message['content'] + eos_token }}{% endfor %}")
    (hf.parent / "odd").write_text("{% for message in messages %}{{ message['content'] + '[PAD]' }}{% endfor %}")
    for template, code in (("odd", f"the message: got the token '[PAD]' (id {ROWS})"), ("template", "")):
        monkeypatch.setattr(sys, "stdin", io.StringIO("A statement\n"))
        assert main(["chat", *words({"load": hf, "chat_template": hf.parent / template, "max_new_tokens": 2, "temperature": 0})]) == 0
        printed = capsys.readouterr()
        assert code in printed.err and (printed.out == "") is bool(code)


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_a_tokenizer_that_merely_has_such_a_token_is_in_the_way_of_nothing(name: str, hf: Path, tmp_path: Path) -> None:
    saves = {"save": tmp_path / "run", "export_hf": tmp_path / "out"} if name in ("pretrain", "sft") else {}
    assert main(command(name, hf, WITHOUT, **saves)) == 0
    if saves:
        assert main(["export", "--load", str(tmp_path / "run"), "--output", str(tmp_path / "again")]) == 0
        for folder in ("out", "again"):
            assert len(AutoTokenizer.from_pretrained(tmp_path / folder)) == ROWS + 1
            assert AutoModelForCausalLM.from_pretrained(tmp_path / folder).config.vocab_size == ROWS


@pytest.mark.long
@pytest.mark.parametrize("name", ["pretrain", "sample", "sft"])
def test_with_rows_for_all_tokens_it_is_read(name: str, hf: Path, tmp_path: Path) -> None:
    saves = {"save": tmp_path / "run", "export_hf": tmp_path / "out"}
    assert main(command(name, hf, WITH, resize_embeddings=True, **saves)) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == ROWS + 1
    assert main(command("generate", hf, WITH, load=tmp_path / "run")) == 0
    assert main(command("evaluate", hf, WITH, init_from_hf=tmp_path / "out")) == 0


def assert_resized(found: dict[str, Tensor], hf: Path, rows: int) -> None:
    """All old rows bit for bit, and new ones that are their mean."""
    before = load_file(hf / "model.safetensors")
    assert {name for name in found if not name.startswith("optimizer.")} == before.keys()
    for name, old in before.items():
        assert torch.equal(found[name][: len(old)], old), name
    for name in TABLES:
        assert found[name].shape == (rows, 32)
        mean = before[name].double().mean(0).float()
        assert all(torch.equal(row, found[name][ROWS]) for row in found[name][ROWS:])
        torch.testing.assert_close(found[name][ROWS], mean, rtol=1e-6, atol=0)


@pytest.mark.tries("resize_embeddings")
@pytest.mark.long
@pytest.mark.parametrize("rows", [None, ROWS + 30])
def test_new_rows_are_the_mean_of_the_old_ones(rows: int | None, hf: Path, tmp_path: Path) -> None:
    """Of a HuggingFace folder, and of a checkpoint of it; then the run resumes as it was started."""
    options = {"lr": 0, "vocab_size": rows, "resize_embeddings": True, "save": tmp_path / "run"}
    assert main(command("pretrain", hf, WITH, **options)) == 0
    assert_resized(state(tmp_path / "run" / "iter_0000001"), hf, rows or ROWS + 1)
    assert main(command("pretrain", hf, WITH, **options, load="auto", train_iters=2)) == 0
    assert_resized(state(tmp_path / "run" / "iter_0000002"), hf, rows or ROWS + 1)
    assert main(command("pretrain", hf, WITHOUT, lr=0, save=tmp_path / "small")) == 0
    given = {**options, "init_from_hf": None, "load": tmp_path / "small", "finetune": True, "save": tmp_path / "grown"}
    assert main(command("pretrain", hf, WITH, **given)) == 0
    assert_resized(state(tmp_path / "grown" / "iter_0000001"), hf, rows or ROWS + 1)


@pytest.mark.long
@pytest.mark.parametrize("name", SPREAD)
def test_every_layout_makes_the_same_rows(name: str, hf: Path, launcher: Launcher, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    options = {"lr": 0, "resize_embeddings": True, "global_batch_size": 8}
    assert main(command("pretrain", hf, WITH, **options, save=tmp_path / "one")) == 0
    spread = command("pretrain", hf, WITH, **options, **layout.options, save=tmp_path / "spread")
    launcher.run(spread, layout.processes).ok()
    one, found = (state(tmp_path / folder / "iter_0000001") for folder in ("one", "spread"))
    assert_resized(found, hf, ROWS + 1)
    assert [key for key in one if not key.startswith("optimizer.") and not torch.equal(one[key], found[key])] == []


@pytest.mark.long
def test_what_cannot_be_resized_is_refused(hf: Path, refuse: Refuse, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refuse(command("pretrain", hf, WITHOUT, vocab_size=ROWS + 1), code=2)
    assert f"--vocab-size: got {ROWS + 1}, expected {ROWS} as in {hf}/config.json; leave vocab_size out, or give --resize-embeddings" in said
    assert f"got {ROWS - 1}, expected {ROWS}" in refuse(command("pretrain", hf, WITHOUT, vocab_size=ROWS - 1, resize_embeddings=True), code=2)
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "init_from_hf": None}
    said = refuse(command("pretrain", hf, WITHOUT, **shape, resize_embeddings=True), code=2)
    assert "--resize-embeddings: got no weights, expected those of a trained model" in said
    assert main(command("pretrain", hf, WITHOUT, save=tmp_path / "run")) == 0
    assert main(["convert", str(hf), str(tmp_path / "megatron"), "--to", "megatron"]) == 0
    capsys.readouterr()
    begun = {"init_from_hf": None, "load": tmp_path / "run", "resize_embeddings": True}
    assert "give --finetune to begin anew with its weights" in refuse(command("pretrain", hf, WITH, **begun), code=1)
    assert "convert it first" in refuse(command("pretrain", hf, WITH, **{**begun, "load": tmp_path / "megatron"}), code=1)


@pytest.mark.long
def test_another_models_tokenizer_is_refused_at_once(hf: Path, layouts: Path, refuse: Refuse, tmp_path: Path) -> None:
    """Not added tokens, but more learnt ones than the model has rows."""
    model = tmp_path / "hf"
    shutil.copytree(hf, model, ignore=shutil.ignore_patterns("tokenizer*", "SHA256SUMS"))
    for name in ("tokenizer.model", "params.json"):
        shutil.copy(layouts / TIKTOKEN / name, model)
    (model / WITHOUT).write_bytes((hf.parent / WITHOUT).read_bytes())
    for name, code in (("generate", 1), ("sft", 2)):
        said = refuse(command(name, model, f"hf/{WITHOUT}"), code=code)
        assert "856 tokens, expected th" in said and f"vocab_size is {ROWS}" in said
