"""Megatron-Core's torch_dist: every form of it becomes the model that was saved, and what is no such model is refused by name."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_llama.cli import main
from megatron_llama.model.hf import read_hf_config

from tests.checkpoint.model_folders.test_hf import tensors
from tests.converter.converting import assert_same_model, convert, refusal
from tests.converter.test_convert_families import ARGS, MODELS, SIZES, saved
from tests.converter.torch_dist import arguments, save, write_common

Capture = pytest.CaptureFixture[str]
Weights = tuple[dict[str, torch.Tensor], argparse.Namespace]
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"model_type": "llama"}, {}),
    "llama tied": ({"model_type": "llama", "tie_word_embeddings": True}, {}),
    **{name: (MODELS[name], args) for name, args in ARGS.items()},
}
"""Fields of the configuration, and Megatron's arguments."""
KEYS = ("stacked", "single", "halves")


def original(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32) -> tuple[Path, dict[str, Any]]:
    """A small model as transformers saves it, and its config."""
    fields = {"tie_word_embeddings": False, "rms_norm_eps": 1e-5, **SIZES, **FAMILIES[name][0]}
    return saved(fields, folder, dtype), fields


def drawn() -> list[Any]:
    """Every family in one form of its keys and one layout, every form and every layout at least twice."""
    forms = list(product((False, True), KEYS))
    random.Random(1).shuffle(forms)
    cases = [(name, *forms[number % len(forms)], (1, 2, 4)[number % 3]) for number, name in enumerate(FAMILIES)]
    return [pytest.param(*case, id=f"{case[0]}, {'local' if case[1] else 'te'}, {case[2]}, tp {case[3]}") for case in cases]


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "local", "keys", "tp"), drawn())
def test_every_form_becomes_the_model(tmp_path: Path, name: str, local: bool, keys: str, tp: int) -> None:
    dtype = torch.bfloat16 if local else torch.float32
    hf, fields = original(tmp_path / "hf", name, dtype)
    run = save(tmp_path / "run", tensors(hf), arguments(fields, tp=tp, **FAMILIES[name][1]), local=local, keys=keys)
    found = convert(run, tmp_path / "found", "--to", "hf", "--vocab-size", "300")
    assert_same_model(found, hf, but=("bos_token_id", "eos_token_id", "pad_token_id"))
    # What else the same reader is used for: another target, the comparison, the file's own config.
    config = ("--hf-config", str(hf / "config.json"))
    again = convert(run / "iter_0000003", tmp_path / "again", "--to", "megatron", "--tensor-model-parallel-size", "2", *config)
    assert main(["verify", str(run), str(again), "--hf-config-a", str(hf / "config.json")]) == 0
    assert read_hf_config(convert(again, tmp_path / "back", "--to", "hf")) == read_hf_config(hf)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """The tensors of a model, and Megatron's arguments for it."""
    hf, fields = original(tmp_path_factory.mktemp("original") / "hf")
    return tensors(hf), arguments(fields, tp=2)


def test_the_tracker_the_folder_itself_and_the_format_are_found(tmp_path: Path, capsys: Capture, weights: Weights) -> None:
    run = save(tmp_path / "run", *weights)
    for source in (run, run / "iter_0000003"):
        assert main(["convert", str(source), str(tmp_path / f"{source.name} hf"), "--to", "hf", "--vocab-size", "300"]) == 0
    said = capsys.readouterr().out
    assert said.count("converted torch_dist") == 2 and "the optimizer state of the source is left out" in said
    (run / "latest_checkpointed_iteration.txt").write_text("4")
    message = refusal(capsys, run, tmp_path / "out", "--to", "hf")
    assert "latest_checkpointed_iteration.txt: got 4, expected an iteration with a checkpoint in it" in message


def test_a_config_stands_for_arguments_that_are_not_there(tmp_path: Path) -> None:
    """Other programs that use Megatron-Core keep their settings elsewhere."""
    hf, fields = original(tmp_path / "hf")
    run = save(tmp_path / "run", tensors(hf), arguments(fields))
    torch.save({"iteration": 3}, run / "iter_0000003" / "common.pt")
    found = convert(run, tmp_path / "found", "--to", "hf", "--hf-config", str(hf / "config.json"))
    assert_same_model(found, hf)


