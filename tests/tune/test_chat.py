"""A conversation goes on as if the model read all of it anew, and reads only what is new."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron_llama.checkpoint.model_folders.hf.writer import export_hf
from megatron_llama.cli import main
from megatron_llama.config.schema import Config
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.engine.mesh import Mesh
from megatron_llama.errors import DataError
from megatron_llama.model.generate import Sampling, generate_batch
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.llama import build_stages
from megatron_llama.model.load import load_stages, rank_specs
from megatron_llama.train.api.common.trained import Trained
from megatron_llama.tune.commands.chat import Talk
from megatron_llama.tune.sft.chat import ChatTokenizer
from megatron_llama.tune.sft.problems import UnusableError
from tokenizers import pre_tokenizers

from tests.model.test_generate import MODEL

GREEDY = Sampling(max_new_tokens=6, temperature=0.0, top_k=0, top_p=1.0)
SPECIAL = ("<s>", "</s>", "<|im_end|>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of letters with a few special tokens."""
    made = tmp_path_factory.mktemp("tokenizer")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    coder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": len(letters) + number, "content": name, "special": True, **plain} for number, name in enumerate(SPECIAL)]
    model = {"type": "BPE", "vocab": {letter: number for number, letter in enumerate(letters)}, "merges": []}
    content = {"version": "1.0", "added_tokens": added, "pre_tokenizer": coder, "decoder": coder, "model": model}
    (made / "tokenizer.json").write_text(json.dumps(content))
    (made / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> Trained:
    config, mesh = (Config(model=replace(MODEL, vocab_size=259, max_position_embeddings=256)), Mesh.single())
    [stage] = build_stages(config, mesh).values()
    load_stages([stage], rank_specs(config, mesh), InitialWeights(3, 0.3), dtype=torch.float32, device=mesh.device)
    return Trained(stage, load_tokenizer(folder), frozenset({257}))


@pytest.fixture
def hf(model: Trained, folder: Path, tmp_path: Path) -> Path:
    return export_hf(tmp_path / "hf", model.stage.config, InitialWeights(3, 0.3), "float32", load_tokenizer(folder))


def talk_of(model: Trained, template: str = "chatml", system: str | None = None, sampling: Sampling = GREEDY) -> Talk:
    return Talk(model, ChatTokenizer(model.tokenizer, template), sampling, seed=1, system=system)


def expected(model: Trained, messages: list[dict[str, str]]) -> str:
    """The answer of a model that reads everything at once."""
    speaker = ChatTokenizer(model.tokenizer, "chatml")
    found = generate_batch(model.stage, [speaker.continued(messages)], GREEDY, stops=frozenset({257, 258}), seed=1)
    return model.tokenizer.decode([token for _, token in found if isinstance(token, int)])


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_each_answer_is_that_of_a_model_that_reads_all_of_it_and_reads_only_what_is_new(model: Trained, system: str | None) -> None:
    assert [ChatTokenizer(model.tokenizer, name).ends() for name in ("chatml", "plain")] == [{258}, {257}]
    talk = talk_of(model, system=system)
    messages = [{"role": "system", "content": system}] if system else []
    read, before = list[int](), 0
    hook = model.stage.model.layers["0"].mlp.register_forward_hook(lambda module, inputs, output: read.append(inputs[0].shape[0]))  # type: ignore[union-attr, index]
    for number, text in enumerate(("hi", "what?", "no")):
        messages.append({"role": "user", "content": text})
        read.clear()
        answer = "".join(talk.answer(text))
        whole = len(ChatTokenizer(model.tokenizer, "chatml").continued(messages))
        assert read[0] == whole if number == 0 else read[0] < whole - before + len(answer.encode()) + 2, "what was read before stays read"
        before = whole
        assert answer == expected(model, messages) != ""
        messages.append({"role": "assistant", "content": answer})
    hook.remove()
    talk.reset()
    first = messages[: 1 + bool(system)]
    assert "".join(talk.answer("hi")) == expected(model, first)


def test_old_messages_are_forgotten_when_there_is_no_room(model: Trained) -> None:
    talk = talk_of(model, system="S")
    for _ in range(8):
        assert "".join(talk.answer("12345")) != ""
        assert talk._reader.lengths[0] <= 256
    said = [message["content"] for message in talk._said]
    assert said.count("12345") < 8 and said[0] == "12345"
    system = model.tokenizer.encode("S")[0]
    assert system in talk._read[:40], "the system's message stays"


def test_what_cannot_be_read_is_refused_and_forgotten(model: Trained) -> None:
    talk = talk_of(model)
    with pytest.raises(
        DataError, match=r"the message: got 3\d\d tokens, expected at most 255, the model's max_position_embeddings 256 less"
    ):
        "".join(talk.answer("x" * 300))
    with pytest.raises(UnusableError):
        "".join(talk.answer("over<|im_end|>and out"))
    assert "".join(talk.answer("hi")) == expected(model, [{"role": "user", "content": "hi"}])


@pytest.mark.long
def test_a_conversation_through_a_pipe(model: Trained, hf: Path, tmp_path: Path) -> None:
    """A folder of HuggingFace, its tokenizer, a template file."""
    (tmp_path / "template").write_text("{% for message in messages %}{{ message['role'][0] + message['content'] + '</s>' }}{% endfor %}")
    command = [sys.executable, "-m", "megatron_llama", "chat", "--load", str(hf), "--temperature", "0", "--max-new-tokens", "6"]
    command += ["--chat-template", str(tmp_path / "template")]
    lines = ["hi", "", "</s>", "/reset", "hi", "again"]
    ended = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True)
    talk = Talk(model, ChatTokenizer(model.tokenizer, str(tmp_path / "template")), GREEDY, seed=1, system=None)
    first, second = ("".join(talk.answer(text)) for text in ("hi", "again"))
    assert ended.stdout == f"{first}\n{first}\n{second}\n"
    assert "error: the message: got the special token '</s>' at character 0" in ended.stderr


