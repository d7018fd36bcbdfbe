"""What cannot be converted is refused with all that is wrong, by name; nothing is written and nothing is lost."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_llama as ml
import pytest
import torch
from megatron_llama.cli import main
from megatron_llama.errors import ConfigError
from safetensors.torch import load_file, save_file

from tests.checkpoint.cases import full_disk
from tests.checkpoint.model_folders.test_hf import tensors
from tests.checkpoint.model_folders.test_torch_file import Attack
from tests.converter.converting import LLAMA31, assert_same, convert, hf_folder, rank_file, refusal, rewrite
from tests.flipped import flip
from tests.refused import all_refused, refused

Capture = pytest.CaptureFixture[str]
GRID = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("hf") / "model")


def without(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        delattr(args, name)


TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"
TRACKER = "latest_checkpointed_iteration.txt"
FOLDERS = "checkpoint.model_folders.tracked_folder.find_folder"
SPLIT = "--pipeline-layer-split"


@pytest.mark.parametrize(
    ("option", "value", "form", "formats"),
    [
        (TP, "2", "hf", "megatron or megatron-llama or torch_dist or meta"),
        (PP, "2", "meta", "megatron or megatron-llama"),
        (SPLIT, "2", "meta", "megatron or megatron-llama"),
        ("--make-vocab-size-divisible-by", "2", "native", "megatron or megatron-llama or torch_dist"),
        ("--megatron-layout", "legacy", "megatron-llama", "megatron"),
        ("--max-shard-bytes", "2", "meta", "hf"),
    ],
)
def test_options_of_other_formats(hf: Path, tmp_path: Path, capsys: Capture, option: str, value: str, form: str, formats: str) -> None:
    said = refused(refusal(capsys, hf, tmp_path / "out", "--to", form, option, value, status=2))
    assert (said.key, said.where, said.expected) == ("converter.api.convert.convert", option, f"--to {formats}")


@pytest.mark.parametrize(
    ("words", "key", "got"),
    [
        ([], "config.parse.parse", "nothing"),
        (["--to", "gguf"], "config.parse._Reader._read_option", "gguf"),
        (["--to", "megatron", TP, "0"], "converter.api.convert.convert:2", "0"),
        (["--to", "hf", "--workers", "0"], "converter.api.convert.convert:2", "0"),
        (["--to", "hf", "--vocab-size", "-1"], "converter.api.convert.convert:3", "-1"),
        (["--to", "megatron", TP, "8"], "converter.megatron.writer.MegatronWriter.problems", "num_key_value_heads 4"),
        (["--to", "meta", TP, "8"], "converter.meta.names.split_problems", "num_key_value_heads 4, vocab_size 300"),
        (["--to", "megatron", PP, "3"], "converter.api.convert._split:2", "4 blocks for 3 stages"),
        (["--to", "megatron", *GRID, SPLIT, "2", "1"], "converter.api.convert._split", "2 1 for 2 stages"),
        (["--to", "megatron", *GRID, SPLIT, "4", "0"], "converter.api.convert._split", "4 0 for 2 stages"),
        (["--to", "megatron", SPLIT, "2", "2"], "converter.api.convert._split", "2 2 for 1 stages"),
    ],
)
def test_wrong_options(hf: Path, tmp_path: Path, capsys: Capture, words: list[str], key: str, got: str) -> None:
    said = all_refused(refusal(capsys, hf, tmp_path / "out", *words, status=2))
    assert ({each.key for each in said}, ", ".join(each.got for each in said)) == ({key}, got)


@pytest.mark.parametrize("form", ["hf", "native", "megatron", "megatron-llama", "meta"])
def test_what_is_there_stays(hf: Path, tmp_path: Path, capsys: Capture, form: str) -> None:
    out = convert(hf, tmp_path / "out", "--to", form)
    assert refused(refusal(capsys, hf, out, "--to", form)).key == "converter.convert.require_free:3"
    (out / "thesis.tex").write_text("mine")
    said = refused(refusal(capsys, hf, out, "--to", form, "--overwrite"))
    assert (said.key, said.got) == ("checkpoint.folders.require_replaceable", "a folder with thesis.tex")


def test_a_run_is_never_replaced(hf: Path, tmp_path: Path, capsys: Capture) -> None:
    run = convert(hf, tmp_path / "run", "--to", "native")
    (run / "iter_0000000").rename(run / "iter_0000100")
    assert refused(refusal(capsys, hf, run, "--to", "native", "--overwrite")).got == "a folder with iter_0000100"


def test_source_and_target_are_apart(hf: Path, tmp_path: Path, capsys: Capture) -> None:
    for target in (hf, hf / "inner", hf.parent):
        assert refused(refusal(capsys, hf, target, "--to", "meta", "--overwrite")).key == "converter.convert.require_free"
    (tmp_path / "file").write_text("")
    assert refused(refusal(capsys, hf, tmp_path / "file", "--to", "meta")).key == "converter.convert.require_free:2"


@pytest.mark.parametrize("form", ["hf", "native", "megatron", "meta"])
def test_a_full_disk_leaves_what_was_there(hf: Path, tmp_path: Path, capsys: Capture, form: str) -> None:
    out = convert(hf, tmp_path / "out", "--to", "hf")
    with full_disk(20_000):
        said = refused(refusal(capsys, hf, out, "--to", form, "--overwrite"))
    assert (said.key, said.got) == ("checkpoint.failures.not_written", "File too large")
    assert_same(out, hf)


@pytest.mark.parametrize("form", ["hf", "native", "megatron", "megatron-llama", "meta"])
def test_folders_of_no_or_of_several_formats(hf: Path, tmp_path: Path, capsys: Capture, form: str) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert refused(refusal(capsys, empty, tmp_path / "out", "--to", form)).key == "checkpoint.model_folders.formats.detect:3"
    assert refused(refusal(capsys, tmp_path / "none", tmp_path / "out", "--to", form)).key == "checkpoint.model_folders.formats.detect"
    both = convert(hf, tmp_path / "both", "--to", "meta")
    (both / "SHA256SUMS").unlink()
    shutil.copytree(hf, both, dirs_exist_ok=True)
    said = refused(refusal(capsys, both, tmp_path / "out", "--to", form))
    assert (said.key, said.got) == ("checkpoint.model_folders.formats.detect:2", "weights of 2 formats: hf, meta")
    assert_same(convert(convert(both, tmp_path / "x", "--to", form, "--from", "meta"), tmp_path / "y", "--to", "hf"), hf)


@pytest.fixture
def megatron(hf: Path, tmp_path: Path) -> Path:
    return convert(hf, tmp_path / "megatron", "--to", "megatron", *GRID, "--megatron-layout", "legacy")


def content_of(change: Callable[[Any], object], tp: int = 0, pp: int | None = 0) -> Callable[[Path], None]:
    """Change what the file of a rank holds."""
    return lambda run: rewrite(rank_file(run, tp, pp), change)


def without_stage(run: Path) -> None:
    for tp in range(2):
        shutil.rmtree(rank_file(run, tp, 1).parent)


def without_layer(content: Any) -> None:
    for name in [name for name in content["model"] if ".layers.3." in name]:
        del content["model"][name]


GRIDS = {"2 2": (*GRID, "--megatron-layout", "legacy"), "1 2": (PP, "2"), "1 1": (), "legacy": ("--megatron-layout", "legacy"), "meta": ()}
META = "consolidated.00.pth"
OF_META: Callable[[Callable[[Any], object]], Callable[[Path], None]] = lambda change: lambda run: rewrite(run / META, change)  # noqa: E731
DAMAGES: dict[str, tuple[str, Callable[[Path], object], str, str, str]] = {
    "signs of both families": ("2 2", content_of(lambda c: setattr(c["args"], "causal_lm", True)), "reader.family", "", "signs of both "),
    "another iteration": (
        "2 2", content_of(lambda c: c.update(iteration=200), 0, 1), "reader.MegatronReader._other_runs",
        "mp_rank_00_001/model_optim_rng.pt iteration", "200"),
    "no second stage": ("2 2", without_stage, "reader.MegatronReader._file_problems:2", "", "2"),
    "two folders of a rank": (
        "2 2", lambda run: shutil.copytree(rank_file(run, 0, 0).parent, run / "release" / "mp_rank_00"), "reader.rank_files", "mp_rank_00_000", ""),
    "no file of 0 1": ("2 2", lambda run: rank_file(run, 0, 1).unlink(), "reader.open_files", " tensor rank 0, pipeline rank 1", ""),
    "no file of 1 0": ("2 2", lambda run: rank_file(run, 1, 0).unlink(), "reader.open_files", " tensor rank 1, pipeline rank 0", ""),
    "a rank of nine digits, whose missing files are not all listed": (
        "2 2", lambda run: (run / "release" / "mp_rank_999999999_999").mkdir(), "reader.open_files", "", "no file"),
    "a tracker of nothing": ("2 2", lambda run: (run / TRACKER).write_text("100"), f"{FOLDERS}:2", TRACKER, "100"),
    "a tracker out of the folder": ("2 2", lambda run: (run / TRACKER).write_text("../release"), f"{FOLDERS}:2", TRACKER, "../release"),
    "an empty tracker": ("2 2", lambda run: (run / TRACKER).write_text("\n"), f"{FOLDERS}:2", TRACKER, ""),
    "no tracker": ("2 2", lambda run: (run / TRACKER).unlink(), FOLDERS, TRACKER, "no readable file"),
    "heads from before version 2": (
        "legacy", content_of(lambda c: c.update(checkpoint_version=1.0), pp=None), "reader.MegatronReader._file_problems:4", "", "1.0"),
    "fewer chunks": (
        "1 2", content_of(lambda c: c.update(model0=c["model"], model1=c.pop("model"))), "reader.MegatronReader._ordered",
        "mp_rank_00_001/model_optim_rng.pt", ""),
    "a window below 0": ("1 1", content_of(lambda c: setattr(c["args"], "window_size", (-2, 0)), pp=None), "args.require_kinds", "", ""),
    "a version in words": (
        "1 1", content_of(lambda c: c.update(checkpoint_version="three"), pp=None), "reader.MegatronReader._file_problems:3", "", ""),
    "no embedding": (
        "1 1", content_of(lambda c: c["model"].pop("embedding.word_embeddings.weight"), pp=None), "reader.MegatronReader.__init__:2", "", ""),
    "no fourth layer": ("1 1", content_of(without_layer, pp=None), "reader.MegatronReader._add_tensors:2", "", ""),
    "Meta's, no embedding": (
        "meta", OF_META(lambda c: c.pop("tok_embeddings.weight")), "reader.MetaReader._tensor", f"{META} tok_embeddings.weight", ""),
    "Meta's, no matrix": (
        "meta", OF_META(lambda c: c.pop("layers.1.attention.wq.weight")), "reader.MetaReader._add_tensors:2",
        f"{META} layers.1.attention.wq.weight", ""),
    "Meta's, a bias": ("meta", OF_META(lambda c: c.update({"bias": torch.zeros(3)})), "reader.MetaReader._add_tensors:3", f"{META} bias", ""),
}  # fmt: skip
"""How the source is made, what is done to it, the place in the reader that says so, the end of where, and the beginning of what was found."""


@pytest.mark.parametrize("name", DAMAGES)
def test_a_source_that_is_no_whole_model(hf: Path, tmp_path: Path, capsys: Capture, name: str) -> None:
    grid, damage, key, where, got = DAMAGES[name]
    form = "meta" if grid == "meta" else "megatron"
    source = convert(hf, tmp_path / "source", "--to", form, *GRIDS[grid])
    damage(source)
    said = all_refused(refusal(capsys, source, tmp_path / "out", "--to", "hf"))[0]
    assert said.key.removeprefix(f"converter.{form}.") == key and said.where.endswith(where) and said.got.startswith(got)


def test_the_order_of_heads_is_never_guessed(megatron: Path, tmp_path: Path, capsys: Capture) -> None:
    """With the names of both families and the arguments of neither only the user can tell."""
    for tp in range(2):
        for pp in range(2):
            rewrite(
                rank_file(megatron, tp, pp),
                lambda content: without(content["args"], "normalization", "group_query_attention", "rotary_base"),
            )
    said = refused(refusal(capsys, megatron, tmp_path / "out", "--to", "hf"))
    assert said.key == "converter.megatron.reader.family" and said.got.startswith("neither ")
    convert(megatron, tmp_path / "right", "--to", "hf", "--from", "megatron")
    convert(megatron, tmp_path / "wrong", "--to", "hf", "--from", "megatron-llama")
    right, wrong = tensors(tmp_path / "right"), tensors(tmp_path / "wrong")
    different = {name.split(".")[-2] for name in right if not torch.equal(right[name], wrong[name])}
    assert different == {"q_proj", "k_proj", "v_proj"}


def test_files_in_wrong_places(hf: Path, megatron: Path, tmp_path: Path, capsys: Capture) -> None:
    one, other, aside = rank_file(megatron, 0, 0), rank_file(megatron, 1, 0), tmp_path / "aside"
    for source, target in ((one, aside), (other, one), (aside, other)):
        shutil.move(source, target)
    one, other = all_refused(refusal(capsys, megatron, tmp_path / "out", "--to", "hf"))
    assert one.key == other.key == "converter.megatron.reader.MegatronReader._file_problems"
    assert "mp_rank_00_000" in one.where and (one.got, one.expected) == ("the file of tensor rank 1, pipeline rank 0", "that of 0 and 0")


def test_a_file_of_another_model(hf: Path, megatron: Path, tmp_path: Path, capsys: Capture) -> None:
    """Of the same shapes, and without our note of the rank: the copies of its norms are others."""
    rewrite(rank_file(megatron, 1, 1), lambda content: without(content["args"], "stored_ranks"))

    def exchange(content: Any) -> None:
        encoder = content["model"]["language_model"]["encoder"]
        encoder["final_layernorm.weight"] = encoder["final_layernorm.weight"] * 2

    rewrite(rank_file(megatron, 1, 1), exchange)
    said = refused(refusal(capsys, megatron, tmp_path / "out", "--to", "hf"))
    assert said.key == "converter.tensor_map.TensorReader.add:3"
    assert said.where.endswith("mp_rank_01_001/model_optim_rng.pt language_model.encoder.final_layernorm.weight")
    wider = convert(hf_folder(tmp_path / "wide", intermediate_size=128), tmp_path / "other", "--to", "megatron", *GRID)
    shutil.copy(rank_file(wider, 1, 1), rank_file(megatron, 1, 1))
    said, _ = all_refused(refusal(capsys, megatron, tmp_path / "out", "--to", "hf"))
    assert (said.key, said.got) == ("converter.megatron.reader.MegatronReader._other_runs", "128")
    assert said.where.endswith("mp_rank_01_001/model_optim_rng.pt args.ffn_hidden_size")


@pytest.mark.parametrize("form", ["megatron", "meta", "bin"])
@pytest.mark.parametrize("kind", ["malicious", "cut", "flipped", "foreign"])
def test_spoilt_files(hf: Path, tmp_path: Path, capsys: Capture, form: str, kind: str) -> None:
    if form == "bin":
        source = tmp_path / "source"
        source.mkdir()
        shutil.copy(hf / "config.json", source)
        path = source / "pytorch_model.bin"
        torch.save(tensors(hf), path)
    else:
        source = convert(hf, tmp_path / "source", "--to", form)
        path = rank_file(source) if form == "megatron" else source / "consolidated.00.pth"
    if kind == "malicious":
        rewrite(path, lambda content: content.update(evil=Attack(tmp_path / "made")))
    elif kind == "foreign":
        torch.save([1, 2, 3], path)
    else:
        content = bytearray(path.read_bytes())
        content[content.index(tensors(hf)["model.embed_tokens.weight"][:8].numpy().tobytes()) + 100] ^= 4
        path.write_bytes(content[:-100] if kind == "cut" else content)
    said = refusal(capsys, source, tmp_path / "out", "--to", "native")
    assert str(path) in said and not (tmp_path / "made").exists()
    assert "got a pickle that calls posix.mkdir" in said or kind != "malicious"


def test_an_unknown_vocabulary_is_never_exported_as_padding(hf: Path, tmp_path: Path, capsys: Capture) -> None:
    source = convert(hf, tmp_path / "source", "--to", "megatron")
    shutil.copy(hf / "config.json", tmp_path / "config.json")
    unknown = ("orig_vocab_size", "vocab_size", "hf_config")
    rewrite(rank_file(source), lambda content: without(content["args"], *unknown))
    said = refused(refusal(capsys, source, tmp_path / "out", "--to", "hf"))
    assert said.where.endswith("vocabulary") and said.got.startswith("384 rows, ") and "--vocab-size" in said.do
    for wrong in ("385", "10000"):
        said = refused(refusal(capsys, source, tmp_path / "out", "--to", "hf", "--vocab-size", wrong))
        assert (said.got, said.expected.startswith("at most the 384 stored rows")) == (wrong, True)
    convert(source, tmp_path / "out", "--to", "hf", "--vocab-size", "300")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 300
    assert_same(convert(source, tmp_path / "exact", "--to", "hf", "--hf-config", str(tmp_path / "config.json")), hf)


def test_the_vocabulary_of_a_tokenizer_beside_it(tmp_path: Path, capsys: Capture) -> None:
    from pydoc_data.topics import topics

    from megatron_llama.data.tokenizer.spm import train_tokenizer

    original = hf_folder(tmp_path / "hf", vocab_size=900)
    train_tokenizer([topics[name] for name in sorted(topics)][:40], 900, original / "tokenizer.model")
    source = convert(original, tmp_path / "source", "--to", "megatron")
    rewrite(rank_file(source), lambda content: without(content["args"], "orig_vocab_size", "vocab_size", "hf_config"))
    convert(source, tmp_path / "out", "--to", "hf")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [config[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")] == [900, 1, 2], "the end token is the tokenizer's"
    # Were the rows not what padding 900 gives, some might be tokens that the tokenizer does not know.
    rewrite(rank_file(source), lambda content: setattr(content["args"], "make_vocab_size_divisible_by", 1))
    assert "(the tokenizer has 900)" in refusal(capsys, source, tmp_path / "no", "--to", "hf")


@pytest.mark.long
@pytest.mark.parametrize("form", ["megatron", "meta"])
def test_a_tokenizer_may_have_added_tokens_without_rows(hf: Path, tmp_path: Path, capsys: Capture, form: str) -> None:
    """The usual [PAD], behind a vocabulary that is full; a tokenizer that is larger by itself is another model's."""
    source = convert(hf, tmp_path / "source", "--to", form)
    vocab = {f"w{number}": number for number in range(300)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": id, "content": f"[PAD{id}]", "special": True, **flags} for id in range(300, 390)]
    (source / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": added, "model": model}))
    for options in ((), ("--vocab-size", "300")):
        out = convert(source, tmp_path / f"out{len(options)}", "--to", "hf", *options)
        assert json.loads((out / "config.json").read_text())["vocab_size"] == 300
    model["vocab"] = {**vocab, "one": 300}
    (source / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    said = refused(refusal(capsys, source, tmp_path / "no", "--to", "hf"))
    assert said.got == "300" and said.expected.endswith("and at least the tokenizer's 301")


def test_other_words_on_the_vocabulary(hf: Path, tmp_path: Path, capsys: Capture) -> None:
    for form in ("megatron", "native", "meta", "hf"):
        source = convert(hf, tmp_path / form, "--to", form)
        said = refused(refusal(capsys, source, tmp_path / "out", "--to", "hf", "--vocab-size", "299"))
        assert (said.where, said.got) == ("--vocab-size", "299") and said.expected.startswith("300")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("num_experts", 8, "None: in this format dense models alone are read"),
        ("swiglu", False, "True"),
        ("normalization", "LayerNorm", "RMSNorm"),
        ("rotary_percent", 0.5, "1.0, by the config of a llama"),
        ("no_rope_freq", 4, "None"),
        ("window_size", (128, 0), "None, by the config of a llama"),
        ("glu_linear_offset", 1.0, "0.0"),
        ("position_embedding_type", "learned_absolute", "rope"),
        ("num_layers", 6, "4, by the config"),
        ("tensor_model_parallel_size", 4, "1, by the folders"),
    ],
)
def test_arguments_of_other_models(hf: Path, tmp_path: Path, capsys: Capture, name: str, value: Any, expected: str) -> None:
    source = convert(hf, tmp_path / "source", "--to", "megatron")
    rewrite(rank_file(source), lambda content: setattr(content["args"], name, value))
    said = all_refused(refusal(capsys, source, tmp_path / "out", "--to", "hf"))
    assert [(each.got, each.expected) for each in said if each.where.endswith(name)] == [(str(value), expected)]


def test_tensors_that_are_missing_wrong_or_too_many(hf: Path, tmp_path: Path, capsys: Capture) -> None:
    source = convert(hf, tmp_path / "source", "--to", "megatron", "--megatron-layout", "local")

    def spoil(content: Any) -> None:
        model = content["model"]
        del model["decoder.layers.1.mlp.linear_fc2.weight"]
        model["decoder.layers.2.mlp.linear_fc1.weight"] = torch.zeros(10, 64)
        model["decoder.layers.3.self_attention.linear_qkv.bias"] = torch.zeros(128)
        model["decoder.layers.0.input_layernorm.weight"] = torch.zeros(64, dtype=torch.int8)

    rewrite(rank_file(source), spoil)
    said = all_refused(refusal(capsys, source, tmp_path / "out", "--to", "hf"))
    assert {(each.key.removeprefix("converter."), each.where.rpartition(" ")[2], each.got) for each in said} == {
        ("tensor_map.TensorReader.add:2", "decoder.layers.0.input_layernorm.weight", "torch.int8"),
        ("tensor_map.TensorReader.add", "decoder.layers.2.mlp.linear_fc1.weight", "shape (10, 64)"),
        ("megatron.reader.MegatronReader._add_chunk", str(rank_file(source)), "no such tensor"),
        ("megatron.reader.MegatronReader._add_chunk:2", "decoder.layers.3.self_attention.linear_qkv.bias", "a tensor"),
    }
    assert [each.expected for each in said if each.got == "no such tensor"] == ["model.layers.1.mlp.down_proj.weight of shape (64, 96)"]


def test_words_that_only_python_can_give(hf: Path, tmp_path: Path) -> None:
    """A command line's parser knows the choices."""
    with pytest.raises(ConfigError) as raised:
        ml.convert(hf, tmp_path / "out", to="gguf")
    assert (refused(raised.value).key, refused(raised.value).got) == ("converter.api.convert.convert:4", "gguf")
    with pytest.raises(ConfigError) as raised:
        ml.merge(hf, tmp_path / "out", dtype="int8")
    assert (refused(raised.value).key, refused(raised.value).got) == ("converter.api.merge.merge", "int8")


def test_meta_folders_that_do_not_fit(hf: Path, tmp_path: Path, capsys: Capture) -> None:
    source = convert(hf, tmp_path / "source", "--to", "meta", "--tensor-model-parallel-size", "2")
    out = tmp_path / "out"
    os.rename(source / "consolidated.01.pth", tmp_path / "aside")
    said = refused(refusal(capsys, source, out, "--to", "hf"))
    assert (said.key, said.got, said.expected) == ("converter.meta.reader.MetaReader._model:3", "150 rows in 1 files", "300")
    os.rename(tmp_path / "aside", source / "consolidated.02.pth")
    said = refused(refusal(capsys, source, out, "--to", "hf"))
    assert said.key == "converter.meta.reader.MetaReader.__init__"
    assert (said.got, said.expected) == ("consolidated.00.pth, consolidated.02.pth", "consolidated.00.pth, consolidated.01.pth")
    os.rename(source / "consolidated.02.pth", source / "consolidated.01.pth")
    rewrite(source / "consolidated.01.pth", lambda content: content.update({"norm.weight": torch.zeros(64)}))
    said = refused(refusal(capsys, source, out, "--to", "hf"))
    assert said.key == "converter.tensor_map.TensorReader.add:3" and said.where.endswith("consolidated.01.pth norm.weight")
    params = json.loads((source / "params.json").read_text())
    (source / "params.json").write_text(json.dumps(params | {"n_layers": 5, "use_scaled_rope": True}))
    layers, scaled = all_refused(refusal(capsys, source, out, "--to", "hf"))
    assert layers.key == "converter.meta.reader.MetaReader._model:5" and (layers.got, layers.expected) == ("5", "4, by the config")
    assert scaled.key == "converter.meta.reader.MetaReader._model:6" and (scaled.got, scaled.expected) == ("True", "false, by the config")
    (source / "params.json").write_text(json.dumps({name: value for name, value in params.items() if name != "dim"}))
    said = refused(refusal(capsys, source, out, "--to", "hf"))
    assert said.key == "converter.meta.reader.MetaReader._model" and said.where.endswith("params.json dim")
    (source / "params.json").write_text(json.dumps(params | {"vocab_size": "300"}))
    said = refused(refusal(capsys, source, out, "--to", "hf"))
    assert said.where.endswith("params.json vocab_size") and said.got == "'300'"
    newer = {"use_qk_norm": True, "nope_layer_interval": 4, "quantization_args": None, "max_batch_size": 4}
    (source / "params.json").write_text(json.dumps(params | newer))
    said = all_refused(refusal(capsys, source, out, "--to", "hf"))
    assert {each.key for each in said} == {"converter.meta.reader.MetaReader._model:2"}
    assert {each.where.rpartition(" ")[2]: each.got for each in said} == {"use_qk_norm": "True", "nope_layer_interval": "4"}


def test_what_metas_files_leave_open(tmp_path: Path, capsys: Capture) -> None:
    original = hf_folder(tmp_path / "hf", rope_parameters=LLAMA31)
    source = convert(original, tmp_path / "source", "--to", "meta")
    os.rename(source / "config.json", tmp_path / "config.json")
    said = all_refused(refusal(capsys, source, tmp_path / "out", "--to", "hf"))
    assert {each.key for each in said} == {"converter.meta.reader.MetaReader._model:4"}
    assert {each.where.rpartition(" ")[2] for each in said} == {"max_position_embeddings", "rope_scaling"}
    assert_same(convert(source, tmp_path / "out", "--to", "hf", "--hf-config", str(tmp_path / "config.json")), original)


def test_a_head_is_not_lost_to_a_config_that_ties_it(hf: Path, tmp_path: Path, capsys: Capture) -> None:
    keys = {"meta": "converter.meta.reader.MetaReader.__init__:2", "megatron": "converter.megatron.args._contradictions:2"}
    for form, key in keys.items():
        source = convert(hf, tmp_path / form, "--to", form)
        tied = json.loads((hf / "config.json").read_text()) | {"tie_word_embeddings": True}
        (tmp_path / "config.json").write_text(json.dumps(tied))
        said = refusal(capsys, source, tmp_path / "out", "--to", "hf", "--hf-config", str(tmp_path / "config.json"))
        assert refused(said).key == key


def test_a_stored_head_is_not_lost_to_a_config_that_ties_it(tmp_path: Path, capsys: Capture) -> None:
    """transformers computes with the stored head, and with the embedding where both are the same."""
    folder = hf_folder(tmp_path / "hf", tie_word_embeddings=True)
    original = convert(folder, tmp_path / "original", "--to", "hf")
    [shard] = [path for path in folder.glob("*.safetensors") if "model.embed_tokens.weight" in load_file(path)]
    weights = load_file(shard)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, shard, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["lm_head.weight"] = shard.name
    index.write_text(json.dumps(listed))
    assert_same(convert(folder, tmp_path / "copy", "--to", "hf"), original)
    weights["lm_head.weight"][-1, -1] += 1
    save_file(weights, shard, {"format": "pt"})
    key = "checkpoint.model_folders.hf.reader.HFWeights._head_problems"
    assert refused(refusal(capsys, folder, tmp_path / "out", "--to", "hf")).key == key
    save_file({**weights, "lm_head.weight": weights["lm_head.weight"][1:].clone()}, shard, {"format": "pt"})
    assert refused(refusal(capsys, folder, tmp_path / "out", "--to", "native")).key == key


@pytest.mark.parametrize("to", ["native", "hf", "megatron", "meta"])
def test_damaged_weights_are_not_converted(to: str, tmp_path: Path, capsys: Capture) -> None:
    folder = hf_folder(tmp_path / "hf")
    [shard] = [path for path in folder.glob("*.safetensors") if "model.norm.weight" in load_file(path)]
    weights = load_file(shard)
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, shard, {"format": "pt"})
    assert refused(refusal(capsys, folder, tmp_path / "out", "--to", to)).expected.startswith("finite values")