def test_inspect_says_what_is_there_and_reads_all_of_it(tmp_path: Path, capsys: Capture, weights: Weights) -> None:
    run = save(tmp_path / "run", *weights)
    assert main(["inspect", "checkpoint", str(run), "--verify"]) == 0
    said = capsys.readouterr().out.splitlines()
    # A layer has two norms, and of each rank one chunk of its other tensors, but two of the MLP's first; there is one final norm, and
    # one moment of it.
    assert said[0] == f"verified: {4 * (2 + 2 * 5) + 2 * 2 + 2} chunks of 10 tensors are as they were saved"
    rows = {
        name.strip(): value.strip() for name, value in (re.split(r"  |: ", line, maxsplit=1) for line in said[1:] if line != "[tensors]")
    }
    assert rows["checkpoint"] == f"{run / 'iter_0000003'}" and rows["iteration"] == "3" and rows["tensor_model_parallel_size"] == "2"
    assert rows["parameters, with padding"] == f"{2 * 512 * 64 + 4 * (128 * 64 + 64 * 64 + 3 * 96 * 64 + 2 * 64) + 64:,}"
    assert rows["decoder.layers.mlp.linear_fc1.weight"] == "4 x 192 x 64 float32, 16 chunks"
    flip(run / "iter_0000003", weights[1])
    assert main(["inspect", "checkpoint", str(run), "--verify"]) == 1
    assert "__1_0.distcp" in capsys.readouterr().err


class Malice:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.witness),)


def backend(**fields: Any) -> Callable[[Path, argparse.Namespace], None]:
    """Change ``metadata.json``."""

    def change(inner: Path, args: argparse.Namespace) -> None:
        path = inner / "metadata.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def say(**fields: Any) -> Callable[[Path, argparse.Namespace], None]:
    """Change the arguments."""

    def change(inner: Path, args: argparse.Namespace) -> None:
        write_common(inner, argparse.Namespace(**{**vars(args), **fields}))

    return change


def flip(inner: Path, args: argparse.Namespace) -> None:
    """One bit in each chunk of a file."""
    path = inner / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    at = content.find(b"archive/data/0")
    content[at + 600] ^= 1
    path.write_bytes(content)


def flip_step(inner: Path, args: argparse.Namespace) -> None:
    """One bit of the count of updates."""
    path = inner / "common.pt"
    torch.save({"optimizer": {"state": {"common_step": torch.tensor(3.0)}}}, path)
    content = bytearray(path.read_bytes())
    content[content.find(torch.tensor(3.0).numpy().tobytes()) + 2] ^= 128
    path.write_bytes(content)


