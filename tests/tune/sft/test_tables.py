"""The same conversations in every kind of file give the same ids and masks, which are transformers'."""

from __future__ import annotations

import importlib
import json
import re
import struct
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.feather as feather
import pyarrow.parquet as parquet
import pytest
from megatron_llama.data.tokenizer.hf import HFTokenizer
from megatron_llama.errors import DataError
from megatron_llama.tune.preference.align_config import AlignConfig
from megatron_llama.tune.preference.dataset import read_pairs
from megatron_llama.tune.sft.chat import ChatTokenizer
from megatron_llama.tune.sft.dataset import read_examples
from megatron_llama.tune.sft.problems import UnusableError
from megatron_llama.tune.sft.records import example_files, records
from megatron_llama.tune.sft.sft_config import SFTConfig
from megatron_llama.tune.sft.tables import table_rows
from transformers import AutoTokenizer

if TYPE_CHECKING:
    from datasets import Dataset

Row = dict[str, Any]
SEQ_LENGTH = 2000
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% generation %}"
    "{% if m.reasoning_content is defined %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m['content'] or '' }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + (call.function | tojson) + '</call>' }}{% endfor %}{{ '<|im_end|>' }}"
    "{% endgeneration %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tool(name: str, **properties: Any) -> Row:
    schema = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def calls(name: str, **arguments: Any) -> Row:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def said(role: str, content: str, **more: Any) -> Row:
    return {"role": role, "content": content, **more}


TEXT = {"type": "string"}
ROME = calls("weather", city="Rome")
ADDED = calls("add", a=1, b=2, options={"exact": True, "digits": [1, 2]})
NOTHING = calls("now")
ASKED = [said("user", "Rome?"), ROME, said("tool", "dry"), said("assistant", "Dry.")]
SUMMED = [said("user", "1 + 2?"), ADDED, said("tool", "3"), said("assistant", "3")]
THOUGHT = [said("system", "Think."), said("user", "Why?"), said("assistant", "So.", reasoning_content="Hm.")]
TIMED = [said("user", "Time?"), NOTHING, said("tool", "noon"), said("assistant", "Noon.")]
CONVERSATIONS = [
    {"messages": ASKED, "tools": [tool("weather", city=TEXT)]},
    {"messages": SUMMED, "tools": [tool("add", a={"type": "number"}, b=TEXT)]},
    {"messages": THOUGHT},
    {"messages": TIMED, "tools": [tool("weather", city=TEXT), tool("now")]},
]
PREFERENCES = [
    {"prompt": [said("user", "Rome?")], "chosen": [ROME], "rejected": [ADDED], "tools": [tool("weather", city=TEXT)]},
    {"prompt": [said("user", "1 + 2?")], "chosen": [ADDED], "rejected": [said("assistant", "3", reasoning_content="?")], "tools": None},
    {"prompt": [said("user", "Time?")], "chosen": [NOTHING], "rejected": [ROME], "tools": [tool("now")]},
]


@cache
def hf_datasets() -> ModuleType:
    """HuggingFace's library: pandas comes with it, which only some of these tests need."""
    return importlib.import_module("datasets")


def loaded(rows: list[Row], folder: Path) -> Dataset:
    """What ``load_dataset`` makes of JSON lines."""
    file = json_lines(rows, folder)
    return hf_datasets().load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder / "cache"))


def json_lines(rows: list[Row], folder: Path) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def json_array(rows: list[Row], folder: Path) -> Path:
    file = folder / "rows.json"
    file.write_text(json.dumps(rows, indent=1))
    return file


def table(rows: list[Row], folder: Path) -> Path:
    file = folder / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def arrow_file(rows: list[Row], folder: Path) -> Path:
    file = folder / "rows.feather"
    feather.write_feather(pyarrow.Table.from_pylist(rows), str(file), compression="zstd")
    return file


def saved(dataset: Dataset, folder: Path) -> Path:
    dataset.save_to_disk(folder / "saved", num_shards=2)
    return folder / "saved"


