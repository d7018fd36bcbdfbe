"""Writes docs/api.md from the docstrings of what ``megatron_llama`` exports.

``python -m tools.api_docs docs/api.md`` rewrites the document; a test holds it current, and another
one runs its examples in their order.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import megatron_llama as ml
from megatron_llama.config.help import field_docs
from megatron_llama.files import replacing

HEADER = """\
# Python

Written by `python -m tools.api_docs docs/api.md` from docstrings; a test holds it current, and the
examples are run in this order.

```python
import megatron_llama as ml
```

takes milliseconds; torch is imported with the first function that needs it. All of it is typed
(`py.typed`). The commands of the command line call these functions: they do the same, refuse the
same, and an error that names the option `--top-k` means the argument `top_k`. What a user can get
wrong is a `UserError`; nothing here ends the process, except that a rank which cannot leave a run
whose other ranks are gone is ended, as [faults.md](faults.md) says. A function may be called again
in the same process."""

SECTIONS = (
    (
        "Your own model",
        "The engine around any `nn.Module`.",
        (
            "shard",
            "ModuleEngine",
            "unit",
            "AdamW",
            "group",
            "ScheduleFreeAdamW",
            "Muon",
            "elementwise",
            "LossScaling",
        ),
    ),
    (
        "Training LLaMA",
        "What `preprocess`, `pretrain`, `sft` and `align` do.",
        (
            *("preprocess", "PreprocessReport", "train", "sft", "align", "TrainResult"),
            *("Callback", "Run", "Step", "Config"),
        ),
    ),
    (
        "Models",
        "Folders of any format: HuggingFace, native checkpoints, Megatron, Meta.",
        (
            *("load", "Trained", "save_hf", "SavedHF", "convert", "Converted"),
            *("merge", "Merged", "verify", "Verified", "generate", "Generated"),
        ),
    ),
    ("Planning", "", ("plan", "Plan", "PlannedLayout")),
    ("Errors", "", ("UserError",)),
)


def api_markdown() -> str:
    """Return the document."""
    lines = [HEADER]
    for title, text, names in SECTIONS:
        lines += ["", f"## {title}", *(["", text] if text else [])]
        for name in names:
            lines += ["", f"### {name}", "", *_entry(name, getattr(ml, name))]
    return "\n".join(lines) + "\n"


def examples(markdown: str) -> Iterator[str]:
    """Yield every example of the document: the blocks of Python that do more than import."""
    for block in markdown.split("```python\n")[1:]:
        code = block.partition("```")[0]
        if code.strip() != "import megatron_llama as ml":
            yield code


def _entry(name: str, value: Any) -> Iterator[str]:
    if inspect.isfunction(value):
        yield from _signature(f"ml.{name}", value)
        yield from ["", *_prose(value)]
        return
    if isinstance(value, type) and is_dataclass(value):
        yield from _prose(value)
        docs = field_docs(value)
        yield from _rows(
            (item.name, str(item.type), docs.get(item.name, ""))
            for item in fields(value)
            if not item.name.startswith("_")
        )
    else:  # the functions above make it
        yield from _prose(value)
    for member, each in vars(value).items():
        if member.startswith("_") or not inspect.getdoc(each):
            continue
        if isinstance(each, property):
            assert each.fget is not None
            returns = inspect.signature(each.fget).return_annotation
            yield from ["", f"**`.{member}`**: `{_plain(returns)}`. {_line(each)}"]
        elif inspect.isfunction(each):
            yield from ["", *_signature(f".{member}", each), "", *_prose(each)]


def _rows(rows: Iterator[tuple[str, str, str]]) -> Iterator[str]:
    lines = [
        f"| `{name}` | `{kind}` | {' '.join(doc.replace('``', '`').split())} |".replace(
            " | None` |", " \\| None` |"
        )
        for name, kind, doc in rows
    ]
    if lines:
        yield from ["", "| field | type | meaning |", "|---|---|---|", *lines]


def _signature(name: str, function: Any) -> Iterator[str]:
    """A function as one calls it, with an argument on each line if one line is too short."""
    found = inspect.signature(function)
    words = []
    starred = False
    for argument in found.parameters.values():
        if argument.name == "self":
            continue
        if argument.kind is argument.KEYWORD_ONLY and not starred:
            words.append("*")
            starred = True
        word = str(argument.replace(annotation=argument.empty, default=argument.empty))  # stars too
        if argument.annotation is not argument.empty:
            word += f": {_plain(argument.annotation)}"
        if argument.default is not argument.empty:
            word += f" = {argument.default!r}"
        words.append(word)
    is_context = inspect.isgeneratorfunction(inspect.unwrap(function))
    name = f"with {name}" if is_context else name
    result = "None" if is_context else found.return_annotation
    end = f") -> {_plain(result)}" if result not in (found.empty, "None", None) else ")"
    line = f"{name}({', '.join(words)}{end}"
    yield "```py"
    if len(line) <= 100:
        yield line
    else:
        yield f"{name}("
        yield from (f"    {word}," for word in words)
        yield end
    yield "```"


def _plain(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")


def _prose(value: Any) -> list[str]:
    """The docstring as Markdown."""
    text = inspect.getdoc(value)
    assert text is not None, value
    lines = []
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        lines.append(line if fence else line.replace("``", "`"))
    return lines


def _line(value: Any) -> str:
    return " ".join(" ".join(_prose(value)).split())


def main() -> None:
    """Write the document."""
    parser = argparse.ArgumentParser(
        usage="python -m tools.api_docs FILE",
        description="Write the documentation of what megatron_llama exports, from its docstrings.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="written anew: docs/api.md")
    target: Path = parser.parse_args().file
    with replacing(target) as temporary:
        temporary.write_text(api_markdown(), encoding="utf-8")


if __name__ == "__main__":
    main()
