"""A model folder of any format is the same model to whoever runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from megatron_llama.checkpoint.model_folders.hf.writer import export_hf
from megatron_llama.cli import main
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.model.generate import Reader, Sampling
from megatron_llama.model.init import InitialWeights
from megatron_llama.train.api.common.configs import ModelFolderConfig
from megatron_llama.train.api.common.trained import Trained
from megatron_llama.train.api.generate import Text, grow
from megatron_llama.train.commands.common.trained import open_trained

from tests.tune.test_chat import folder, model

__all__ = ["folder", "model"]


@pytest.fixture(scope="module")
def hf(model: Trained, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of ``model`` as HuggingFace has them, with a list of tokens that end a text."""
    made = tmp_path_factory.mktemp("hf") / "model"
    export_hf(made, model.stage.config, InitialWeights(3, 0.3), "float32", load_tokenizer(folder))
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258]}))
    (made / "SHA256SUMS").unlink()  # the folder is changed on purpose
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


def shown(model: Trained, prompts: list[str], sampling: Sampling, stop: tuple[str, ...] = ()) -> list[list[str]]:
    texts = [Text(model, prompt, model.tokenizer.encode(prompt), stop) for prompt in prompts]
    steps = grow(model, texts, sampling, 1)
    return [list(text.pieces(steps)) for text in texts]


def test_a_text_is_shown_while_it_is_made_and_those_behind_it_when_it_is_done(model: Trained) -> None:
    prompts, sampling = (["first", "second prompt"], Sampling(8, 0.0, 0, 1.0))
    whole = ["".join(shown(model, [prompt], sampling)[0]) for prompt in prompts]
    pieces = shown(model, prompts, sampling)
    assert ["".join(found) for found in pieces] == whole
    assert pieces[0][0] == "first"
    assert len(pieces[1]) <= 3 < len(pieces[0]), "what was made in the meantime comes at once"


def run(capsys: pytest.CaptureFixture[str], *options: object) -> tuple[str, str]:
    """What ``generate`` prints, on stdout and stderr."""
    capsys.readouterr()
    assert main(["generate", "--temperature", "0", *map(str, options)]) == 0
    printed = capsys.readouterr()
    return printed.out, printed.err


