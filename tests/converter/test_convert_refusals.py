"""What cannot be converted is refused with all that is wrong, by name; nothing is written and nothing is lost."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_llama.cli import main
from safetensors.torch import load_file, save_file

from tests.checkpoint.cases import full_disk
from tests.checkpoint.model_folders.test_hf import same, tensors
from tests.checkpoint.model_folders.test_torch_file import Attack
from tests.converter.converting import LLAMA31, assert_same, convert, hf_folder, loaded, rank_file, refusal

Capture = pytest.CaptureFixture[str]
GRID = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("hf") / "model")


def rewrite(path: Path, change: Callable[[Any], object]) -> None:
    """Change the content of a file, as somebody does who knows of the list of checksums."""
    for folder in list(path.parents)[:3]:
        (folder / "SHA256SUMS").unlink(missing_ok=True)
    content = loaded(path)
    change(content)
    torch.save(content, path)


def without(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        delattr(args, name)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--to", "hf", "--tensor-model-parallel-size", "2"],
            "--tensor-model-parallel-size: got 2, expected --to megatron or megatron-llama or torch_dist or meta; leave it out",
        ),
        (
            ["--to", "meta", "--pipeline-model-parallel-size", "2"],
            "--pipeline-model-parallel-size: got 2, expected --to megatron or megatron-llama",
        ),
        (["--to", "meta", "--pipeline-layer-split", "2"], "--pipeline-layer-split: got (2,), expected --to megatron or megatron-llama"),
        (["--to", "native", "--make-vocab-size-divisible-by", "2"], "--make-vocab-size-divisible-by: got 2, expected --to megatron or"),
        (["--to", "megatron-llama", "--megatron-layout", "legacy"], "--megatron-layout: got legacy, expected --to megatron; leave it out"),
        (["--to", "meta", "--max-shard-bytes", "2"], "--max-shard-bytes: got 2, expected --to hf; leave it out"),
        (["--to", "megatron", "--tensor-model-parallel-size", "0"], "--tensor-model-parallel-size: got 0, expected at least 1"),
        (["--to", "hf", "--workers", "0"], "--workers: got 0, expected at least 1"),
        (["--to", "hf", "--vocab-size", "-1"], "--vocab-size: got -1, expected 0 or more"),
        (["--to", "gguf"], "--to: got gguf, expected one of hf, native, megatron, megatron-llama, meta, torch_dist"),
        ([], "--to: got nothing, expected one of hf, native"),
        (
            ["--to", "megatron", "--tensor-model-parallel-size", "8"],
            "--tensor-model-parallel-size 8: got num_key_value_heads 4, expected a multiple of 8; give one that divides 4",
        ),
        (
            ["--to", "meta", "--tensor-model-parallel-size", "8"],
            "8 files: got num_key_value_heads 4, expected a multiple of 8; give another number",
        ),
        (
            ["--to", "megatron", "--pipeline-model-parallel-size", "3"],
            "--pipeline-model-parallel-size: got 4 blocks for 3 stages, expected a divisor of the blocks; or give 3 numbers whose sum is 4: --pipeline-layer-split",
        ),
        (
            ["--to", "megatron", *GRID, "--pipeline-layer-split", "2", "1"],
            "--pipeline-layer-split: got 2 1 for 2 stages, expected 2 numbers above 0 whose sum is 4",
        ),
        (["--to", "megatron", *GRID, "--pipeline-layer-split", "4", "0"], "--pipeline-layer-split: got 4 0 for 2 stages"),
        (["--to", "megatron", "--pipeline-layer-split", "2", "2"], "--pipeline-layer-split: got 2 2 for 1 stages"),
    ],
)
def test_wrong_options(hf: Path, tmp_path: Path, capsys: Capture, words: list[str], says: str) -> None:
    assert says in refusal(capsys, hf, tmp_path / "out", *words, status=2)


def test_forty_blocks_do_not_become_thirty_nine(tmp_path: Path, capsys: Capture) -> None:
    original = hf_folder(tmp_path / "hf", num_hidden_layers=40)
    said = refusal(capsys, original, tmp_path / "out", "--to", "megatron", "--pipeline-model-parallel-size", "3", status=2)
    assert "got 40 blocks for 3 stages" in said


@pytest.mark.parametrize("form", ["hf", "native", "megatron", "megatron-llama", "meta"])
def test_what_is_there_stays(hf: Path, tmp_path: Path, capsys: Capture, form: str) -> None:
    out = convert(hf, tmp_path / "out", "--to", form)
    assert "out: got a folder that is there already, expected none; give another path, or replace it with --overwrite" in refusal(
        capsys, hf, out, "--to", form
    )
    (out / "thesis.tex").write_text("mine")
    said = refusal(capsys, hf, out, "--to", form, "--overwrite")
    assert "out: got a folder with thesis.tex, expected an earlier conversion; give another path" in said


def test_a_run_is_never_replaced(hf: Path, tmp_path: Path, capsys: Capture) -> None:
    run = convert(hf, tmp_path / "run", "--to", "native")
    (run / "iter_0000000").rename(run / "iter_0000100")
    assert "got a folder with iter_0000100" in refusal(capsys, hf, run, "--to", "native", "--overwrite")


def test_source_and_target_are_apart(hf: Path, tmp_path: Path, capsys: Capture) -> None:
    for target in (hf, hf / "inner", hf.parent):
        assert "a folder that holds, or lies in, the source" in refusal(capsys, hf, target, "--to", "meta", "--overwrite")
    (tmp_path / "file").write_text("")
    assert "file: got a file, expected a folder" in refusal(capsys, hf, tmp_path / "file", "--to", "meta")


@pytest.mark.parametrize("form", ["hf", "native", "megatron", "meta"])
def test_a_full_disk_leaves_what_was_there(hf: Path, tmp_path: Path, capsys: Capture, form: str) -> None:
    out = convert(hf, tmp_path / "out", "--to", "hf")
    with full_disk(20_000):
        said = refusal(capsys, hf, out, "--to", form, "--overwrite")
    assert "got File too large, expected to write it; free space" in said
    assert_same(out, hf)


@pytest.mark.parametrize("form", ["hf", "native", "megatron", "megatron-llama", "meta"])
def test_folders_of_no_or_of_several_formats(hf: Path, tmp_path: Path, capsys: Capture, form: str) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "empty: got a folder without weights, expected model.safetensors" in refusal(capsys, empty, tmp_path / "out", "--to", form)
    assert "none: got no such folder" in refusal(capsys, tmp_path / "none", tmp_path / "out", "--to", form)
    both = convert(hf, tmp_path / "both", "--to", "meta")
    (both / "SHA256SUMS").unlink()
    shutil.copytree(hf, both, dirs_exist_ok=True)
    said = refusal(capsys, both, tmp_path / "out", "--to", form)
    assert "both: got weights of 2 formats: hf, meta, expected one; say which one is meant (--from)" in said
    assert_same(convert(convert(both, tmp_path / "x", "--to", form, "--from", "meta"), tmp_path / "y", "--to", "hf"), hf)


@pytest.fixture
def megatron(hf: Path, tmp_path: Path) -> Path:
    return convert(hf, tmp_path / "megatron", "--to", "megatron", *GRID, "--megatron-layout", "legacy")


def test_the_order_of_heads_is_never_guessed(megatron: Path, tmp_path: Path, capsys: Capture) -> None:
    """With the names of both families and the arguments of neither only the user can tell."""
    for tp in range(2):
        for pp in range(2):
            rewrite(
                rank_file(megatron, tp, pp),
                lambda content: without(content["args"], "normalization", "group_query_attention", "rotary_base"),
            )
    said = refusal(capsys, megatron, tmp_path / "out", "--to", "hf")
    assert "got neither Megatron-LM's nor Megatron-LLaMA's names or arguments" in said
    assert "--from megatron or --from megatron-llama" in said
    convert(megatron, tmp_path / "right", "--to", "hf", "--from", "megatron")
    convert(megatron, tmp_path / "wrong", "--to", "hf", "--from", "megatron-llama")
    right, wrong = tensors(tmp_path / "right"), tensors(tmp_path / "wrong")
    different = {name.split(".")[-2] for name in right if not torch.equal(right[name], wrong[name])}
    assert different == {"q_proj", "k_proj", "v_proj"}


def test_signs_of_both_families(megatron: Path, tmp_path: Path, capsys: Capture) -> None:
    rewrite(rank_file(megatron, 0, 0), lambda content: setattr(content["args"], "causal_lm", True))
    assert "got signs of both Megatron-LM and Megatron-LLaMA" in refusal(capsys, megatron, tmp_path / "out", "--to", "hf")


def test_files_in_wrong_places(hf: Path, megatron: Path, tmp_path: Path, capsys: Capture) -> None:
    one, other, aside = rank_file(megatron, 0, 0), rank_file(megatron, 1, 0), tmp_path / "aside"
    for source, target in ((one, aside), (other, one), (aside, other)):
        shutil.move(source, target)
    said = refusal(capsys, megatron, tmp_path / "out", "--to", "hf")
    assert "mp_rank_00_000/model_optim_rng.pt: got the file of tensor rank 1, pipeline rank 0, expected that of 0 and 0" in said
    assert said.count("put the files in their places") == 2


def test_a_file_of_another_model(hf: Path, megatron: Path, tmp_path: Path, capsys: Capture) -> None:
    """Of the same shapes, and without our note of the rank: the copies of its norms are others."""
    rewrite(rank_file(megatron, 1, 1), lambda content: without(content["args"], "stored_ranks"))

    def exchange(content: Any) -> None:
        encoder = content["model"]["language_model"]["encoder"]
        encoder["final_layernorm.weight"] = encoder["final_layernorm.weight"] * 2

    rewrite(rank_file(megatron, 1, 1), exchange)
    said = refusal(capsys, megatron, tmp_path / "out", "--to", "hf")
    assert "mp_rank_01_001/model_optim_rng.pt language_model.encoder.final_layernorm.weight: got other values, expected those of" in said
    wider = convert(hf_folder(tmp_path / "wide", intermediate_size=128), tmp_path / "other", "--to", "megatron", *GRID)
    shutil.copy(rank_file(wider, 1, 1), rank_file(megatron, 1, 1))
    said = refusal(capsys, megatron, tmp_path / "out", "--to", "hf")
    assert "mp_rank_01_001/model_optim_rng.pt args.ffn_hidden_size: got 128, expected 96 as in" in said


def test_a_file_of_another_iteration(megatron: Path, tmp_path: Path, capsys: Capture) -> None:
    rewrite(rank_file(megatron, 0, 1), lambda content: content.update(iteration=200))
    said = refusal(capsys, megatron, tmp_path / "out", "--to", "hf")
    assert "mp_rank_00_001/model_optim_rng.pt iteration: got 200, expected 0 as in" in said


@pytest.mark.parametrize(("tp", "pp"), [(0, 1), (1, 0), (1, 1)])
def test_missing_files(megatron: Path, tmp_path: Path, capsys: Capture, tp: int, pp: int) -> None:
    rank_file(megatron, tp, pp).unlink()
    said = refusal(capsys, megatron, tmp_path / "out", "--to", "hf")
    assert f"tensor rank {tp}, pipeline rank {pp}: got no file, expected model_optim_rng.pt" in said


def test_missing_folders(megatron: Path, tmp_path: Path, capsys: Capture) -> None:
    for tp in range(2):
        shutil.rmtree(rank_file(megatron, tp, 1).parent)
    said = refusal(capsys, megatron, tmp_path / "out", "--to", "hf")
    assert "args.pipeline_model_parallel_size: got 2, expected 1, by the folders" in said


def test_a_folder_that_claims_a_rank_of_nine_digits(megatron: Path, tmp_path: Path, capsys: Capture) -> None:
    """Missing files are listed as far as they are shown."""
    (megatron / "release" / "mp_rank_999999999_999").mkdir()
    said = refusal(capsys, megatron, tmp_path / "out", "--to", "hf")
    assert "tensor rank 0, pipeline rank 2: got no file" in said or "tensor rank 2, pipeline rank 0: got no file" in said
    assert "and 999,999,999,986 more" in said


def test_trackers_that_lead_nowhere(megatron: Path, tmp_path: Path, capsys: Capture) -> None:
    tracker = megatron / "latest_checkpointed_iteration.txt"
    for text in ("100", "../release", "\n"):
        tracker.write_text(text)
        assert f"{tracker}: got" in refusal(capsys, megatron, tmp_path / "out", "--to", "hf")
    tracker.unlink()
    assert "no readable file" in refusal(capsys, megatron, tmp_path / "out", "--to", "hf")


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
    said = refusal(capsys, source, tmp_path / "out", "--to", "hf")
    assert (
        "vocabulary: got 384 rows, and no word on how many are padding, expected its true size; give the number of token ids: --vocab-size"
        in said
    )
    for wrong in ("385", "10000"):
        assert f"got {wrong}, expected at most the 384 stored rows" in refusal(
            capsys, source, tmp_path / "out", "--to", "hf", "--vocab-size", wrong
        )
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
    said = refusal(capsys, source, tmp_path / "no", "--to", "hf")
    assert (
        "vocabulary: got 300, expected at most the " in said
        and "and at least the tokenizer's 301; put the model's own tokenizer there" in said
    )


def test_other_words_on_the_vocabulary(hf: Path, tmp_path: Path, capsys: Capture) -> None:
    for form in ("megatron", "native", "meta", "hf"):
        source = convert(hf, tmp_path / form, "--to", form)
        assert "--vocab-size: got 299, expected 300" in refusal(capsys, source, tmp_path / "out", "--to", "hf", "--vocab-size", "299")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("num_experts", 8, "args num_experts: got 8, expected None; such models cannot be converted"),
        ("swiglu", False, "args swiglu: got False, expected True"),
        ("normalization", "LayerNorm", "args normalization: got LayerNorm, expected RMSNorm"),
        ("rotary_percent", 0.5, "args rotary_percent: got 0.5"),
        ("no_rope_freq", 4, "args no_rope_freq: got 4, expected None"),
        ("window_size", (128, 0), "args window_size: got (128, 0), expected None"),
        ("glu_linear_offset", 1.0, "args glu_linear_offset: got 1.0, expected 0.0"),
        ("position_embedding_type", "learned_absolute", "args position_embedding_type: got learned_absolute, expected rope"),
        ("num_layers", 6, "args num_layers: got 6, expected 4, by the config"),
        ("tensor_model_parallel_size", 4, "args.tensor_model_parallel_size: got 4, expected 1, by the folders"),
    ],
)
def test_arguments_of_other_models(hf: Path, tmp_path: Path, capsys: Capture, name: str, value: Any, says: str) -> None:
    source = convert(hf, tmp_path / "source", "--to", "megatron")
    rewrite(rank_file(source), lambda content: setattr(content["args"], name, value))
    assert says in refusal(capsys, source, tmp_path / "out", "--to", "hf")


def test_an_order_of_heads_from_before_version_2(hf: Path, tmp_path: Path, capsys: Capture) -> None:
    source = convert(hf, tmp_path / "source", "--to", "megatron", "--megatron-layout", "legacy")
    rewrite(rank_file(source), lambda content: content.update(checkpoint_version=1.0))
    said = refusal(capsys, source, tmp_path / "out", "--to", "hf")
    assert "checkpoint_version: got 1.0, expected at least 2.0; load and save it with a Megatron-LM of today" in said


def test_tensors_that_are_missing_wrong_or_too_many(hf: Path, tmp_path: Path, capsys: Capture) -> None:
    source = convert(hf, tmp_path / "source", "--to", "megatron", "--megatron-layout", "local")

    def spoil(content: Any) -> None:
        model = content["model"]
        del model["decoder.layers.1.mlp.linear_fc2.weight"]
        model["decoder.layers.2.mlp.linear_fc1.weight"] = torch.zeros(10, 64)
        model["decoder.layers.3.self_attention.linear_qkv.bias"] = torch.zeros(128)
        model["decoder.layers.0.input_layernorm.weight"] = torch.zeros(64, dtype=torch.int8)

    rewrite(rank_file(source), spoil)
    said = refusal(capsys, source, tmp_path / "out", "--to", "hf")
    for line in (
        "got no such tensor, expected model.layers.1.mlp.down_proj.weight of shape (64, 96);",
        "decoder.layers.2.mlp.linear_fc1.weight: got shape (10, 64), expected (192, 64);",
        "decoder.layers.3.self_attention.linear_qkv.bias: got a tensor, expected none of this name;",
        "decoder.layers.0.input_layernorm.weight: got torch.int8, expected float32, bfloat16 or float16;",
    ):
        assert said.count(line) == 1, line


def test_meta_folders_that_do_not_fit(hf: Path, tmp_path: Path, capsys: Capture) -> None:
    source = convert(hf, tmp_path / "source", "--to", "meta", "--tensor-model-parallel-size", "2")
    out = tmp_path / "out"
    os.rename(source / "consolidated.01.pth", tmp_path / "aside")
    said = refusal(capsys, source, out, "--to", "hf")
    assert "output.weight: got 150 rows in 1 files, expected 300; copy the missing files too" in said
    os.rename(tmp_path / "aside", source / "consolidated.02.pth")
    said = refusal(capsys, source, out, "--to", "hf")
    assert "got consolidated.00.pth, consolidated.02.pth, expected consolidated.00.pth, consolidated.01.pth" in said
    os.rename(source / "consolidated.02.pth", source / "consolidated.01.pth")
    rewrite(source / "consolidated.01.pth", lambda content: content.update({"norm.weight": torch.zeros(64)}))
    assert "consolidated.01.pth norm.weight: got other values, expected those of" in refusal(capsys, source, out, "--to", "hf")
    params = json.loads((source / "params.json").read_text())
    (source / "params.json").write_text(json.dumps(params | {"n_layers": 5, "use_scaled_rope": True}))
    said = refusal(capsys, source, out, "--to", "hf")
    assert "params.json num_hidden_layers: got 5, expected 4, by the config" in said
    assert "params.json use_scaled_rope: got True, expected false, by the config" in said
    newer = {"use_qk_norm": True, "nope_layer_interval": 4, "quantization_args": None, "max_batch_size": 4}
    (source / "params.json").write_text(json.dumps(params | newer))
    said = refusal(capsys, source, out, "--to", "hf")
    assert "params.json use_qk_norm: got True, expected no field of this name" in said and "nope_layer_interval: got 4" in said
    assert said.count("params.json") == 2


def test_what_metas_files_leave_open(tmp_path: Path, capsys: Capture) -> None:
    original = hf_folder(tmp_path / "hf", rope_parameters=LLAMA31)
    source = convert(original, tmp_path / "source", "--to", "meta")
    os.rename(source / "config.json", tmp_path / "config.json")
    said = refusal(capsys, source, tmp_path / "out", "--to", "hf")
    for name in ("max_position_embeddings", "rope_scaling"):
        assert f"params.json {name}: got no word on it, expected a value; give the model's HuggingFace config.json (--hf-config)" in said
    assert_same(convert(source, tmp_path / "out", "--to", "hf", "--hf-config", str(tmp_path / "config.json")), original)


def test_a_head_is_not_lost_to_a_config_that_ties_it(hf: Path, tmp_path: Path, capsys: Capture) -> None:
    for form in ("meta", "megatron"):
        source = convert(hf, tmp_path / form, "--to", form)
        tied = json.loads((hf / "config.json").read_text()) | {"tie_word_embeddings": True}
        (tmp_path / "config.json").write_text(json.dumps(tied))
        said = refusal(capsys, source, tmp_path / "out", "--to", "hf", "--hf-config", str(tmp_path / "config.json"))
        assert "output.weight is not the embedding" in said or "head: got a head, expected none, by the config" in said


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
    said = refusal(capsys, folder, tmp_path / "out", "--to", "hf")
    assert "lm_head.weight: got other values than in the embedding, expected a copy of it, since tie_word_embeddings is true; " in said
    save_file({**weights, "lm_head.weight": weights["lm_head.weight"][1:].clone()}, shard, {"format": "pt"})
    assert "lm_head.weight: got other values" in refusal(capsys, folder, tmp_path / "out", "--to", "native")


@pytest.mark.parametrize("to", ["native", "hf", "megatron", "meta"])
def test_damaged_weights_are_not_converted(to: str, tmp_path: Path, capsys: Capture) -> None:
    folder = hf_folder(tmp_path / "hf")
    [shard] = [path for path in folder.glob("*.safetensors") if "model.norm.weight" in load_file(path)]
    weights = load_file(shard)
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, shard, {"format": "pt"})
    assert "expected finite values" in refusal(capsys, folder, tmp_path / "out", "--to", to)


def test_a_config_of_a_native_checkpoint_is_its_own(hf: Path, tmp_path: Path, capsys: Capture) -> None:
    source = convert(hf, tmp_path / "source", "--to", "native")
    said = refusal(capsys, source, tmp_path / "out", "--to", "hf", "--hf-config", str(hf / "config.json"))
    assert "expected none for a native checkpoint" in said


def flip(path: Path) -> None:
    """Change a bit of a weight: the file stays readable."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_of_an_earlier_conversion(hf: Path, tmp_path: Path, capsys: Capture) -> None:
    """safetensors has no checksums: the list beside the files has."""
    source = convert(hf, tmp_path / "source", "--to", "hf")
    flip(source / "model.safetensors")
    said = refusal(capsys, source, tmp_path / "out", "--to", "megatron")
    assert re.search(r"model.safetensors: got sha256 \w{64}, expected sha256 \w{64}, by SHA256SUMS; copy the file again", said)
    assert main(["verify", str(hf), str(source)]) == 1
    assert "by SHA256SUMS" in capsys.readouterr().err
    (source / "SHA256SUMS").unlink()
    convert(source, tmp_path / "out", "--to", "megatron")


def test_an_export_replaces_an_earlier_conversion_with_its_list(hf: Path, tmp_path: Path, capsys: Capture) -> None:
    native, target = (convert(hf, tmp_path / "native", "--to", "native"), convert(hf, tmp_path / "target", "--to", "hf"))
    assert (target / "SHA256SUMS").exists()
    export = ["export", "--load", str(native), "--output", str(target), "--dtype", "float32"]
    assert main(export) == 1
    assert "target: got a model that no export of this program has written" in capsys.readouterr().err
    assert (target / "SHA256SUMS").exists()
    assert main([*export, "--overwrite"]) == 0
    listed = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=target, capture_output=True, text=True, check=True).stdout
    assert "model.safetensors: OK" in listed, "it is that of the files that are there now"
    assert same(tensors(target), tensors(hf))


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
