"""Everything that can be wrong with an example has a message of its own, with file and line."""

from __future__ import annotations

import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any, get_args

import pyarrow
import pyarrow.parquet as parquet
import pytest
from megatron_llama.data.tokenizer.hf import HFTokenizer
from megatron_llama.errors import DataError
from megatron_llama.tune.sft import json_text, records
from megatron_llama.tune.sft.chat import ChatTokenizer
from megatron_llama.tune.sft.dataset import Examples, read_examples, refuse_problems
from megatron_llama.tune.sft.formats import Conversation
from megatron_llama.tune.sft.repair import Repair
from megatron_llama.tune.sft.sft_config import SFTConfig

SEQ_LENGTH = 64
USER, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
GOOD = json.dumps({"messages": [USER, ANSWER]})


def line(**record: Any) -> str:
    return json.dumps(record)


def chat(*messages: Any, **more: Any) -> str:
    return line(messages=list(messages), **more)


def turn(role: Any, content: Any = "text") -> dict[str, Any]:
    return {"role": role, "content": content}


# What stands on the second line of a file; the reason under which it is counted; and part of the message behind file and line.
CASES: dict[str, tuple[str | bytes, str, str]] = {
    "cut off": ('{"messages": [', "invalid JSON", "invalid JSON (Expecting value, column 15), expected one JSON object per line"),
    "single quotes": ("{'messages': []}", "invalid JSON", "Expecting property name enclosed in double quotes, column 2"),
    "two objects": ("{}{}", "invalid JSON", "Extra data, column 3"),
    "a control character": ('{"text": "a\tb"}', "invalid JSON", "Invalid control character at, column 12"),
    "no number": ('{"text": NaN}', "invalid JSON", "NaN is no JSON number"),
    "bad UTF-8": (b'{"text": "\xff"}', "bad UTF-8", "got byte 0xff at byte 10, expected UTF-8"),
    "gigantic line": (b'{"text": "' + b"x" * 3000 + b'"}', "gigantic line", "a line of more than 2,000 bytes"),
    "deep nesting": ("[" * 1900, "too deeply nested", "JSON nested too deeply"),
    "an array": ("[1]", "not an object", "got a JSON array, expected a JSON object"),
    "a string": ('"text"', "not an object", "got a JSON string, expected a JSON object"),
    "a repeated key": ('{"messages": [], "messages": []}', "repeated key", "field 'messages': got the key twice in one object"),
    "a missing field": (line(text="x"), "missing field messages", "field 'messages': got no such field (fields: 'text')"),
    "no array": (line(messages="x"), "messages are no array", "field 'messages': got a JSON string, expected an array"),
    "no messages": (line(messages=[]), "no messages", "field 'messages': got an empty array"),
    "no object": (chat("Why?", ANSWER), "message is no object", "field 'messages[0]': got a JSON string, expected an object with 'role'"),
    "no role": (chat({"content": "x"}, ANSWER), "message without role", "field 'messages[0]': got 'content', expected a field 'role'"),
    "role is no string": (chat(turn(1)), "role is no string", "field 'messages[0].role': got a JSON number"),
    "unknown role": (chat(turn("narrator")), "unknown role", "field 'messages[0].role': got 'narrator', expected one of system, developer, user"),
    "no content": (chat({"role": "user"}, ANSWER), "message without content", "field 'messages[0]': got 'role', expected 'content'"),
    "null content": (chat(turn("user", None), ANSWER), "no string", "field 'messages[0].content': got a JSON null, expected a string"),
    "an image": (chat(turn("user", [{"type": "image_url"}])), "content is no text", "'messages[0].content[0]': got a part of type 'image_url'"),
    "a part that is no object": (chat(turn("user", ["x"])), "content is no text", "'messages[0].content[0]': got a JSON string"),
    "broken tool calls": (chat(USER, {"role": "assistant", "tool_calls": "f"}), "broken tool calls", "'messages[1].tool_calls': got f"),
    "a user's calls": (chat({"role": "user", "content": None, "tool_calls": [{"function": {}}]}), "broken tool calls", "'messages[0].tool_calls': got calls in a message of role user"),
    "broken tools": (chat(USER, ANSWER, tools="f"), "tools are no array", "field 'tools': got a text that is no JSON (Expecting value)"),
    "half a pair": (chat(USER, turn("assistant", "\ud83d")), "half a surrogate pair", "'messages[1].content': got half a surrogate pair"),
    "a noncharacter": (chat(turn("user", "\ufdd0"), ANSWER), "noncharacter", "'messages[0].content': got the noncharacter U+FDD0"),
    "a null character": (chat(turn("user", "a\0"), ANSWER), "null character", "'messages[0].content': got U+0000 at character 1"),
    "an answer first": (chat(ANSWER), "conversation begins with an answer", "'messages[0]': got assistant first, expected system or developer or user"),
    "two questions": (chat(USER, USER, ANSWER), "wrong role order", "'messages[1]': got user after user, expected assistant"),
    "a late system message": (chat(USER, ANSWER, turn("system"), ANSWER), "wrong role order", "got system after assistant, expected user or tool"),
    "two answers": (chat(USER, ANSWER, ANSWER), "wrong role order", "'messages[2]': got assistant after assistant"),
    "no answer": (chat(USER), "no answer at the end", "field 'messages': got a last message of role user, expected assistant"),
    "an empty answer": (chat(USER, turn("assistant", " \n")), "empty answer", "field 'messages[1]': got nothing but spaces"),
    "an empty question": (chat(turn("user", ""), ANSWER), "empty question", "field 'messages[0]': got nothing but spaces"),
    "half a weight": (chat(USER, {**ANSWER, "weight": 0.5}), "a weight that is neither 0 nor 1", "'messages[1].weight': got 0.5"),
    "marks against each other": (chat(USER, {**ANSWER, "weight": 0, "train": True}), "marks that contradict each other", "'messages[1]': got weight false, train true"),
    "a question to learn": (chat({**USER, "train": True}, ANSWER), "a mark that contradicts --loss-on", "'messages[0]': got a mark that says that the message is learned"),
    "nothing to learn": (chat(USER, {**ANSWER, "weight": 0}), "every answer is marked as not learned", "got 1 marked messages"),
    "half an example": (chat(USER, ANSWER, weight=0.5), "weight of an example", "field 'weight': got 0.5, expected 1"),
    "a column of images": (chat(USER, ANSWER, images=["a.png"]), "unknown meaning", "field 'images': got a value, expected no such field"),
    "functions": (chat(USER, ANSWER, functions=[{}]), "unknown meaning", "field 'functions': got a value, expected no such field; write them as"),
    "a label": (chat(USER, ANSWER, label=False), "unknown meaning", "field 'label': got a value, expected no such field; give the file to align"),
    "a field that nothing reads": (chat(USER, ANSWER, reward=1.0), "unknown meaning", "field 'reward': got a value in a field that is not"),
    "tools that no template renders": (chat(USER, ANSWER, tools=[{}]), "tools not rendered", "field 'tools': got tools, and a template that leaves it out"),
    "two reasonings": (chat(USER, {**ANSWER, "reasoning": "a", "thinking": "b"}), "two reasonings", "'messages[1]': got different texts in thinking and reasoning"),
    "reasoning in parts": (chat(USER, {**ANSWER, "reasoning": ["a"]}), "reasoning is no string", "'messages[1].reasoning': got a value"),
    "variables as text": (chat(USER, ANSWER, chat_template_kwargs="a"), "variables of the template are no object", "field 'chat_template_kwargs': got a JSON string, expected an object"),
    "a special token": (chat(turn("user", "x<|eot_id|>y"), ANSWER), "special token in a message", "'<|eot_id|>' at character 1"),
    "an infinite number": ('{"messages": [{"role": "user", "content": "x", "n": 1e999}]}', "no JSON value", "got the float inf, expected a text, a number, true, false or null"),
    "a tool first": (chat(turn("tool"), ANSWER), "wrong role order", "'messages[0]': got tool first, expected system or developer or user"),
}  # fmt: skip
OTHER_FORMATS: dict[str, tuple[str, str, str, str]] = {
    "no value": ("sharegpt", line(conversations=[{"from": "human"}]), "message without content", "'conversations[0]': got 'from', expected 'value'"),
    "no from": ("sharegpt", line(conversations=[{"value": "x"}]), "message without role", "'conversations[0]': got 'value', expected a field 'from'"),
    "no output": ("alpaca", line(instruction="x"), "missing field output", "field 'output': got no such field (fields: 'instruction')"),
    "an empty output": ("alpaca", line(instruction="x", output=""), "empty output", "field 'output': got nothing but spaces"),
    "an empty instruction": ("alpaca", line(instruction=" ", output="x"), "empty instruction", "field 'instruction': got nothing but"),
    "input is no text": ("alpaca", line(instruction="x", input=3, output="y"), "no string", "field 'input': got a JSON number"),
    "broken history": ("alpaca", line(instruction="x", history=["y"], output="z"), "broken history", "field 'history': got ['y'], expected an array of"),
    "no completion": ("prompt", line(prompt="x"), "missing field completion", "field 'completion': got no such field (fields: 'prompt')"),
    "an empty completion": ("prompt", line(prompt="x", completion=""), "empty completion", "field 'completion': got nothing but"),
    "text and messages": ("prompt", line(prompt="x", completion=[ANSWER]), "prompt and completion differ in kind", "got a JSON string with a completion that is a JSON array"),
    "an empty text": ("text", line(text="\n"), "empty text", "field 'text': got nothing but spaces"),
    "no known field": ("auto", line(question="x", answer="y"), "unknown format", "got the fields 'question', 'answer', expected messages"),
}  # fmt: skip


