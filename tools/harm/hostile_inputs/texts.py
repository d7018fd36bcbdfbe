"""JSON, YAML, templates, expressions and logs that a parser pays for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tools.harm.hostile_inputs.case import (
    CHECKPOINT,
    Hostile,
    extended,
    replaced,
    reseal,
    with_bytes,
    with_field,
    with_json,
)

JSON_FILES = (
    ("native", f"{CHECKPOINT}/meta.json"),
    ("hf/convert", "config.json"),
    ("hf/convert", "generation_config.json"),
    ("hf/convert", "tokenizer_config.json"),
    ("hf/convert", "model.safetensors.index.json"),
    ("tokenizer/gpt2", "tokenizer.json"),
    ("tokenizer/tekken-json", "tekken.json"),
    ("peft", "adapter_config.json"),
    ("meta", "params.json"),
    ("torch_dist", f"{CHECKPOINT}/metadata.json"),
    ("dataset/train", "d.meta.json"),
    ("records/jsonl", "data.jsonl"),
    ("report", "log.jsonl"),
    ("report", "events.jsonl"),
    ("calibration", "desk.json"),
    ("chat/qwen", "tokenizer_config.json"),
)
DEPTHS = (2_000, 100_000)


def cases() -> Iterator[Hostile]:
    """Yield all of them."""
    yield from _json()
    yield from _yaml()
    yield from _templates()
    yield from _expressions()
    yield from _logs()
    yield from _reports()


def _json() -> Iterator[Hostile]:
    for format, file in JSON_FILES:
        for depth in DEPTHS:
            lists, objects = b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth
            yield Hostile(f"{file} is {depth} lists deep", format, replaced(file, lists))
            yield Hostile(f"{file} is {depth} objects deep", format, replaced(file, objects))
            inside = b'{"deep": ' + lists + b', "messages": ' + lists + b"}\n"
            yield Hostile(f"{file} has {depth} lists", format, replaced(file, inside))
        digits = b'{"iteration": ' + b"9" * 100_000 + b"}\n"
        yield Hostile(f"{file} has a number of 100,000 digits", format, replaced(file, digits))
        yield Hostile(f"{file} is not UTF-8", format, replaced(file, b'{"a": "\xff\xfe"}\n'))
        yield Hostile(
            f"{file} is UTF-16", format, with_bytes(file, lambda b: b.decode().encode("utf-16"))
        )
        yield Hostile(
            f"{file} begins with a mark", format, with_bytes(file, lambda b: b"\xef\xbb\xbf" + b)
        )
        # A run that was killed before its first step leaves empty ones.
        empty = replaced(file, b"")
        yield Hostile(f"{file} is empty", format, empty, may_be_taken=format == "report")


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
YAML = {
    "a billion laughs": LAUGHS + "lr: *i\n",
    "a list that holds itself": "lr: &a [*a]\n",
    "an object that holds itself": "&a {lr: *a}\n",
    "a merge of itself": "&a\n<<: *a\nlr: 1\n",
    "100,000 lists deep": "lr: " + "[" * 100_000 + "]" * 100_000 + "\n",
    "2,000 objects deep": "lr: " + "{a: " * 2_000 + "1" + "}" * 2_000 + "\n",
    "a Python object": "lr: !!python/object/apply:os.system ['touch ../code-was-run']\n",
    "an unknown tag": "lr: !surprise 3\n",
    "a control character": "lr: 1\x01\n",
    "a NUL": "lr: 1\0\n",
    "a key twice": "lr: 1\nlr: 2\n",
    "a list as a key": "? [a, b]\n: 1\n",
    "a date": "lr: 2001-01-01\n",
    "an hour": "train_iters: 1:30:00\n",
    "an octal number": "train_iters: 010\n",
    "a number of 100,000 digits": "train_iters: " + "9" * 100_000 + "\n",
    "not a number": "lr: .nan\n",
    "infinity": "lr: .inf\n",
    "a negative number": "train_iters: -4\n",
    "a list at the top": "- lr\n- 1\n",
    "two documents": "lr: 1\n---\nlr: 2\n",
    "a tab": "\tlr: 1\n",
    "a surrogate": 'lr: "\\ud800"\n',
    "a key of a number": "7: 1\n",
    "nothing": "",
    "binary": "lr: !!binary aGVsbG8=\n",
    "a set": "lr: !!set {a, b}\n",
    "an unknown anchor": "lr: *b\n",
    "an include": "lr: !include /etc/passwd\n",
}


def _yaml() -> Iterator[Hostile]:
    for name, text in YAML.items():
        yield Hostile(f"YAML with {name}", "options-file", replaced("run.yaml", text.encode()))
        both = extended("run.yaml", text.encode())
        yield Hostile(f"YAML that ends with {name}", "options-file", both)


TEMPLATES = {
    "a long loop": "{% for i in range(1000000000) %}{% endfor %}",
    "nested loops": "{% for i in range(90000) %}{% for j in range(90000) %}x{% endfor %}"
    "{% endfor %}",
    "a long product": "{{ 'a' * 3000000000 }}",
    "a list's product": "{% set a = [0] * 3000000000 %}",
    "a power": "{{ 10 ** 10 ** 9 }}",
    "a wide number": "{{ '%3000000000d' % 1 }}",
    "a wide format": "{{ '{:3000000000}'.format(1) }}",
    "doubling": "{% set ns = namespace(s='aa') %}{% for i in range(40) %}"
    "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "a macro of itself": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a global": "{{ cycler.__init__.__globals__.os.popen('touch ../code-was-run').read() }}",
    "an include": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}",
    "parentheses": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "blocks": "{% if true %}" * 5000 + "{% endif %}" * 5000,
    "no end": "{% for m in messages %}",
    "a division by zero": "{{ 1 // 0 }}",
    "a word minus a number": "{{ 'a' - 1 }}",
    "an indentation": "{{ 'a' | indent(3000000000) }}",
    "a centred word": "{{ 'a' | center(3000000000) }}",
    "a long batch": "{{ [1] | batch(1000000000, 'x') | list }}",
    "a sum of lists": "{{ [[1]] * 100000 | sum(start=[]) }}",
    "lorem": "{{ lipsum(1000000) }}",
}


def _templates() -> Iterator[Hostile]:
    for name, text in TEMPLATES.items():
        for layout in ("qwen", "llama2"):
            edit = with_field("tokenizer_config.json", "chat_template", text)
            yield Hostile(f"a chat template with {name}", f"chat/{layout}", edit)


def _expressions() -> Iterator[Hostile]:
    patterns = {
        "nested repetition": "(a+)+$",
        "alternatives": "(a|aa)+$",
        "a backreference": r"(a*)*\1b",
        "a huge count": "a{1000000}{1000000}",
        "a wrong expression": "(",
        "deep groups": "(" * 50_000 + ")" * 50_000,
        "blanks": r"(\s*)*x",
    }
    for name, pattern in patterns.items():
        # Where it is one that can be used, the tokenizer is another, as it says.
        split = {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        for layout in ("gpt2", "qwen"):
            edit = with_field("tokenizer.json", "pre_tokenizer", split)
            yield Hostile(f"tokenizer.json with {name}", f"tokenizer/{layout}", edit, True)
        edit = with_field("tekken.json", "config.pattern", pattern)
        yield Hostile(f"tekken.json with {name}", "tokenizer/tekken-json", edit, True)
    for field, value in TEKKEN_FIELDS:
        edit = with_field("tekken.json", f"config.{field}", value)
        yield Hostile(f"tekken.json {field} {value}", "tokenizer/tekken-json", edit)
    for name, value in TOKENIZER_FIELDS:
        edit = with_field("tokenizer.json", name, value)
        yield Hostile(f"tokenizer.json {name} {value}", "tokenizer/gpt2", edit)
    for value in IDS:
        edit = with_json("tokenizer.json", partial(_set_first_id, value=value))
        yield Hostile(f"tokenizer.json id {value}", "tokenizer/gpt2", edit)


TEKKEN_FIELDS: tuple[tuple[str, object], ...] = (
    ("default_vocab_size", 10**12),
    ("default_num_special_tokens", 10**9),
    ("default_num_special_tokens", -5),
    ("num_vocab_tokens", -1),
    ("default_vocab_size", "many"),
    ("default_vocab_size", 2.5),
    ("pattern", None),
    ("version", 7),
)
TOKENIZER_FIELDS: tuple[tuple[str, object], ...] = (
    ("model", None),
    ("model", []),
    ("model", {"type": "Magic"}),
    ("added_tokens", 5),
)
IDS: tuple[object, ...] = (-1, 10**9, 2**31, 2**32, 2.5, "a", None, True)


def _set_first_id(content: Any, value: object) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary[next(iter(vocabulary))] = value


STEP = " iteration {n}/ 100 | consumed samples: 8 | lm loss: {loss} | grad norm: 1.0 |"


def _logs() -> Iterator[Hostile]:
    lines = {
        "50,000 blanks": " " * 50_000,
        "50,000 blanks in a step": " iteration 1/" + " " * 50_000 + "| lm loss: 1",
        "50,000 blanks behind a name": " iteration 1/ 100 | lm loss" + " " * 50_000 + "1",
        "50,000 bars": " iteration 1/ 100 " + "|" * 50_000,
        "50,000 digits": " iteration " + "1" * 50_000 + "/ 100 | lm loss: 1.0 |",
        "a loss of 50,000 digits": STEP.format(n=1, loss="1" * 50_000),
        "50,000 colons": "step: 1  loss" + ":" * 50_000 + " 1",
        "50,000 colours": "\x1b[31m" * 50_000,
        "half colours": "\x1b[" * 50_000,
        "brackets": "[" * 50_000 + " step: 1 loss: 2",
        "a NUL": "\0" * 50_000,
        "iteration 10**18": STEP.format(n=10**18, loss="1.0E+00"),
        "a loss of 1e400": STEP.format(n=9, loss="1e400"),
        "a loss of 5e-324": STEP.format(n=9, loss="5e-324"),
        "a loss of nan": STEP.format(n=9, loss="nan"),
        "a negative iteration": STEP.format(n=-3, loss="1.0"),
        "10 MB": "x" * 10_000_000,
    }
    for name, line in lines.items():
        for file in ("megatron.log", "titan.log"):
            edit = extended(file, f"{line}\n".encode())
            # A run that has diverged writes it.
            diverged = name == "a loss of nan"
            yield Hostile(f"{file} with {name}", "trainer-logs", edit, may_be_taken=diverged)


def _entry(**fields: object) -> bytes:
    entry = {"iteration": 3, "consumed_samples": 12, "lm_loss": 5.0, "grad_norm": 1.0, **fields}
    return (json.dumps(entry) + "\n").encode()


COLUMNS = ("iteration", "lm_loss", "grad_norm", "consumed_samples", "tokens_per_second")
ODD_VALUES: tuple[object, ...] = (
    *(5e-324, float("nan"), 1e308, -1e308, 10**18, 10**400, -7, "a", None, [1], {"a": 1}, True),
)


def _reports() -> Iterator[Hostile]:
    usual = b"".join(_entry(iteration=i) for i in (1, 2))
    columns = {f"c{n}": n for n in range(5_000)}
    entries = {
        "5,000 columns": b"".join(_entry(iteration=i, **columns) for i in range(1, 4)),
        "a column in each line": b"".join(_entry(**{f"c{i}": 1}) for i in range(3_000)),
        "a name of 1 MB": _entry(**{"c" * 1_000_000: 1}),
        "lines that are lists": b"[1]\n" * 10,
        "no end of a line": b"1" * 100_000,
        "markup": _entry(**{"<script>alert(1)</script>": 1}),
    }
    for column in COLUMNS:
        for value in ODD_VALUES:
            entries[f"{column} {str(value)[:12]}"] = usual + _entry(**{column: value})
    for name, content in entries.items():
        edit = extended("log.jsonl", content)
        yield Hostile(f"log.jsonl with {name}", "report", edit, may_be_taken=True)

    for field in (
        "num_hidden_layers",
        "hidden_size",
        "vocab_size",
        "pipeline_model_parallel_size",
        "tensor_model_parallel_size",
        "world_size",
        "global_batch_size",
        "micro_batch_size",
        "time",
        "config",
        "model",
        "seq_length",
    ):
        for value in (10**9, 10**30, 0, -1, 2.5, "x", None, [1], float("nan")):
            name = f"events.jsonl {field} {str(value)[:12]}"
            change = partial(_set_everywhere, field=field, value=value)
            yield Hostile(name, "report", change, may_be_taken=True)


def _set_everywhere(folder: Path, field: str, value: object) -> None:
    """Set a field wherever it is in the events of a run."""
    path = folder / "events.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]

    def edit(content: object) -> object:
        if isinstance(content, dict):
            return {n: value if n == field else edit(inner) for n, inner in content.items()}
        return [edit(inner) for inner in content] if isinstance(content, list) else content

    path.write_text("".join(json.dumps(edit(line)) + "\n" for line in lines))
    reseal(folder)