def as_parquet(dataset: Dataset, folder: Path) -> Path:
    dataset.to_parquet(folder / "written.parquet")
    return folder / "written.parquet"


def as_json(dataset: Dataset, folder: Path, lines: bool = True) -> Path:
    file = folder / ("written.jsonl" if lines else "written.json")
    dataset.to_json(file, lines=lines)
    return file


KINDS: dict[str, Callable[[list[Row], Path], Path]] = {
    "JSON lines": json_lines,
    "JSON array": json_array,
    "parquet": table,
    "an Arrow file": arrow_file,
    "from_list, to_parquet": lambda rows, folder: as_parquet(hf_datasets().Dataset.from_list(rows), folder),
    "from_list, save_to_disk": lambda rows, folder: saved(hf_datasets().Dataset.from_list(rows), folder),
    "from_list of JSON, to_parquet": lambda rows, folder: as_parquet(hf_datasets().Dataset.from_list(rows, on_mixed_types="use_json"), folder),
    "load_dataset, to_parquet": lambda rows, folder: as_parquet(loaded(rows, folder), folder),
    "load_dataset, save_to_disk": lambda rows, folder: saved(loaded(rows, folder), folder),
    "load_dataset, to_json": lambda rows, folder: as_json(loaded(rows, folder), folder),
    "load_dataset, to_json of an array": lambda rows, folder: as_json(loaded(rows, folder), folder, lines=False),
}