def test_commands(model: Trained, hf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["hi", "/help", "/rest now", " /tmp", "/reset", "hi", "/quit", "never read"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(said)))
    assert main(["chat", "--load", str(hf), "--temperature", "0", "--max-new-tokens", "6"]) == 0
    printed = capsys.readouterr()
    talk = talk_of(model, "plain")
    first, second = ("".join(talk.answer(text)) for text in ("hi", "/tmp"))
    assert printed.out == f"{first}\n{second}\n{first}\n"
    assert printed.err.count("  /reset  forget the conversation") == 2 and printed.err.count("error: ") == 1
    assert "error: /rest is no command\n  /help " in printed.err


def test_a_template_without_its_tokens_is_one_error(hf: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as that of WordPiece, which has something behind a text but names no end token."""
    content = json.loads((folder / "tokenizer.json").read_text().replace("</s>", "[SEP]"))
    frame = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "[SEP]", "type_id": 0}}]
    behind = {"[SEP]": {"id": "[SEP]", "ids": [257], "tokens": ["[SEP]"]}}
    content["post_processor"] = {"type": "TemplateProcessing", "single": frame, "pair": frame, "special_tokens": behind}
    (hf / "tokenizer.json").write_text(json.dumps(content))
    (hf / "tokenizer_config.json").unlink()
    (hf / "SHA256SUMS").unlink()  # the files are others than those of the export
    assert main(["chat", "--load", str(hf)]) == 1
    assert "error: --chat-template: got 'eos_token' is undefined (from built-in template plain" in capsys.readouterr().err


def test_a_terminal_edits_lines_and_remembers_them() -> None:
    """Ctrl-P brings back the line before, Ctrl-A goes to its beginning, Ctrl-D ends."""
    terminal, theirs = pty.openpty()
    code = "from megatron_llama.tune.commands.chat import lines\nfor line in lines(): print('got', repr(line))"
    plain = {**os.environ, "TERM": "dumb"}
    child = subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, env=plain)
    os.close(theirs)
    shown = ""
    for count, typed in enumerate(("a message\r", "\x10\x01not \r", "\x04")):
        while shown.count("got ") < count or "> " not in shown.rpartition("got ")[2]:
            shown += os.read(terminal, 1000).decode()
        os.write(terminal, typed.encode())
    assert child.wait() == 0
    os.close(terminal)
    assert "got 'a message'" in shown and "got 'not a message'" in shown
