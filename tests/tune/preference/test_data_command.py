"""``data`` on files of preferences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from megatron_llama.cli import main

ASKED = {"role": "user", "content": "What is a list?"}
YES = {"role": "assistant", "content": "A mutable sequence."}
NO = {"role": "assistant", "content": "No idea."}
PAIR = {"prompt": [ASKED], "chosen": [YES], "rejected": [NO]}
OTHER = {"prompt": [{"role": "user", "content": "Why?"}], "chosen": [NO], "rejected": [YES]}


def test_pairs_are_recognized(llama3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, (PAIR, OTHER))))
    common = [str(file), "--tokenizer-model", str(llama3), "--chat-template", "llama3"]
    assert main(["data", "preview", *common]) == 0
    shown = capsys.readouterr().out
    assert "in the loss: completions (pairs for align --method dpo)" in shown and f"{file}:1: format trl\n" in shown
    halves = shown.split("\nchosen: ")[1].split("\nrejected: ")
    for half, answer in zip(halves, (YES, NO), strict=True):
        marked = half[half.index("[[") + 2 : half.index("]]")]
        assert marked.replace("|", "").replace("<eot_id>", "") == answer["content"], marked
    assert main(["data", "check", *common]) == 0
    checked = capsys.readouterr().out
    assert "2 pairs, " in checked and "with --packing 1 samples" in checked and "tokens of a prompt with a completion: least" in checked
    assert main(["data", "check", *common, "--method", "kto"]) == 0
    assert "4 completions, 2 good and 2 bad" in capsys.readouterr().out
    assert main(["data", "preview", *common, "--method", "kto", "--example", "2", "--seq-length", "8"]) == 0
    shown = capsys.readouterr().out
    assert "\ngood: " in shown and "\nbad: " in shown and ", of which a sample holds 9, " in shown
    assert main(["data", "stats", *common, "--output", str(tmp_path / "stats.html")]) == 0
    page = (tmp_path / "stats.html").read_text()
    assert page.count("<svg") == 3 and "Tokens of rejected completions" in page


def test_what_is_wrong_with_pairs(llama3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, (PAIR, {**PAIR, "rejected": [YES]}, OTHER))))
    common = [str(file), "--tokenizer-model", str(llama3), "--chat-template", "llama3"]
    assert main(["data", "check", *common]) == 1
    assert f"  {file}:2: got the same chosen and rejected, expected two different completions" in capsys.readouterr().out
    assert main(["data", "check", *common, "--on-bad-sample", "drop"]) == 0
    assert main(["data", "preview", *common, "--example", "2"]) == 1
    capsys.readouterr()
    assert main(["data", "check", *common, "--method", "dpo", "--loss-on", "last"]) != 0
    assert "--loss-on: got last, expected nothing: these are pairs" in capsys.readouterr().err
    assert main(["data", "preview", *common, "--example", "9"]) != 0
    assert f"{file}: got fewer than 9 examples" in capsys.readouterr().err
    assert main(["data", "check", *common, "--preference-format", "openai"]) == 1
    assert f"{file}:1: field 'input': got no such field" in capsys.readouterr().out


def test_judged_completions_are_recognized(llama3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "judged.jsonl"
    rows = [{"prompt": text, "completion": " it is.", "label": text == "So"} for text in ("So", "Here", "There")]
    file.write_text("\n".join(map(json.dumps, rows)))
    command = ["data", "check", str(file), "--tokenizer-model", str(llama3), "--chat-template", "llama3"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "align --method kto" in shown and "3 completions, 1 good and 2 bad" in shown
    assert main([*command, "--preference-format", "completion_label"]) == 0 and capsys.readouterr().out == shown
    assert main([*command, "--method", "dpo"]) == 1
    assert "got a single completion with a label, expected a chosen and a rejected completion" in capsys.readouterr().out


def test_conversations_with_a_label_are_recognized(llama3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LLaMA-Factory's files for KTO."""
    file = tmp_path / "judged.jsonl"
    rows = [{"messages": [ASKED, YES], "label": True}, {"messages": [*OTHER["prompt"], NO], "label": False}]
    rows += [{"messages": [OTHER["prompt"][0], {**YES, "weight": 0}, ASKED, NO], "label": False}]
    file.write_text("\n".join(map(json.dumps, rows)))
    common = [str(file), "--tokenizer-model", str(llama3), "--chat-template", "llama3"]
    assert main(["data", "check", *common]) == 0
    shown = capsys.readouterr().out
    assert "align --method kto" in shown and "3 completions, 1 good and 2 bad" in shown and "format completion_label" in shown
    assert main(["data", "preview", *common, "--example", "3"]) == 0
    assert "in the loss; 1 message marked as not learned\n" in capsys.readouterr().out
    assert main(["data", "check", *common, "--data-format", "messages"]) == 1
    assert "field 'label': got a value, expected no such field; give the file to align (--method kto)" in capsys.readouterr().out