REFUSED: dict[str, tuple[Callable[[Path, argparse.Namespace], object], str]] = {
    "zarr": (backend(sharded_backend="zarr"), "metadata.json sharded_backend: got zarr, expected torch_dist; load it with Megatron-LM"),
    "fsdp_dtensor": (lambda inner, args: (inner / "metadata.json").unlink(), "got .metadata alone: a folder of fsdp_dtensor or torch_dcp"),
    "a newer backend": (backend(sharded_backend_version=2), "sharded_backend_version: got 2, expected 1; update megatron_llama"),
    "another common part": (backend(common_backend="yaml"), "common_backend: got yaml, expected torch"),
    "metadata.json cut off": (lambda inner, args: (inner / "metadata.json").write_text('{"shar'), "metadata.json:1: got Unterminated string"),
    "metadata.json of a list": (
        lambda inner, args: (inner / "metadata.json").write_text("[1]"),
        "metadata.json: got a JSON list, expected a JSON object",
    ),
    "metadata.json that is deep": (
        lambda inner, args: (inner / "metadata.json").write_text("[" * 200_000),
        "metadata.json: got nested too deeply",
    ),
    "a flipped bit in the common part": (flip_step, "common.pt: got damaged content (a checksum does not match)"),
    "no common part": (lambda inner, args: (inner / "common.pt").unlink(), "common.pt: got No such file"),
    "a common part cut off": (lambda inner, args: os.truncate(inner / "common.pt", 900), "common.pt: got damaged or foreign content"),
    "a common part that is a tensor": (lambda inner, args: torch.save(torch.ones(2), inner / "common.pt"), "common.pt: got a Tensor"),
    "a common part that runs code": (
        lambda inner, args: torch.save({"args": Malice(inner.parent.parent / "run it")}, inner / "common.pt"),
        "common.pt: got a pickle that calls posix.mkdir, expected tensors and settings only (nothing was run)",
    ),
    "no arguments": (
        lambda inner, args: torch.save({"iteration": 3}, inner / "common.pt"),
        "num_layers: got nothing, expected a value; give the model's",
    ),
    "experts, by the arguments": (say(num_experts=8), "args moe_router_topk: got nothing, expected a value; give the model's"),
    "experts without tensors": (say(num_experts=8, moe_router_topk=2), "gate.weight: got no tensor, expected decoder.layers.mlp.router.weight"),
    "latent attention, by the arguments": (say(multi_latent_attention=True), "args multi_latent_attention: got True, expected False"),
    "a quantised model": (
        lambda inner, args: (inner / "modelopt_state").mkdir(),
        "got a model that TensorRT Model Optimizer has changed: quantised",
    ),
    "another number of layers": (say(num_layers=5), "args.num_layers: got 5, expected 4, by the tensors; take the files"),
    "a thousand million layers": (say(num_layers=10**9), "args.num_layers: got 1000000000, expected a number from 1 to 512"),
    "another hidden size": (say(hidden_size=128, kv_channels=8), "args.hidden_size: got 128, expected 64, by the tensors"),
    "more heads": (say(num_attention_heads=16, kv_channels=8), "linear_proj.weight: got shape (4, 64, 64), expected (4, 64, 128)"),
    "fewer groups": (say(num_query_groups=2), "linear_qkv.weight: got shape (4, 128, 64), expected (4, 96, 64)"),
    "a thousand million groups": (say(num_query_groups=10**9), "args.num_query_groups: got 1000000000, expected a number"),
    "a wider MLP": (say(ffn_hidden_size=112), "linear_fc2.weight: got shape (4, 64, 96), expected (4, 64, 112)"),
    "a word for a size": (say(num_layers="four"), "args.num_layers: got four, expected a number"),
    "a window that is none": (say(window_size=3), "common.pt args window_size: got 3, expected an array of 2 integers"),
    "norms of heads that are not there": (
        say(qk_layernorm=True),
        "q_norm.weight: got no tensor, expected decoder.layers.self_attention.q_layernorm.weight",
    ),
    "a tied head that is there": (
        say(untie_embeddings_and_output_weights=False),
        "output_layer.weight: got a head, expected untie_embeddings_and_output_weights False",
    ),
    "a file missing": (lambda inner, args: (inner / "__2_0.distcp").unlink(), "__2_0.distcp: got No such file"),
    "a file cut off": (lambda inner, args: os.truncate(inner / "__2_0.distcp", 9000), "it was cut off"),
    "a flipped bit": (flip, "__1_0.distcp"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_such_model_is_refused_and_leaves_nothing(tmp_path: Path, capsys: Capture, weights: Weights, name: str) -> None:
    run = save(tmp_path / "run", *weights)
    damage, expected = REFUSED[name]
    damage(run / "iter_0000003", weights[1])
    message = refusal(capsys, run, tmp_path / "out", "--to", "hf", "--vocab-size", "300")
    assert expected in message and "; " in message and "CheckpointError" not in message
    assert not (tmp_path / "run it").exists()


MORE: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "experts": ({"decoder.layers.mlp.experts.linear_fc1.weight": torch.ones(4, 4)}, "linear_fc1.weight: got a mixture of experts"),
    "latent attention": ({"decoder.layers.self_attention.linear_kv_down_proj.weight": torch.ones(4, 4)}, "got multi-head latent attention"),
    "quantisers": ({"decoder.layers.mlp.linear_fc1.weight_quantizer._amax": torch.ones(4, 1)}, "got a quantised model"),
    "prediction of more tokens": ({"mtp.layers.0.eh_proj.weight": torch.ones(4, 4)}, "got multi-token prediction"),
    "a tensor that nobody knows": (
        {"decoder.layers.surprise.weight": torch.ones(4, 4)},
        "surprise.weight: got a tensor, expected none of this name",
    ),
    "codes for weights": ({"output_layer.weight": torch.ones(512, 64, dtype=torch.int8)}, "output_layer.weight: got torch.int8"),
}


@pytest.mark.parametrize("name", MORE)
def test_tensors_of_other_models_are_refused_by_name(tmp_path: Path, capsys: Capture, weights: Weights, name: str) -> None:
    more, expected = MORE[name]
    run = save(tmp_path / "run", *weights, more=more)
    assert expected in refusal(capsys, run, tmp_path / "out", "--to", "hf", "--vocab-size", "300")


def test_a_vocabulary_without_a_size_is_asked_for(tmp_path: Path, capsys: Capture, weights: Weights) -> None:
    run = save(tmp_path / "run", *weights)
    assert "give the number of token ids: --vocab-size" in refusal(capsys, run, tmp_path / "out", "--to", "hf")