def read(folder: Path, content: bytes, tokenizer: ChatTokenizer, name: str = "data.jsonl", **options: Any) -> tuple[Path, Examples]:
    path = folder / name
    path.write_bytes(content)
    return path, read_examples([path], tokenizer, SFTConfig(**options), SEQ_LENGTH)


def test_each_has_its_message(tmp_path: Path, chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "LARGEST", 2000)
    for bad, reason, words in CASES.values():
        raw = bad if isinstance(bad, bytes) else bad.encode()
        path, examples = read(tmp_path, b"\n".join([GOOD.encode(), raw, GOOD.encode()]), chat)
        [problem] = examples.problems
        assert problem.where == f"{path}:2" and problem.reason == reason, (reason, str(problem))
        assert str(problem).startswith(f"{path}:2: ") and words in str(problem), str(problem)
        assert len(examples) == 2 and examples.numbers == [0, 2]
    for kind, text, reason, words in OTHER_FORMATS.values():
        path, examples = read(tmp_path, b"\n" + text.encode(), chat, data_format=kind)
        [problem] = examples.problems
        assert problem.where == f"{path}:2" and problem.reason == reason and words in str(problem), str(problem)


@pytest.mark.parametrize("limit", [1000, 20_000])
def test_how_deep_is_too_deep_does_not_depend_on_the_stack(limit: int, tmp_path: Path, chat: ChatTokenizer) -> None:
    """Libraries change Python's limit: torch's compiler, for one."""

    def example(depth: int) -> str:
        """Brackets in texts are no levels."""
        metadata = "[" * (depth - 1) + "]" * (depth - 1)
        return GOOD[:-1] + f', "metadata": {metadata}, "note": "\\"{"[" * 300}"}}'

    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        for name, join in (("data.jsonl", "\n".join), ("data.json", lambda texts: f"[{','.join(texts)}]")):
            deep = [example(json_text.DEEPEST), example(json_text.DEEPEST + 1)]
            _, examples = read(tmp_path, join(deep).encode(), chat, name)
            assert len(examples) == 1
            [problem] = examples.problems
            assert problem.reason == "too deeply nested" and problem.number == 1
            assert f"at most {json_text.DEEPEST} levels deep" in str(problem)
    finally:
        sys.setrecursionlimit(before)