def test_several_prompts_have_headings_and_one_has_none(hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--load", hf, "--max-new-tokens", 4, "--prompt")
    alone = [run(capsys, *options, prompt)[0] for prompt in ("one", "two", "three")]
    assert alone[0].startswith("one") and "=== " not in "".join(alone)
    together = run(capsys, *options, "one", "two", "three", "--batch-size", 2)[0]
    assert together == "\n".join(f"=== prompt {number} ===\n{text}" for number, text in enumerate(alone, 1))


def test_json_has_a_line_for_each_prompt(hf: Path, model: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--load", hf, "--max-new-tokens", 12, "--prompt", "one", "\u00fcber\n", "three", "--batch-size", 2)
    found = [json.loads(line) for line in run(capsys, *options, "--json")[0].splitlines()]
    assert [entry["prompt"] for entry in found] == ["one", "\u00fcber\n", "three"]
    for entry in found:
        assert list(entry) == ["prompt", "text", "token_ids", "finish_reason"]
        assert entry["finish_reason"] == "length" and len(entry["token_ids"]) == 12
        assert entry["text"] == model.tokenizer.decode(entry["token_ids"])
    end = Trained(model.stage, model.tokenizer, frozenset(found[0]["token_ids"][5:6]))
    text = Text(end, "one", model.tokenizer.encode("one"))
    ended = json.loads(text.as_json(grow(end, [text], Sampling(12, 0.0, 0, 1.0), 1)))
    assert (
        ended["finish_reason"] == "stop"
        and ended["token_ids"] == found[0]["token_ids"][: len(ended["token_ids"])]
        and len(ended["token_ids"]) < 6
    )


def test_a_stop_string_ends_its_prompt_alone_and_early(hf: Path, model: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--load", hf, "--max-new-tokens", 30, "--json", "--prompt", "one", "three")
    whole = [json.loads(line) for line in run(capsys, *options)[0].splitlines()]
    first = whole[0]["text"]
    at = next(at for at in range(3, 20) if first.find(first[at : at + 3]) == at and first[at : at + 3] not in whole[1]["text"])
    stop = first[at : at + 3]  # three characters are three tokens or more
    read = list[int]()
    hook = model.stage.model.layers["0"].mlp.register_forward_hook(lambda module, inputs, output: read.append(inputs[0].shape[1]))  # type: ignore[union-attr, index]
    texts = [Text(model, prompt, model.tokenizer.encode(prompt), (stop, "nowhere")) for prompt in ("one", "three")]
    steps = grow(model, texts, Sampling(30, 0.0, 0, 1.0), 1)
    pieces = [list(text.pieces(steps)) for text in texts]
    hook.remove()
    assert "".join(pieces[0]) == "one" + first[:at] and "".join(pieces[1]) == "three" + whole[1]["text"]
    assert texts[0].finish_reason == "stop" and texts[1].finish_reason == "length"
    assert read == [2] * (read.index(1)) + [1] * (30 - read.index(1)) and read.index(1) < 30, "nothing more is computed for it"
    stopped = [json.loads(line) for line in run(capsys, *options, "--stop", "nowhere", stop)[0].splitlines()]
    assert stopped[0]["text"] == first[:at] and stopped[0]["finish_reason"] == "stop" and stopped[1] == whole[1]
    assert stopped[0]["token_ids"] == whole[0]["token_ids"][: len(stopped[0]["token_ids"])]
    assert main(["generate", "--load", str(hf), "--stop", ""]) == 2
    assert "--stop: got an empty text" in capsys.readouterr().err


def test_a_begin_token_that_comes_twice_is_said(hf: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokens = {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}}
    content["post_processor"] = {"type": "TemplateProcessing", "single": [begin, text], "pair": [begin, text, text], "special_tokens": tokens}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    options = ("--load", hf, "--max-new-tokens", 1, "--prompt", "a", "<s>b", "c<s>")
    said = run(capsys, *options, "--tokenizer-model", tmp_path)[1]
    do = "leave it out of the prompt, since the tokenizer adds it"
    assert said.count("warning") == 1 and f"warning: prompt 2: got the begin token '<s>' twice, expected it once; {do}\n" in said
    assert "warning" not in run(capsys, *options, "<s><s>d")[1], "this tokenizer adds none"


def test_a_text_that_the_model_has_no_room_for_is_said(hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    longest = open_trained(ModelFolderConfig(init_from_hf=str(hf))).longest
    options = ("--load", hf, "--prompt", "a", "--temperature", 0, "--max-new-tokens")
    said = run(capsys, *options, longest)[1]
    assert f"warning: --max-new-tokens: got {longest}, expected at most {longest - 1} behind the longest prompt; " in said
    assert "warning" not in run(capsys, *options, longest - 1)[1]


def test_a_prompt_that_is_too_long_names_what_limits_it(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scaled = shutil.copytree(hf, tmp_path / "scaled")
    config = json.loads((scaled / "config.json").read_text())
    del config["rope_parameters"]
    config["rope_scaling"] = {"rope_type": "dynamic", "factor": 1.5}
    (scaled / "config.json").write_text(json.dumps(config))
    for loaded, limit in (
        (hf, "255, the model's max_position_embeddings 256 less one"),
        (scaled, "383, the model's max_position_embeddings 256 times rope_scaling.factor 1.5 less one"),
    ):
        assert main(["generate", "--load", str(loaded), "--prompt", "b" * 400]) == 1
        assert f" tokens, expected at most {limit}; shorten the prompt\n" in capsys.readouterr().err


def test_bf16_and_another_tokenizer(hf: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    found = open_trained(ModelFolderConfig(init_from_hf=str(hf), bf16=True, tokenizer_model=str(tmp_path)))
    assert {parameter.dtype for parameter in found.stage.parameters()} == {torch.bfloat16}
    assert load_tokenizer(tmp_path).eos_id == found.tokenizer.eos_id


def test_what_is_not_applied_of_a_generation_config_is_said(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers writes another text with such a field, also without drawing."""
    copied = tmp_path / "model"
    shutil.copytree(hf, copied)
    path = copied / "generation_config.json"
    path.write_text(
        json.dumps({"repetition_penalty": 1.3, "num_beams": 1, "suppress_tokens": None, "do_sample": True, "no_repeat_ngram_size": 2})
    )
    assert main(["generate", "--load", str(copied), "--prompt", "a", "--max-new-tokens", "1"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert said == [f"note: {path} {field}: not applied here" for field in ("repetition_penalty 1.3", "no_repeat_ngram_size 2")]