def test_a_config_of_a_native_checkpoint_is_its_own(hf: Path, tmp_path: Path, capsys: Capture) -> None:
    source = convert(hf, tmp_path / "source", "--to", "native")
    said = refused(refusal(capsys, source, tmp_path / "out", "--to", "hf", "--hf-config", str(hf / "config.json")))
    assert said.expected.startswith("none for a native checkpoint")


def test_a_flipped_bit_of_an_earlier_conversion(hf: Path, tmp_path: Path, capsys: Capture) -> None:
    """safetensors has no checksums: the list beside the files has."""
    source = convert(hf, tmp_path / "source", "--to", "hf")
    flip(source / "model.safetensors", -1)
    said = refusal(capsys, source, tmp_path / "out", "--to", "megatron")
    assert re.search(r"model.safetensors: got sha256 \w{64}, expected sha256 \w{64}, by SHA256SUMS; copy the file again", said)
    assert main(["verify", str(hf), str(source)]) == 1
    assert "by SHA256SUMS" in capsys.readouterr().err
    (source / "SHA256SUMS").unlink()
    convert(source, tmp_path / "out", "--to", "megatron")


@pytest.mark.parametrize("listed", ["SHA256SUMS", "checklist.chk"])
def test_metas_files_that_stand_for_each_other(listed: str, hf: Path, tmp_path: Path, capsys: Capture) -> None:
    """Nothing in a file says of which rank it is: our list does, and the one that comes with Meta's downloads."""
    source = convert(hf, tmp_path / "source", "--to", "meta", "--tensor-model-parallel-size", "2")
    files = [source / "consolidated.00.pth", source / "consolidated.01.pth"]
    if listed == "checklist.chk":
        (source / "SHA256SUMS").unlink()
        (source / listed).write_text("".join(f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files))
    convert(source, tmp_path / "sound", "--to", "hf")
    files[0].rename(tmp_path / "first")
    files[1].rename(files[0])
    (tmp_path / "first").rename(files[1])
    said = refusal(capsys, source, tmp_path / "out", "--to", "hf")
    assert all(re.search(rf"{path.name}: got \w+ \w+, expected \w+ \w+, by {listed}", said) for path in files)