def test_elements_of_arrays_are_named_with_their_lines(tmp_path: Path, chat: ChatTokenizer) -> None:
    path, examples = read(tmp_path, f'[\n  {GOOD},\n\n  {{"messages": []}},\n  {GOOD}\n]'.encode(), chat, "data.json")
    assert len(examples) == 2 and [str(p).split(": ")[0] for p in examples.problems] == [f"{path}[1] (line 4)"]
    cases = {
        f"[\n{GOOD}\n{GOOD}]": ("broken array", (1, 3), "got '{\"messages', expected a comma or the closing bracket"),
        f"[\n{GOOD},\n": ("invalid JSON", (1, 3), "expected an array of objects"),
        f"[\n{GOOD}\n": ("broken array", (1, 3), "got the end of the file"),
        f'[{GOOD},\n{{"messages": [}}]': ("invalid JSON", (1, 2), "Expecting value, column 15"),
        f"[{GOOD},\n{GOOD},\n\n3]": ("not an object", (2, 4), "a JSON number"),
        "[" + ",".join([GOOD] * 17 + ["{}"] + [GOOD]) + "]": ("missing field messages", (17, 1), "got no such field (fields: none)"),
    }
    for content, (reason, (number, at), words) in cases.items():
        path, examples = read(tmp_path, content.encode(), chat, "data.json")
        [problem] = examples.problems
        assert (problem.reason, problem.where) == (reason, f"{path}[{number}] (line {at})") and words in str(problem), str(problem)
    path, examples = read(tmp_path, b'[\n\n"\xfe"]', chat, "data.json")
    assert [str(problem).split(",")[0] for problem in examples.problems] == [f"{path}[0] (line 3): got byte 0xfe at byte 4"]
    assert len(read(tmp_path, f"{GOOD}\n{GOOD}".encode(), chat, "data.json")[1]) == 2, "JSON lines under another name"