@pytest.fixture(scope="session")
def with_tools(llama3: Path, tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    return ChatTokenizer(HFTokenizer(llama3 / "tokenizer.json"), str(template))


def tokens(rows: list[Row], kind: str, folder: Path, tokenizer: ChatTokenizer) -> list[tuple[list[int], list[bool]]]:
    """The ids and the mask of every text of the examples."""
    files = example_files([str(KINDS[kind](rows, folder))])
    found = (
        read_pairs(files, tokenizer, SFTConfig(), AlignConfig(), SEQ_LENGTH)
        if "chosen" in rows[0]
        else read_examples(files, tokenizer, SFTConfig(), SEQ_LENGTH)
    )
    assert found.problems == [] and len(found) == len(rows) and found.nulls == 0
    return [(ids.tolist(), mask.tolist()) for ids, mask in zip(found.ids, found.loss_mask, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_conversations(kind: str, with_tools: ChatTokenizer, llama3: Path, tmp_path: Path) -> None:
    reference = AutoTokenizer.from_pretrained(llama3)
    expected = []
    for row in CONVERSATIONS:
        whole = reference.apply_chat_template(
            row["messages"], row.get("tools"), chat_template=TEMPLATE, return_dict=True, return_assistant_tokens_mask=True
        )
        expected.append((whole["input_ids"], [bool(one) for one in whole["assistant_masks"]]))
    assert tokens(CONVERSATIONS, kind, tmp_path, with_tools) == expected


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", KINDS)
def test_preferences(kind: str, with_tools: ChatTokenizer, llama3: Path, tmp_path: Path) -> None:
    reference = AutoTokenizer.from_pretrained(llama3)
    expected = [
        reference.apply_chat_template(row["prompt"] + row[half], row["tools"], chat_template=TEMPLATE, return_dict=True)["input_ids"]
        for row in PREFERENCES
        for half in ("chosen", "rejected")
    ]
    assert [ids for ids, _ in tokens(PREFERENCES, kind, tmp_path, with_tools)] == expected
    assert tokens(PREFERENCES, kind, tmp_path, with_tools) == tokens(PREFERENCES, "JSON lines", tmp_path, with_tools)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "JSON" in kind or "load_dataset" in kind])
def test_null_and_types_that_a_struct_cannot_hold(kind: str, with_tools: ChatTokenizer, tmp_path: Path) -> None:
    """One argument of two types, fields in another order, and null that the example itself has."""
    rows = [
        {"messages": [said("user", "?"), calls("f", **arguments), said("tool", "ok"), said("assistant", "Ok.")]}
        for arguments in ({"a": "text", "b": 1}, {"b": 1.5, "a": 2}, {"a": None, "c": [1, None]})
    ]
    files = example_files([str(KINDS[kind](rows, tmp_path))])
    found = read_examples(files, with_tools, SFTConfig(), SEQ_LENGTH)
    texts = ["".join(with_tools.spelt(ids.tolist())) for ids in found.ids]
    assert [text.partition('"arguments": ')[2].partition("}</call>")[0] for text in texts] == [
        '{"a": "text", "b": 1}',
        '{"b": 1.5, "a": 2}',
        '{"a": null, "c": [1, null]}',
    ]
    assert found.nulls == 1 and any(line.startswith("null in tools or calls of them: 1 examples") for line in found.report())
    # A table whose null was written into JSON says what nobody can take back.
    file = as_json(hf_datasets().Dataset.from_list(CONVERSATIONS), tmp_path)
    found = read_examples([file], with_tools, SFTConfig(), SEQ_LENGTH)
    assert (len(found), found.nulls, found.problems) == (len(CONVERSATIONS), 3, [])


def test_two_formats_in_one_file(with_tools: ChatTokenizer, tmp_path: Path) -> None:
    """Null beside a field that can be used is no value, in JSON as in a table."""
    rows = [{"messages": None, "text": "hello"}, {"messages": None, "text": "world"}]
    for kind in ("JSON lines", "JSON array", "parquet", "from_list, save_to_disk"):
        files = example_files([str(KINDS[kind](rows, tmp_path))])
        assert set(read_examples(files, with_tools, SFTConfig(), SEQ_LENGTH).formats.values()) == {"text"}


STRING = pyarrow.string()
PAIR = pyarrow.struct({"a": STRING, "b": STRING})
NESTED: dict[str, tuple[pyarrow.DataType, Any, Any]] = {
    "large text": (pyarrow.large_string(), "x", "x"),
    "text view": (pyarrow.string_view(), "x", "x"),
    "dictionary": (pyarrow.dictionary(pyarrow.int8(), STRING), "x", "x"),
    "large list": (pyarrow.large_list(PAIR), [{"a": "x"}, None], [{"a": "x"}, None]),
    "fixed list": (pyarrow.list_(STRING, 2), ["x", None], ["x", None]),
    "list of lists": (pyarrow.list_(pyarrow.list_(PAIR)), [[{"b": "x"}]], [[{"b": "x"}]]),
    "map": (pyarrow.map_(STRING, PAIR), [("k", {"b": "x"}), ("n", None)], {"k": {"b": "x"}, "n": None}),
    "empty struct": (pyarrow.struct({"a": STRING}), {}, {}),
}


@pytest.mark.parametrize("name", NESTED)
def test_types_of_columns(name: str, tmp_path: Path) -> None:
    kind, value, expected = NESTED[name]
    column = pyarrow.array([{"v": value, "w": None}, None], pyarrow.struct({"v": kind, "w": STRING}))
    rows = pyarrow.table({"c": column, "top": pyarrow.array([value, None], kind)})
    if name not in ("text view", "empty struct"):  # parquet has none
        parquet.write_table(rows, tmp_path / "rows.parquet")
    feather.write_feather(rows, str(tmp_path / "rows.arrow"))
    for file in example_files([str(tmp_path)]):
        assert [record.value for record in records(file)] == [{"c": {"v": expected}, "top": expected}, {}]


@pytest.mark.parametrize(
    "value", [datetime(2026, 1, 1, tzinfo=UTC), Decimal("1.5"), b"x", float("nan")], ids=lambda value: type(value).__name__
)
def test_values_that_json_does_not_have(value: Any, with_tools: ChatTokenizer, tmp_path: Path) -> None:
    """They are refused by name where an example uses them, and do no harm in other columns."""
    good = {"messages": [said("user", "?"), said("assistant", "!")], "metadata": {"value": value}, "timestamp": value}
    files = [table([good, {**good, "messages": [said("user", "?"), calls("f", value=value), said("assistant", "!")]}], tmp_path)]
    found = read_examples(files, with_tools, SFTConfig(), SEQ_LENGTH)
    [problem] = found.problems
    assert len(found) == 1 and problem.reason == "no JSON value"
    assert str(problem).startswith(f"{files[0]}:row 2: got the {type(value).__name__} {str(value)[:40]}, expected a text, a number,")


def test_tables_that_cannot_be_read(with_tools: ChatTokenizer, tmp_path: Path) -> None:
    two = pyarrow.table([["x"], ["y"]], names=["text", "text"])
    parquet.write_table(two, tmp_path / "a.parquet")
    mapped = pyarrow.array([[("k", "x"), ("k", "y")]], pyarrow.map_(STRING, STRING))
    feather.write_feather(pyarrow.table({"messages": mapped}), str(tmp_path / "b.arrow"))
    broken = pyarrow.array(['{"role"'], STRING).cast(pyarrow.json_())
    feather.write_feather(pyarrow.table({"messages": broken}), str(tmp_path / "c.arrow"))
    whole = (tmp_path / "b.arrow").read_bytes()
    (tmp_path / "d.arrow").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "e.feather").write_bytes(b"FEA1" + bytes(60))
    found = read_examples(example_files([str(tmp_path)]), with_tools, SFTConfig(), SEQ_LENGTH)
    assert [(Path(problem.where.split(":")[0]).name, problem.reason) for problem in found.problems] == [
        ("a.parquet", "repeated column"),
        ("b.arrow", "a map that is no object"),
        ("c.arrow", "invalid JSON"),
        ("d.arrow", "damaged Arrow"),
        ("e.feather", "damaged Arrow"),
    ]


