"""A model folder of any format is the same model to whoever runs it."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from megatron_llama.cli import main
from megatron_llama.commands.common.configs import ModelFolderConfig
from megatron_llama.commands.common.trained import Trained, open_trained
from megatron_llama.commands.generate import continued
from megatron_llama.convert.hf.writer import export_hf
from megatron_llama.model.generate import Reader, Sampling
from megatron_llama.model.init import InitialWeights
from megatron_llama.tokenizer.load import load_tokenizer

from tests.commands.test_chat import folder, model

__all__ = ["folder", "model"]


@pytest.fixture(scope="module")
def hf(model: Trained, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of ``model`` as HuggingFace has them, with a list of tokens that end a text."""
    made = tmp_path_factory.mktemp("hf") / "model"
    export_hf(made, model.stage.config, InitialWeights(3, 0.3), "float32", load_tokenizer(folder))
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258]}))
    return made


@pytest.mark.parametrize("to", ["hf", "native", "megatron", "megatron-llama", "meta"])
def test_every_format(to: str, hf: Path, model: Trained, tmp_path: Path) -> None:
    if to != "hf":
        assert main(["convert", str(hf), str(tmp_path / to), "--to", to]) == 0
    found = open_trained(ModelFolderConfig(load=str(hf if to == "hf" else tmp_path / to)))
    assert found.tokenizer.encode("a text") == model.tokenizer.encode("a text") and found.longest == 256
    assert found.stops == {257, 258}
    text = found.tokenizer.encode("something to read")
    assert torch.equal(Reader(found.stage).read([text]), Reader(model.stage).read([text]))


def test_a_text_is_shown_while_it_is_made_and_those_behind_it_when_it_is_done(model: Trained) -> None:
    prompts, sampling = ([model.tokenizer.encode(text) for text in ("first", "second prompt")], Sampling(8, 0.0, 0, 1.0))
    whole = ["".join(continued(model, [prompt], sampling, 1)) for prompt in prompts]
    pieces = list(continued(model, prompts, sampling, 1))
    assert "".join(pieces) == "".join(whole) and whole[0].startswith("first") and whole[1].endswith("\n")
    shown = list(accumulate(map(len, pieces)))
    assert shown[0] == len("first") and sum(size < len(whole[0]) for size in shown) > 3, "token by token"
    assert len(whole[0]) in shown, "nothing of the second in a piece of the first"


def test_bf16_and_another_tokenizer(hf: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    found = open_trained(ModelFolderConfig(init_from_hf=str(hf), bf16=True, tokenizer_model=str(tmp_path)))
    assert {parameter.dtype for parameter in found.stage.parameters()} == {torch.bfloat16}
    assert load_tokenizer(tmp_path).eos_id == found.tokenizer.eos_id