@pytest.mark.parametrize("block", [1, 2, 7, 64, 1 << 20])
def test_an_array_in_pieces(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the file is cut into blocks: the same values, lines and columns, characters of several bytes among them."""
    monkeypatch.setattr(json_text, "BLOCK", block)
    path, values = (tmp_path / "data.json", [{"a": "é\u20ac\U0001f600", "b": [1, -2.5e3, None]}, {}, 12345, "x", True, {"c": {"d": "]"}}])
    texts = [
        json.dumps(values, ensure_ascii=False),
        json.dumps(values, indent=1),
        "\ufeff [" + ",\n\n".join(map(json.dumps, values)) + " , ] \n",
    ]
    lines = [[1] * 6, [2, 10, 11, 12, 13, 14], [1, 3, 5, 7, 9, 11]]
    for text, at in zip(texts, lines, strict=True):
        path.write_text(text)
        assert json_text.is_array(path)
        assert list(json_text.elements(path)) == list(zip(at, values, strict=True))
    broken = {
        '[{"a": 1}, {"b" 2}]': (1, "column 17"),
        '[1,\n 2,\n  {"b": 1 1}]': (3, "column 11"),
        "[1, 2] [3]": (1, "got '["),
        "[1, nul": (1, "column 5"),
    }
    for text, (line, words) in broken.items():
        path.write_text(text)
        *_, (where, problem) = json_text.elements(path)
        said = str(problem.at("data"))
        assert where == line and words in said and said.endswith("; nothing after it was read"), said
    path.write_bytes(b'[1,\n"\xc3\xa9", "\xff"]')
    *_, (where, problem) = json_text.elements(path)
    assert where == 2 and "got byte 0xff at byte 11, expected UTF-8" in str(problem.at("data"))


def test_an_array_need_not_fit_into_memory(tmp_path: Path) -> None:
    path, value = tmp_path / "data.json", {"text": "é" * 5000}
    with path.open("w") as file:
        file.write("[" + ",".join([json.dumps(value, ensure_ascii=False)] * 2000) + "]")
    tracemalloc.start()
    assert sum(found == value for _, found in json_text.elements(path)) == 2000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 2


def test_text_of_tools_counts_too(tmp_path: Path, chat: ChatTokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "ends with <|eot_id|>"}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": "\ufdd0"}}}]}
    half = {"role": "assistant", "content": "x", "name": "\ud800"}
    rows = [line(messages=[USER, ANSWER], tools=tools), line(messages=[USER, call]), line(messages=[USER, half])]
    _, examples = read(tmp_path, "\n".join(rows).encode(), chat)
    assert [problem.reason for problem in examples.problems] == ["special token in a message", "noncharacter", "half a surrogate pair"]


def test_folders_and_tables(tmp_path: Path, chat: ChatTokenizer) -> None:
    """Hidden files and folders with a file's name are no examples; what a table leaves empty is not there."""
    (tmp_path / ".cache").mkdir()
    (tmp_path / "folder.json").mkdir()
    for name in (".cache/a.jsonl", ".b.jsonl", "folder.json/c.jsonl"):
        (tmp_path / name).write_text(GOOD)
    assert records.example_files([str(tmp_path)]) == [tmp_path / "folder.json" / "c.jsonl"]
    rows = [{"messages": [USER, ANSWER], "text": None}, {"messages": None, "text": "some text"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    found = [record.value for record in records.records(tmp_path / "data.parquet")]
    assert [list(value) for value in found] == [["messages"], ["text"]]  # type: ignore[arg-type]


def test_a_file_that_nobody_may_read(tmp_path: Path, chat: ChatTokenizer) -> None:
    """Permissions do not stop a superuser, under whom tests may run: so the file goes away between the look and the reading."""
    path, _ = read(tmp_path, GOOD.encode(), chat)
    files = records.example_files([str(path)])
    path.unlink()
    with pytest.raises(DataError, match=r"data\.jsonl: got No such file or directory, expected a readable file; mend the permissions"):
        read_examples(files, chat, SFTConfig(), SEQ_LENGTH)


def test_templates_that_fail_or_leave_nothing(tmp_path: Path, llama3: Path) -> None:
    contents = "{% for m in messages %}{{ m.content }}{% endfor %}"
    cases = {
        "{{ raise_exception('no system here') }}": ("template error", "got no system here (from"),
        "{{ messages[7].content }}": ("template error", "got list object has no element 7"),
        "{{ 1 // 0 }}": ("template error", "got ZeroDivisionError"),
        "{% generation %}{% endgeneration %}x": ("content not rendered", "got content of message 1 of 2 (user), and a template that leaves it out"),
        contents + "{% generation %}{% endgeneration %}": ("content not rendered", "(assistant), and a template that leaves it outside {% generation %}"),
        "{{ messages | length }}" + contents: ("answers cannot be told apart", "messages[:2] differently"),
    }  # fmt: skip
    for number, (source, (reason, words)) in enumerate(cases.items()):
        file = tmp_path / f"{number}.jinja"
        file.write_text(source)
        tokenizer = ChatTokenizer(HFTokenizer(llama3 / "tokenizer.json"), str(file))
        path, examples = read(tmp_path, f"{GOOD}\n".encode(), tokenizer)
        [problem] = examples.problems
        assert (problem.reason, problem.where) == (reason, f"{path}:1") and words in str(problem), str(problem)


def test_stop_or_drop(tmp_path: Path, chat: ChatTokenizer) -> None:
    """With stop all is told before training; with drop it is counted."""
    path, examples = read(tmp_path, "\n".join([GOOD, "[1]", *["{}"] * 20]).encode(), chat)
    with pytest.raises(DataError) as error:
        refuse_problems(examples, [path], SFTConfig())
    lines = str(error.value).splitlines()
    assert lines[0] == "21 examples cannot be used (--on-bad-sample drop leaves them out):" and len(lines) == 13
    assert lines[1].startswith(f"  - {path}:2: ") and lines[10].startswith(f"  - {path}:11: ")
    assert lines[11:] == ["  - and 11 more", "  - by reason: missing field messages 20, not an object 1"]
    refuse_problems(examples, [path], SFTConfig(on_bad_sample="drop"))
    assert list(examples.report())[2] == "unusable: 21 examples"
    path, examples = read(tmp_path, b"[1]\n", chat)
    with pytest.raises(DataError, match="got no example that can be used"):
        refuse_problems(examples, [path], SFTConfig(on_bad_sample="drop"))


def test_long_examples(tmp_path: Path, chat: ChatTokenizer) -> None:
    long = json.dumps({"messages": [USER, {"role": "assistant", "content": "on and on " * 50}]})
    content = f"{GOOD}\n{long}\n".encode()
    _, cut = read(tmp_path, content, chat)
    assert (len(cut), cut.truncated, cut.dropped, len(cut.ids[1]), sum(cut.lengths.values())) == (2, 1, 0, SEQ_LENGTH + 1, 2)
    _, left = read(tmp_path, content, chat, on_long_sample="drop")
    assert (len(left), left.truncated, left.dropped, left.problems) == (1, 0, 1, [])
    assert list(left.report())[2] == "too long: 0 examples truncated, 1 dropped"
    asked = f"{GOOD}\n{json.dumps({'messages': [turn('user', 'why? ' * 200), ANSWER]})}\n{long}\n".encode()
    _, useful = read(tmp_path, asked, chat)
    assert (len(useful), useful.truncated, useful.dropped, useful.problems) == (2, 1, 1, []), (
        "what has no answer left is left out, and said"
    )
    assert list(useful.report())[2] == "too long: 1 examples truncated, 1 dropped (1 of them since the cut leaves no answer to learn)"
    path, stopped = read(tmp_path, content, chat, on_long_sample="stop")
    assert [str(problem).split(" tokens")[0] for problem in stopped.problems] == [f"{path}:2: got {max(cut.lengths)}"]


def test_parquet(tmp_path: Path, chat: ChatTokenizer) -> None:
    """Rows instead of lines; columns may be structured or text."""
    rows = [{"messages": [USER, ANSWER]}, {"messages": []}, {"messages": None}, {"messages": [USER, ANSWER]}]
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    examples = read_examples([path], chat, SFTConfig(), SEQ_LENGTH)
    assert examples.formats == {str(path): "messages"} and examples.numbers == [0, 3]
    assert examples.ids[0].tolist() == read(tmp_path, GOOD.encode(), chat)[1].ids[0].tolist()
    found = [str(problem).split(",")[0] for problem in examples.problems]
    assert found == [
        f"{path}:row 2: field 'messages': got an empty array",
        f"{path}:row 3: field 'messages': got no such field (fields: none)",
    ]
    content = path.read_bytes()
    for damaged in (content[:-20], b"PAR1" + bytes(100)):
        path.write_bytes(damaged)
        [problem] = read_examples([path], chat, SFTConfig(), SEQ_LENGTH).problems
        assert problem.reason == "damaged parquet" and str(problem).startswith(f"{path}:row 1: got "), str(problem)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "table.csv").write_text("a,b")
    (tmp_path / "folder").mkdir()
    paths = [str(tmp_path / name) for name in ("none.jsonl", "empty.jsonl", "table.csv", "folder")]
    with pytest.raises(DataError) as error:
        records.example_files(paths)
    expected = ("no such file", "an empty file", "a .csv file", "a folder without examples")
    assert [f"{path}: got {words}" in str(error.value) for path, words in zip(paths, expected, strict=True)] == [True] * 4


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
ORDERS: dict[str, tuple[list[dict[str, Any]], list[tuple[str, str]] | str, dict[str, int]]] = {
    "a greeting": ([turn("assistant", "Hello."), USER, ANSWER], [("user", "Why?"), ("assistant", "Because.")], {"drop-leading-answers": 1}),
    "behind the system": (
        [turn("system"), turn("assistant", "Hello."), turn("tool", "x"), USER, ANSWER],
        [("system", "text"), ("user", "Why?"), ("assistant", "Because.")],
        {"drop-leading-answers": 1},
    ),
    "twice": (
        [USER, turn("user", "How?"), turn("user", "Who?"), ANSWER, turn("assistant", "Really.")],
        [("user", "Why?\n\nHow?\n\nWho?"), ("assistant", "Because.\n\nReally.")],
        {"merge-repeated-roles": 1},
    ),
    "no answer": ([USER, ANSWER, turn("user", "How?"), turn("user", "Who?")], [("user", "Why?"), ("assistant", "Because.")], {"drop-unanswered-end": 1, "merge-repeated-roles": 1}),
    "in order": ([USER, ANSWER], [("user", "Why?"), ("assistant", "Because.")], {}),
    "calls of tools are not joined": ([USER, CALL, ANSWER], "'messages[2]': got assistant after assistant, expected user or tool", {}),
    "nothing empty is joined": ([USER, turn("user", " "), ANSWER], "'messages[1]': got user after user", {}),
    "places are those of the file": ([turn("assistant", "Hello."), USER, turn("assistant", "")], "field 'messages[2]': got nothing but spaces", {}),
    "nothing is left": ([ANSWER], "field 'messages': got no message, expected assistant", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_conversations_are_repaired_where_that_is_asked_for(name: str, tmp_path: Path, chat: ChatTokenizer) -> None:
    messages, expected, counts = ORDERS[name]
    content = line(messages=messages).encode()
    options = {"repair_conversations": get_args(Repair)}
    _, examples = read(tmp_path, content, chat, **options)
    assert dict(examples.repairs) == counts
    if isinstance(expected, str):
        assert expected in str(examples.problems[0])
        return
    whole = chat.read(Conversation(tuple(turn(*pair) for pair in expected)), "assistant")
    assert [list(ids) for ids in examples.ids] == [whole.ids]
    assert [list(mask) for mask in examples.loss_mask] == [[bool(counted) for counted in whole.loss_mask]]
    said = [line for line in examples.report() if line.startswith("repaired")]
    assert said == (["repaired conversations: " + ", ".join(f"{way} 1" for way in sorted(counts))] if counts else [])
    left = read(tmp_path, content, chat)[1].problems
    assert bool(left) is bool(counts), "nothing is repaired that was not asked for"
    assert not left or str(left[0]).endswith(tuple(f"or give --repair-conversations {way}" for way in counts)), "the remedy names the repair"
