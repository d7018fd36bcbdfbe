"""Round trips: what transformers writes goes through every format and comes back bit for bit, every field of the config too."""

from __future__ import annotations

import json
import os
import pty
import sys
import termios
from contextlib import suppress
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from megatron_llama.cli import main
from megatron_llama.data.tokenizer.spm import train_tokenizer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.checkpoint.model_folders.test_hf import LLAMA3, hf_model, tensors
from tests.converter.converting import LLAMA31, assert_same, convert, hf_folder, listing, loaded, rank_file

LINEAR = {"rope_type": "linear", "rope_theta": 12_345.5, "factor": 2.0}
MODELS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "grouped float32": (torch.float32, {}),
    "multi-head bfloat16": (torch.bfloat16, {"num_key_value_heads": 8, "bos_token_id": 5, "eos_token_id": [2, 7]}),
    "tied llama3": (torch.bfloat16, {"tie_word_embeddings": True, "rope_parameters": LLAMA31, "max_position_embeddings": 131072}),
    "untied llama3 float16": (torch.float16, {"rope_parameters": LLAMA3, "vocab_size": 256}),
    "tied linear wide heads": (torch.float32, {"tie_word_embeddings": True, "head_dim": 16, "rms_norm_eps": 3e-6, "rope_parameters": LINEAR}),
}
GRID = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2), (1, 4), (2, 4), (4, 4)]
TARGETS: dict[str, list[str]] = {
    "hf": [],
    "native": [],
    **{f"meta {n}": ["--tensor-model-parallel-size", str(n)] for n in (1, 2, 4)},
    **{
        f"{name} {tp} {pp}": ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp), *more]
        for name, grid, *more in (
            ("megatron", GRID),
            ("megatron-llama", GRID),
            ("megatron legacy", [(4, 2)], "--megatron-layout", "legacy"),
        )
        for tp, pp in grid
    },
    **{f"torch_dist {tp}": ["--tensor-model-parallel-size", str(tp)] for tp in (1, 4)},
}


FULL = ("grouped float32", "multi-head bfloat16", "tied llama3")
SOME = ("hf", "native", "meta 4", "megatron 2 2", "megatron-llama 2 2", "megatron legacy 4 2", "torch_dist 4")
PAIRS = [(model, target) for model in MODELS for target in (TARGETS if model in FULL else SOME)]
"""Every layout for three models, one of each format for the others."""


@pytest.fixture(scope="module", params=MODELS)
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dtype, fields = MODELS[request.param]
    return hf_folder(tmp_path_factory.mktemp("hf") / "model", dtype, **fields)


@pytest.mark.few(4, all=24)
@pytest.mark.parametrize(("original", "target"), PAIRS, indirect=["original"])
def test_round_trip(original: Path, tmp_path: Path, target: str) -> None:
    there = convert(original, tmp_path / "there", "--to", target.split()[0], *TARGETS[target])
    back = convert(there, tmp_path / "back", "--to", "hf", "--max-shard-bytes", "100_000")
    assert_same(back, original)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    homes = {name: path.name for path in back.glob("*.safetensors") for name in load_file(path)}
    assert index["weight_map"] == homes and len(set(homes.values())) > 1
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors(back).values())


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", ["transformer_engine", "local"])
def test_from_one_foreign_format_to_the_next(original: Path, tmp_path: Path, layout: str) -> None:
    """hf -> meta -> megatron -> native -> megatron-llama -> meta -> hf: nothing is lost on the way."""
    at = convert(original, tmp_path / "0", "--to", "meta", "--tensor-model-parallel-size", "4")
    two = ("--tensor-model-parallel-size", "2")
    at = convert(at, tmp_path / "1", "--to", "megatron", *two, "--pipeline-model-parallel-size", "4", "--megatron-layout", layout)
    at = convert(at, tmp_path / "2", "--to", "native")
    at = convert(at, tmp_path / "3", "--to", "megatron-llama", *two)
    at = convert(at, tmp_path / "4", "--to", "meta", *two)
    assert_same(convert(at, tmp_path / "5", "--to", "hf"), original)


