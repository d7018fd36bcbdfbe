"""ml.align: what a program gets of a run of preference tuning."""

from __future__ import annotations

import json
from pathlib import Path

import megatron_llama as ml
import pytest
from megatron_llama.errors import ConfigError


class Watch(ml.Callback):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.margins: list[float] = []
        self.evaluated: list[float] = []

    def on_step(self, run: ml.Run, step: ml.Step) -> None:
        self.margins.append(float(step.numbers["rewards/margins"]))
        assert step.batches[0].completion_ids is not None

    def on_evaluation(self, run: ml.Run, loss: float) -> None:
        self.evaluated.append(run.validation_numbers["rewards/margins"])


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    file = tmp_path / "pairs.jsonl"
    words = ("import", "return", "class", "lambda", "global", "assert", "while", "raise")
    lines = [{"prompt": f"Name {word}.", "chosen": f" The {word} statement.", "rejected": f" Statement {word} the."} for word in words]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def tuning(options: dict[str, object], data: Path, pairs: Path) -> dict[str, object]:
    rest = {name: value for name, value in options.items() if name not in ("data_path", "split")}
    return {
        **rest, "seq_length": 64, "train_data": [str(pairs)], "data_cache_path": str(pairs.parent / "cache"),
        "tokenizer_model": str(data.parent / "docs-tokenizer"), "lr": 1e-2,
    }


@pytest.mark.long
def test_its_numbers(options: dict[str, object], data: Path, pairs: Path) -> None:
    """In callbacks, each step, and in the result: the same, and as the model learns they rise."""
    watch = Watch()
    given = {**tuning(options, data, pairs), "valid_data": [str(pairs)], "eval_interval": 3}
    result = ml.align(given, [watch], method="simpo")
    assert len(watch.margins) == 6 and watch.margins[-1] > watch.margins[0]
    assert result.numbers["rewards/margins"] == watch.margins[-1]
    assert [result.validation_numbers[at]["rewards/margins"] for at in (0, 3, 6)] == watch.evaluated
    assert watch.evaluated[-1] > watch.evaluated[0] and set(result.validation_losses) == {0, 3, 6}


@pytest.mark.long
def test_scores_alone(options: dict[str, object], data: Path, pairs: Path) -> None:
    given = {**tuning(options, data, pairs), "split": "100,0,0"}
    result = ml.align(given, method="ipo", only_reference_scores=True)
    assert (result.iteration, result.loss, result.numbers) == (0, None, {})
    assert len(list(pairs.parent.glob("pairs.jsonl.*.reference.safetensors"))) == 1


def test_it_refuses_as_the_command_does() -> None:
    with pytest.raises(ConfigError) as error:
        ml.align(method="reward", beta=1.0, data_path="x")
    assert [str(error.value).count(flag) for flag in ("--beta", "--data-path: ", "--train-data: ")] == [1, 1, 1]
