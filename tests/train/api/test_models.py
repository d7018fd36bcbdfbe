"""``load``, ``save_hf``, ``convert``, ``verify``, ``generate`` and ``plan`` as programs call them: values instead of printed lines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_llama as ml
import pytest
import torch
from megatron_llama.cli import main
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM


@pytest.fixture(scope="module")
def run(options: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a short run."""
    folder = tmp_path_factory.mktemp("run")
    ml.train(options, save=folder, train_iters=3)
    return folder


@pytest.fixture(scope="module")
def hf(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "hf"
    saved = ml.save_hf(run, folder)
    assert saved == ml.SavedHF(folder, run / "iter_0000003", "float32", True)
    return folder


def test_a_state_dict_has_the_tensors_of_transformers(run: Path, hf: Path) -> None:
    theirs = LlamaForCausalLM.from_pretrained(hf).state_dict()
    for folder in (run, hf):
        state = ml.load(folder)
        assert state.keys() == theirs.keys()
        assert all(torch.equal(state[name], theirs[name]) and state[name].dtype == torch.float32 for name in state)
    narrow = ml.load(run, dtype="bfloat16")
    assert all(torch.equal(narrow[name], theirs[name].bfloat16()) for name in theirs)


def test_an_export_keeps_the_ids_of_the_run(run: Path, tmp_path: Path) -> None:
    """Another tokenizer may go with it that has more tokens, and none in which ids stand for other text."""
    tokenizer = json.loads((run / "tokenizer" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    other = shutil.copytree(run / "tokenizer", tmp_path / "other")
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    (other / "SHA256SUMS").unlink()
    with pytest.raises(ml.UserError, match="leave --tokenizer-model out"):
        ml.save_hf(run, tmp_path / "hf", tokenizer_model=other)
    assert not (tmp_path / "hf").exists()


@torch.no_grad()
def test_a_stage_computes_the_logits_of_transformers(run: Path, hf: Path) -> None:
    ids = torch.arange(3, 23).unsqueeze(0)
    theirs = LlamaForCausalLM.from_pretrained(hf)(ids).logits
    stage = ml.load(run, "stage", device="cpu")
    ours = stage(ids.t(), stage.positions(20, ids.device))[..., : stage.config.vocab_size]
    assert torch.allclose(ours.transpose(0, 1), theirs, rtol=1e-5, atol=1e-6)


def test_what_load_returns_save_hf_writes(run: Path, hf: Path, tmp_path: Path) -> None:
    expected = load_file(hf / "model.safetensors")
    stage, trained, state = ml.load(run, "stage", device="cpu"), ml.load(run, "trained", device="cpu"), ml.load(run)
    cases: list[tuple[Any, Any, bool]] = [(stage, None, False), (trained, None, True), (state, hf, False), (state, stage.config, False)]
    for number, (model, config, has_tokenizer) in enumerate(cases):
        saved = ml.save_hf(model, tmp_path / str(number), config=config)
        assert (saved.dtype, saved.has_tokenizer, saved.source) == ("float32", has_tokenizer, None)
        found = load_file(saved.folder / "model.safetensors")
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    again = AutoTokenizer.from_pretrained(tmp_path / "1")
    assert again("import statement").input_ids == AutoTokenizer.from_pretrained(hf)("import statement").input_ids
    doubled = {name: 2 * tensor for name, tensor in state.items()}
    ml.save_hf(doubled, tmp_path / "doubled", config=hf, dtype="bfloat16")
    found = load_file(tmp_path / "doubled" / "model.safetensors")
    assert all(torch.equal(found[name], (2 * expected[name]).bfloat16()) for name in expected)


def test_tensors_of_another_model_are_refused_and_nothing_is_written(run: Path, hf: Path, tmp_path: Path) -> None:
    state = ml.load(run)
    renamed = {("model.norm.wait" if name == "model.norm.weight" else name): tensor for name, tensor in state.items()}
    with pytest.raises(ml.UserError) as caught:
        ml.save_hf({**renamed, "model.layers.0.mlp.up_proj.weight": torch.zeros(3, 3)}, tmp_path / "out", config=hf)
    said = str(caught.value)
    assert "model.norm.weight: got no such tensor" in said and "model.norm.wait: got a tensor, expected none of this name" in said
    assert "model.layers.0.mlp.up_proj.weight: got shape (3, 3), expected shape (64, 32)" in said
    with pytest.raises(ml.UserError, match=r"config: got nothing, expected that of the state dict"):
        ml.save_hf(state, tmp_path / "out")
    with pytest.raises(ml.UserError, match="adapter: got tensors, expected a checkpoint"):
        ml.save_hf(state, tmp_path / "out", config=hf, adapter=True)
    with pytest.raises(ml.UserError, match="form: got modle, expected one of state_dict, stage, trained"):
        ml.load(run, "modle")  # type: ignore[call-overload]
    with pytest.raises(ml.UserError, match="tokenizer_model: got x, expected load"):
        ml.load(run, tokenizer_model="x")  # type: ignore[call-overload]
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_convert_and_verify_return_what_the_commands_print(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = ml.convert(hf, tmp_path / "meta", to="meta")
    assert (done.source, done.source_format, done.target, done.dtype) == (hf, "hf", tmp_path / "meta", "float32")
    assert done.bytes == 4 * sum(tensor.numel() for tensor in ml.load(hf).values())
    with pytest.raises(ml.UserError, match=r"--megatron-layout: got local, expected --to megatron; leave it out"):
        ml.convert(hf, tmp_path / "x", to="meta", megatron_layout="local")
    with pytest.raises(ml.UserError, match="--to: got onnx, expected one of hf, native"):
        ml.convert(hf, tmp_path / "x", to="onnx")  # type: ignore[arg-type]
    assert capsys.readouterr().out == "", "functions return, commands print"
    heard = list[str]()
    found = ml.verify(hf, tmp_path / "meta", prompt_tokens=8, report=heard.append)
    assert found.equal and found.lines[-1] == "verdict: equal" and heard == list(found.lines)
    assert capsys.readouterr().out == ""
    assert main(["verify", str(hf), str(tmp_path / "meta"), "--prompt-tokens", "8"]) == 0
    assert capsys.readouterr().out.splitlines() == list(found.lines)
    state = ml.load(hf)
    ml.save_hf({**state, "model.norm.weight": state["model.norm.weight"] + 1}, tmp_path / "other", config=hf)
    other = ml.verify(hf, tmp_path / "other", prompt_tokens=8)
    assert not other.equal and other.different == ("weights", "logits")


def test_generate_is_the_text_of_the_command(hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["The import statement", "A class"]
    found = ml.generate(hf, prompts, max_new_tokens=6, temperature=0.0)
    assert [each.prompt for each in found] == prompts and [len(each.token_ids) for each in found] == [6, 6]
    model = ml.load(hf, "trained")
    assert ml.generate(model, prompts, max_new_tokens=6, temperature=0.0, batch_size=1) == found
    assert ml.generate(model, prompts[1], max_new_tokens=6, temperature=0.0) == found[1:]
    theirs = LlamaForCausalLM.from_pretrained(hf)
    ids = torch.tensor([model.tokenizer.encode_prompt(prompts[0])])
    expected = theirs.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert list(found[0].token_ids) == expected.tolist()
    assert ml.generate(model, []) == []
    ended = replace(model, stops=frozenset({found[0].token_ids[2]}))
    assert ml.generate(ended, prompts[0], max_new_tokens=6, temperature=0.0)[0].finish_reason == "stop"
    capsys.readouterr()
    assert main(["generate", "--load", str(hf), "--prompt", prompts[0], "--max-new-tokens", "6", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == model.tokenizer.decode(ids[0].tolist()) + found[0].text
    with pytest.raises(ml.UserError, match=r"--top-p: got 0, expected more than 0, at most 1"):
        ml.generate(model, prompts, top_p=0)
    with pytest.raises(ml.UserError, match=r"prompt 2: got [0-9]+ tokens, expected at most 31"):
        ml.generate(model, ["a", "word " * 40])


@pytest.mark.long
def test_plan_finds_what_the_command_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = ml.plan(model="llama2-7b", gpus=8, global_batch_size=64, top=2, tensor_model_parallel_size=2)
    best, second = found.layouts
    assert best.step_seconds <= second.step_seconds and best.name.startswith("tp2/") and 0 <= best.probability_out_of_memory < 0.5
    assert found.assumed is not None and "--gpu h100" in found.assumed
    assert capsys.readouterr().out == ""
    words = ["plan", "--model", "llama2-7b", "--gpus", "8", "--global-batch-size", "64", "--top", "2", "--tensor-model-parallel-size", "2"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert best.name in shown and f"  {best.command}" in shown and found.assumed in shown
    [again] = ml.plan({"model": "llama2-7b", "global_batch_size": 64}, gpus=8, explain=best.name).layouts
    assert again == best
    # The options of a layout are those of a run in it: planned again, they leave nothing to search.
    same = ml.plan(best.options, gpus=8, data_parallel_sharding_strategy=best.options.get("data_parallel_sharding_strategy", "optim"))
    assert best.name in [layout.name for layout in same.layouts]
    with pytest.raises(ml.UserError, match=r"--gpus: got nothing, expected the number of GPUs"):
        ml.plan(model="llama2-7b")
    with pytest.raises(ml.UserError, match="html: got an unknown key"):
        ml.plan(model="llama2-7b", gpus=8, html="x")