def test_folders_of_datasets(tmp_path: Path) -> None:
    """The files that it names, not those of an older save; several splits are not mixed."""
    rows = [{"text": str(number)} for number in range(6)]
    hf_datasets().Dataset.from_list(rows).save_to_disk(tmp_path / "one", num_shards=3)
    stale = tmp_path / "one" / "data-00003-of-00004.arrow"
    stale.write_bytes((tmp_path / "one" / "data-00000-of-00003.arrow").read_bytes())
    files = example_files([str(tmp_path / "one")])
    assert [file.name for file in files] == [f"data-{number:05}-of-00003.arrow" for number in range(3)]
    assert [record.value for file in files for record in records(file)] == rows
    splits = {name: hf_datasets().Dataset.from_list(rows) for name in ("train", "test")}
    hf_datasets().DatasetDict(splits).save_to_disk(tmp_path / "two")
    loaded(rows, tmp_path)
    for folder in ("two", "cache", "."):
        with pytest.raises(
            DataError, match=r"got a folder that datasets has written .*; give the folder of the split, or the \.arrow files"
        ):
            example_files([str(tmp_path / folder)])
    assert len(example_files([str(tmp_path / "two" / "train")])) == 1
    for listed in ([], 5, {}, ["a.arrow"], [{"name": "a.arrow"}], [{"filename": 5}]):
        (tmp_path / "one" / "state.json").write_text(json.dumps({"_data_files": listed}))
        with pytest.raises(DataError, match=re.escape(f"{tmp_path}/one/state.json: _data_files: got ")):
            example_files([str(tmp_path / "one")])


def test_an_arrow_file_whose_texts_end_nowhere_is_damaged(tmp_path: Path) -> None:
    """pyarrow believes the offsets of a file: reading there ends the process."""
    path = tmp_path / "x.arrow"
    table = pyarrow.table({"text": ["hello", "world"]})
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    offsets = struct.pack("<3i", 0, 5, 10)
    assert path.read_bytes().count(offsets) == 1
    path.write_bytes(path.read_bytes().replace(offsets, struct.pack("<3i", 0, 1 << 30, 10)))
    ((row, problem),) = table_rows(path)
    assert row == 1 and isinstance(problem, UnusableError) and problem.reason == "damaged Arrow"