def test_the_file_of_one_shard_is_the_one_that_safetensors_writes(tmp_path: Path) -> None:
    """Folders may be named by options, too."""
    hf_model().save_pretrained(tmp_path / "hf")
    back = tmp_path / "back"
    assert main(["convert", "--src", str(convert(tmp_path / "hf", tmp_path / "m", "--to", "megatron")), "--to", "hf", "--dst", str(back)]) == 0
    assert sorted(path.name for path in back.iterdir()) == ["SHA256SUMS", "config.json", "generation_config.json", "model.safetensors"]
    with safe_open(back / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    prompt = torch.arange(48).view(1, 48) * 5 % 251
    assert torch.equal(*(LlamaForCausalLM.from_pretrained(folder)(prompt).logits for folder in (tmp_path / "hf", back)))


def test_old_bin_files_in_shards(tmp_path: Path) -> None:
    """One alone is read by tests/checkpoint/model_folders/test_weight_files.py."""
    model = hf_model(torch.bfloat16)
    model.save_pretrained(tmp_path / "new")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_bytes((tmp_path / "new" / "config.json").read_bytes())
    names = {name: f"pytorch_model-0000{1 + number % 2}-of-00002.bin" for number, name in enumerate(state)}
    for file in set(names.values()):
        torch.save({name: tensor for name, tensor in state.items() if names[name] == file}, old / file)
    (old / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    assert_same(convert(old, tmp_path / "back", "--to", "hf"), tmp_path / "new")


def test_a_folder_of_iterations_and_one_of_them(tmp_path: Path) -> None:
    """The tracker says which; a release and an iteration may be named themselves."""
    original = hf_folder(tmp_path / "hf")
    run = convert(original, tmp_path / "run", "--to", "megatron", "--tensor-model-parallel-size", "2")
    (run / "release").rename(run / "iter_0000300")
    (run / "latest_checkpointed_iteration.txt").write_text("300\n")
    assert_same(convert(run, tmp_path / "newest", "--to", "hf"), original)
    assert_same(convert(run / "iter_0000300", tmp_path / "named", "--to", "hf"), original)


@pytest.mark.long
def test_uneven_stages(tmp_path: Path) -> None:
    original = hf_folder(tmp_path / "hf", num_hidden_layers=40)
    words = ("--pipeline-model-parallel-size", "3", "--pipeline-layer-split", "13", "14", "13")
    for form in ("megatron", "megatron-llama"):
        run = convert(original, tmp_path / form, "--to", form, *words)
        args = loaded(rank_file(run, 0, 0))["args"]
        assert args.num_layers == 40 and args.pipeline_model_parallel_size == 3
        if form == "megatron":
            assert (args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers) == (13, 13)
            names = loaded(rank_file(run, 0, 1))["model"]
            assert {int(name.split(".")[2]) for name in names} == set(range(14))
        assert_same(convert(run, tmp_path / f"{form} back", "--to", "hf"), original)


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.bfloat16), ("float32", torch.float32), ("float16", torch.float16)])
def test_dtype(tmp_path: Path, dtype: str, expected: torch.dtype) -> None:
    original = hf_folder(tmp_path / "hf", torch.bfloat16)
    out = convert(original, tmp_path / "out", "--to", "megatron", "--dtype", dtype)
    found = loaded(rank_file(out))
    assert {tensor.dtype for tensor in found["model"].values()} == {expected} == {found["args"].params_dtype}
    wide = {name: tensor.float() for name, tensor in tensors(original).items()}
    assert torch.equal(found["model"]["decoder.final_layernorm.weight"].float(), wide["model.norm.weight"].to(expected).float())


def test_padding_of_the_target(tmp_path: Path) -> None:
    original = hf_folder(tmp_path / "hf", vocab_size=300)
    for multiple, rows in (("1", 150), ("64", 192), ("128", 256)):
        words = ("--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", multiple, "--overwrite")
        out = convert(original, tmp_path / "out", "--to", "megatron", *words)
        found = loaded(rank_file(out, 1))
        assert found["args"].padded_vocab_size == 2 * rows
        assert found["args"].vocab_size == 300 and found["args"].make_vocab_size_divisible_by == int(multiple)
        embedding = found["model"]["embedding.word_embeddings.weight"]
        assert embedding.shape == (rows, 64)
        assert torch.equal(embedding[: 300 - rows], tensors(original)["model.embed_tokens.weight"][rows:])
        assert not embedding[300 - rows :].any()
        assert_same(convert(out, tmp_path / "back", "--to", "hf", "--overwrite"), original)


def test_several_dtypes_become_the_one_that_holds_all(tmp_path: Path) -> None:
    original = hf_folder(tmp_path / "hf", torch.bfloat16)
    for path in original.glob("*.safetensors"):
        save_file({n: t.float() * 1.001 if "norm" in n else t for n, t in load_file(path).items()}, path, {"format": "pt"})
    out = convert(convert(original, tmp_path / "there", "--to", "megatron"), tmp_path / "out", "--to", "hf")
    assert {name: tensor.float() for name, tensor in tensors(original).items()}.keys() == tensors(out).keys()
    assert all(tensor.dtype == torch.float32 for tensor in tensors(out).values())
    assert all(torch.equal(tensors(out)[name], tensor.float()) for name, tensor in tensors(original).items())


def test_the_embedding_of_llama_3_is_cut_by_rows(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "tie_word_embeddings": True}
    original = hf_folder(tmp_path / "hf", torch.bfloat16, vocab_size=128_000, **small)
    out = convert(original, tmp_path / "meta", "--to", "meta", "--tensor-model-parallel-size", "2")
    found = torch.load(out / "consolidated.01.pth", weights_only=True)
    embedding = tensors(original)["model.embed_tokens.weight"]
    assert torch.equal(found["tok_embeddings.weight"], embedding[64_000:]) and torch.equal(found["output.weight"], embedding[64_000:])
    assert_same(convert(out, tmp_path / "back", "--to", "hf"), original)


