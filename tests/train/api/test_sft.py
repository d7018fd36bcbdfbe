"""ml.sft, ml.preprocess and ml.merge: what their commands do, and what a program gets."""

from __future__ import annotations

import json
from pathlib import Path

import megatron_llama as ml
import pytest
import torch
from megatron_llama.cli import main
from megatron_llama.errors import CheckpointError, ConfigError
from safetensors.torch import load_file


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    file = tmp_path / "talks.jsonl"
    words = ("import", "return", "class", "lambda", "global", "assert", "while", "raise")
    for word in words:
        messages = [{"role": "user", "content": f"Name {word}."}, {"role": "assistant", "content": f"The {word} statement."}]
        with file.open("a") as stream:
            stream.write(json.dumps({"messages": messages}) + "\n")
    return file


def tuning(options: dict[str, object], data: Path, talks: Path) -> dict[str, object]:
    rest = {name: value for name, value in options.items() if name not in ("data_path", "split")}
    rest |= {"seq_length": 64, "train_data": [str(talks)], "data_cache_path": str(talks.parent / "cache"), "lr": 1e-2}
    return {**rest, "split": "100,0,0", "chat_template": "plain", "tokenizer_model": str(data.parent / "docs-tokenizer")}


@pytest.mark.long
def test_a_model_learns_its_answers(options: dict[str, object], data: Path, talks: Path, tmp_path: Path) -> None:
    """As those of the command do, to the bit; and its low-rank additions become plain weights, the same by function and command."""
    given = tuning(options, data, talks) | {"lora_rank": 2}
    losses: list[float] = []

    class Watch(ml.Callback):
        def on_step(self, run: ml.Run, step: ml.Step) -> None:
            losses.append(float(step.loss))

    result = ml.sft(given, [Watch()], save=tmp_path / "run")
    assert result.iteration == 6 and losses[-1] == result.loss and losses[-1] < losses[0]
    (tmp_path / "run.yaml").write_text(json.dumps(given))
    assert main(["sft", "--config", str(tmp_path / "run.yaml"), "--save", str(tmp_path / "command")]) == 0
    merged = ml.merge(tmp_path / "run", tmp_path / "merged", dtype="float32")
    assert merged.additions == "its additions (rank 2)" and merged.dtype == "float32"
    assert main(["merge", str(tmp_path / "command"), str(tmp_path / "by_command")]) == 0
    own, other = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "by_command"))
    assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)
    assert merged.bytes == sum(values.nbytes for values in own.values())


def test_what_it_refuses(options: dict[str, object], data: Path, talks: Path, tmp_path: Path) -> None:
    given = tuning(options, data, talks)
    with pytest.raises(ConfigError, match=r"(?s)--data-path.*--neftune-noise-alpha.*--train-data"):
        ml.sft({name: value for name, value in given.items() if name != "train_data"}, data_path=data, neftune_noise_alpha=-1.0)
    with pytest.raises(ConfigError, match="--dtype"):
        ml.merge(tmp_path, tmp_path / "out", dtype="int8")  # type: ignore[arg-type]


@pytest.mark.long
def test_a_used_folder_is_refused_before_tokens_are_made(options: dict[str, object], data: Path, talks: Path, tmp_path: Path) -> None:
    given = tuning(options, data, talks)
    ml.sft(given, save=tmp_path / "run", train_iters=1)
    with pytest.raises(CheckpointError, match="expected no checkpoint, since --load is not given"):
        ml.sft(given, save=tmp_path / "run", data_cache_path=tmp_path / "untouched")
    assert not (tmp_path / "untouched").exists()


def test_preprocess(data: Path, tmp_path: Path) -> None:
    """The file of ``data`` again, by paths and by the command: the same dataset."""
    tokenizer = str(data.parent / "docs-tokenizer")
    report = ml.preprocess(data.with_suffix(".jsonl"), tmp_path / "own", tokenizer_model=tokenizer, append_eod=True, workers=1)
    assert report.documents == 200 and report.outputs == (str(tmp_path / "own"),)
    words = ["--input", f"{data}.jsonl", "--output-prefix", str(tmp_path / "other"), "--tokenizer-model", tokenizer, "--append-eod"]
    assert main(["preprocess", *words, "--workers", "1"]) == 0
    contents = {Path(f"{prefix}.bin").read_bytes() for prefix in (data, tmp_path / "own", tmp_path / "other")}
    assert len(contents) == 1
    with pytest.raises(ConfigError, match="append_eof"):
        ml.preprocess([data.with_suffix(".jsonl")], tmp_path / "more", append_eof=True)
