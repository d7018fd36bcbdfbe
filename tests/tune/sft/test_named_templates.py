"""Tokenizers with several templates by name: which is taken, and that all of them come out of every command as they went in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from megatron_llama.cli import main
from megatron_llama.data.tokenizer.copies import copy_tokenizer
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.errors import DataError
from megatron_llama.tune.sft.built_in_templates import BUILT_IN
from megatron_llama.tune.sft.chat import ChatTokenizer
from megatron_llama.tune.sft.formats import detect, read_example
from transformers import AutoTokenizer

from tests.converter.converting import hf_folder

PLAIN = "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' + m.content + '<|eot_id|>' }}{% endfor %}"
PLAIN += "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>' }}{% endif %}"
NAMED = {"default": PLAIN, "tool_use": "{{ 'Tools: ' + tools | tojson + '\n' }}" + PLAIN, "rag": "{{ 'Documents' }}" + PLAIN}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
MESSAGES = [{"role": "user", "content": "How is it?"}, {"role": "assistant", "content": "It is dry."}]


def in_list(folder: Path) -> None:
    in_config(folder, [{"name": name, "template": text} for name, text in NAMED.items()])


def in_object(folder: Path) -> None:
    in_config(folder, NAMED)


def in_files(folder: Path) -> None:
    """As transformers 5 writes them; what the configuration says is not read then."""
    in_config(folder, "never read")
    (folder / "chat_template.jinja").write_text(NAMED["default"])
    (folder / "additional_chat_templates").mkdir()
    for name in ("tool_use", "rag"):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(NAMED[name])


def in_config(folder: Path, value: object) -> None:
    file = folder / "tokenizer_config.json"
    config = {name: each for name, each in json.loads(file.read_text()).items() if name != "chat_template"}
    file.write_text(json.dumps(config if value is None else {**config, "chat_template": value}))


FORMS: Mapping[str, Callable[[Path], None]] = {made.__name__: made for made in (in_list, in_object, in_files)}


def copied(layouts: Path, folder: Path) -> Path:
    """The tokenizer of LLaMA 3."""
    shutil.copytree(layouts / "llama3", folder, ignore=shutil.ignore_patterns("original"), dirs_exist_ok=True)
    return folder


def text(folder: Path, record: Mapping[str, Any], wanted: str | None = None) -> str:
    return ChatTokenizer(load_tokenizer(folder), wanted).read(read_example(record, detect(record)), "assistant").text


@pytest.mark.parametrize("form", FORMS)
def test_with_tools_the_template_of_that_name_is_taken(form: str, layouts: Path, tmp_path: Path) -> None:
    from trl.data_utils import apply_chat_template

    FORMS[form](copied(layouts, tmp_path / "own"))
    auto = AutoTokenizer.from_pretrained(tmp_path / "own")
    for tools in (None, TOOLS):
        theirs = auto.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
        assert text(tmp_path / "own", {"messages": MESSAGES, "tools": tools}) == theirs
    assert theirs.startswith("Tools: [")
    ChatTokenizer(load_tokenizer(tmp_path / "own"), "chatml").save_hf(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == BUILT_IN["chatml"], "one that was given replaces all"
    # As in TRL, and unlike apply_chat_template, no tools are none.
    trl = apply_chat_template({"messages": MESSAGES, "tools": []}, auto)["text"]
    assert text(tmp_path / "own", {"messages": MESSAGES, "tools": []}) == trl == text(tmp_path / "own", {"messages": MESSAGES})


@pytest.mark.parametrize("form", FORMS)
def test_names_without_a_default_are_refused(form: str, layouts: Path, tmp_path: Path) -> None:
    folder = copied(layouts, tmp_path / "own")
    FORMS[form](folder)
    if form == "in_files":
        (folder / "chat_template.jinja").unlink()
    else:
        in_config(folder, [{"name": name, "template": NAMED[name]} for name in ("tool_use", "rag")])
    with pytest.raises(ValueError, match="no default specified"):
        AutoTokenizer.from_pretrained(folder).apply_chat_template(MESSAGES)
    with pytest.raises(DataError, match="got templates named rag, tool_use, expected one named default"):
        ChatTokenizer(load_tokenizer(folder))
    assert text(folder, {"messages": MESSAGES}, "llama3").startswith("<|begin_of_text|>"), "another one was given"


def test_a_field_that_holds_no_templates_is_refused(layouts: Path, tmp_path: Path) -> None:
    for given in (3, ["x"], [{"name": "default"}], {"default": None}, [{"name": "../default", "template": "x"}]):
        in_config(copied(layouts, tmp_path / "own"), given)
        with pytest.raises(DataError, match=r"tokenizer_config.json:? chat_template: got .*expected a text, or texts with names"):
            ChatTokenizer(load_tokenizer(tmp_path / "own"))


@pytest.mark.parametrize("place", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja", "given"])
def test_a_byte_order_mark_is_refused(place: str, layouts: Path, tmp_path: Path) -> None:
    """transformers would put it in front of every text."""
    folder = copied(layouts, tmp_path / "own")
    in_files(folder)
    file = tmp_path / "given.jinja" if place == "given" else folder / place
    file.write_text(PLAIN, encoding="utf-8-sig")
    if place == "chat_template.jinja":
        assert AutoTokenizer.from_pretrained(folder).apply_chat_template(MESSAGES, tokenize=False).startswith("\ufeff")
    with pytest.raises(DataError, match=rf"{file.name}: got a byte-order mark \(U\+FEFF\) at its beginning, .*save the file without"):
        ChatTokenizer(load_tokenizer(folder), str(file) if place == "given" else None)


def held(folder: Path) -> dict[str, bytes]:
    """The files of a tokenizer."""
    others = ("config.json", "SHA256SUMS", "tokenizer.json")
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors" and path.name not in others]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if not path.name.startswith("model")}


def words(**options: object) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.long
@pytest.mark.parametrize("form", ["in_list", "in_files"])
def test_all_of_them_come_out_as_they_went_in(form: str, layouts: Path, tmp_path: Path) -> None:
    """Out of sft, export, copies, and conversions there and back."""
    hf = copied(layouts, hf_folder(tmp_path / "hf", vocab_size=1000))
    FORMS[form](hf)
    before = AutoTokenizer.from_pretrained(hf).chat_template
    assert before == NAMED
    copy_tokenizer(hf / "tokenizer.json", tmp_path / "copy")
    folders = [tmp_path / "copy"]
    for there in ("native", "megatron"):
        assert main(["convert", str(hf), str(tmp_path / there), "--to", there]) == 0
        assert main(["convert", str(tmp_path / there), str(tmp_path / f"{there}-hf"), "--to", "hf"]) == 0
        folders.append(tmp_path / f"{there}-hf")
    lines = [{"messages": MESSAGES, "tools": tools} for tools in (TOOLS, None)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sizes = {"train_iters": 1, "global_batch_size": 1, "micro_batch_size": 1, "seq_length": 256, "split": "100,0,0"}
    steps = words(**sizes, data_cache_path=tmp_path / "cache")
    run = words(init_from_hf=hf, train_data=tmp_path / "data.jsonl", save=tmp_path / "run", export_hf=tmp_path / "tuned")
    assert main(["sft", *run, *steps]) == 0
    assert main(["export", *words(load=tmp_path / "run", output=tmp_path / "exported")]) == 0
    folders += [tmp_path / "run" / "tokenizer", tmp_path / "tuned", tmp_path / "exported"]
    for folder in folders:
        assert held(folder) == held(hf), folder
        assert AutoTokenizer.from_pretrained(folder).chat_template == before
    assert main(["export", *words(load=tmp_path / "run", output=tmp_path / "exported")]) == 0, "an earlier export is replaced"