def test_the_tokenizer_that_meta_puts_beside_the_folder(tmp_path: Path) -> None:
    original = hf_folder(tmp_path / "hf", vocab_size=1000)
    out = convert(original, tmp_path / "llama" / "7B", "--to", "meta")
    text = [topics[name] for name in sorted(topics)]
    train_tokenizer(text[:40], 900, tmp_path / "llama" / "tokenizer.model")
    back = convert(out, tmp_path / "back", "--to", "hf")
    assert (back / "tokenizer.model").read_bytes() == (tmp_path / "llama" / "tokenizer.model").read_bytes()


@pytest.mark.parametrize("form", ["hf", "native", "megatron", "megatron-llama", "meta"])
def test_tokenizer_template_and_generation_config_travel(tmp_path: Path, form: str) -> None:
    original = hf_folder(tmp_path / "hf", vocab_size=1000)
    text = [topics[name] for name in sorted(topics)]
    tokenizer = train_tokenizer(text[:40], 900, original / "tokenizer.model")
    tokenizer.save_hf(original)
    (original / "chat_template.jinja").write_text("{{ messages }}")
    (original / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [2, 7]}')
    out = convert(convert(original, tmp_path / "there", "--to", form), tmp_path / "back", "--to", "hf")
    ours, theirs = listing(out), listing(original)
    weights = {name for name in theirs if name.startswith("model") or name == "config.json"}
    assert {name: ours[name] for name in theirs.keys() - weights} == {name: theirs[name] for name in theirs.keys() - weights}
    assert_same(out, original)


def test_a_tokenizer_that_does_not_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original = hf_folder(tmp_path / "hf", vocab_size=800)
    train_tokenizer([topics[name] for name in sorted(topics)][:40], 900, original / "tokenizer.model")
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps({**config, "eos_token_id": [5, 7]}))
    convert(original, tmp_path / "out", "--to", "native")
    said = capsys.readouterr().out
    assert "note: the tokenizer has 900 tokens and the model 800: the model knows no id from 800 on\n" in said
    assert "note: eos_token_id is [5, 7], but the end token of the tokenizer is 2\n" in said


def test_overwrite_replaces_an_earlier_conversion(tmp_path: Path) -> None:
    original = hf_folder(tmp_path / "hf")
    out = convert(original, tmp_path / "out", "--to", "meta", "--tensor-model-parallel-size", "4")
    convert(original, out, "--to", "megatron", "--overwrite")
    assert {path.name for path in out.iterdir()} == {"SHA256SUMS", "generation_config.json", "latest_checkpointed_iteration.txt", "release"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def test_workers_write_the_same_files(tmp_path: Path) -> None:
    original = hf_folder(tmp_path / "hf")
    words = ("--to", "megatron", "--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size", "2")
    alone, together = (convert(original, tmp_path / n, *words, "--workers", n) for n in ("1", "5"))
    assert listing(alone) == listing(together)
    parts = convert(original, tmp_path / "native", "--to", "native", "--workers", "3")
    assert len(list(parts.glob("iter_0000000/*.distcp"))) == 3
    assert_same(convert(parts, tmp_path / "back", "--to", "hf"), original)


@pytest.mark.long
def test_summary_and_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original = hf_folder(tmp_path / "hf", torch.bfloat16, rope_parameters=LLAMA3)
    for form, lost in (
        ("megatron-llama", ["grouped-query attention", "rope_theta", "rope_scaling"]),
        ("megatron", ["rope_scaling other than LLaMA 3.1's but for its factor"]),
        ("meta", ["rope_scaling"]),
        ("native", []),
    ):
        convert(original, tmp_path / form, "--to", form)
        *notes, last = capsys.readouterr().out.splitlines()
        assert [line.split(":")[1].strip() for line in notes] == lost
        assert last.startswith(f"converted hf {original} to {form} {tmp_path}/{form} (bfloat16, ")
    plain = hf_folder(tmp_path / "plain", num_key_value_heads=8, rope_parameters=None)
    for form in ("megatron", "megatron-llama", "meta"):
        convert(plain, tmp_path / f"{form} plain", "--to", form)
        assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_bar_with_bytes_on_a_terminal_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    original = hf_folder(tmp_path / "hf")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with monkeypatch.context() as patch, os.fdopen(theirs, "w") as terminal:
        patch.setattr(sys, "stderr", terminal)
        convert(original, tmp_path / "a", "--to", "meta")
    shown = b""
    with suppress(OSError):  # what reading of a terminal says that is closed on the other side
        while block := os.read(ours, 4096):
            shown += block
    assert b"100%" in shown
    capsys.readouterr()
    convert(original, tmp_path / "b", "--to", "meta")
    quiet = capsys.readouterr()
    assert quiet.err == "" and quiet.out.startswith("converted hf ")
