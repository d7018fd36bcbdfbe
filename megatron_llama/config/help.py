"""``--help`` and ``docs/options.md``, from the strings under the fields.

``python -m megatron_llama.config.help docs/options.md`` rewrites the document.
"""

from __future__ import annotations

import ast
import inspect
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from megatron_llama.config.megatron_names import MEGATRON, Alias
from megatron_llama.config.parse import Option, flag, options_of, section_name
from megatron_llama.config.sections import config_sections
from megatron_llama.files import replacing

_WIDTH = 100
_HEADER = """\
# Options

Written by `python -m megatron_llama.config.help docs/options.md` from
`megatron_llama/config/schema.py`; a test holds it current.

Every option is a flag (`--micro-batch-size 4`, `--micro_batch_size=4`) and a YAML key
(`micro_batch_size: 4`, flat or under the name of its section). The file of `--config FILE` wins
over the fields that `--model` or `--init-from-hf` give, flags win over both. Integers may be
written `2e8` or `1_000`; booleans `--bf16`, `--no-bf16` or `--bf16 false`. Several values (`INT
...`) are separated by spaces: `--pipeline-layer-split 7 9`, in YAML `pipeline_layer_split: [7, 9]`.
Of a flag that is repeated the last one counts, and a note says so."""


_INTRODUCTION = (
    "Every option is a flag (--seed 1) and a key of the YAML file that --config names (seed: 1, "
    "also under the name of its section); the flag wins. INT ... stands for several values, "
    "separated by spaces (in YAML [1, 2]). A boolean is --flag, --no-flag or --flag false."
)


def field_docs(section: type[Any]) -> dict[str, str]:
    """Return the string literal under every field, read from the class's source, on one line. A
    field without one is left out. A part of a section has those of the whole."""
    body = _class_body(getattr(section, "WHOLE", section))
    docs: dict[str, str] = {}
    for field, after in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            docs[field.target.id] = " ".join(after.value.value.split())
    return docs


def _class_body(owner: type[Any]) -> list[ast.stmt]:
    """Return the statements of a class. ``inspect.getsource`` would parse the whole file for
    each."""
    node: ast.AST = _module_tree(owner.__module__)
    for name in owner.__qualname__.replace(".<locals>", "").split("."):
        definitions = (ast.ClassDef, ast.FunctionDef)
        node = next(n for n in ast.walk(node) if isinstance(n, definitions) and n.name == name)
    assert isinstance(node, ast.ClassDef)
    return node.body


@cache
def _module_tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


def help_text(usage: str, summary: str, sections: Sequence[type[Any]]) -> str:
    """Return the text of ``--help``: the usage line, and every option with its type, default and
    meaning, by section."""
    lines = [f"usage: {usage}", "", summary.strip()]
    sections = [section for section in sections if fields(section)]
    if sections:
        lines += ["", *_wrapped(_INTRODUCTION)]
    for section in sections:
        lines += ["", *_wrapped(f"{section_name(section)}: {_summary(section)}", "  ")]
        docs = field_docs(section)
        for option in options_of([section]).values():
            lines.append(
                f"  {option.flag} {metavar(option.kind)}".rstrip() + f"  ({_default(option)})"
            )
            lines += [f"      {line}" for line in _wrapped(docs.get(option.name, ""))]
    return "\n".join(lines) + "\n"


def _wrapped(text: str, hanging: str = "") -> list[str]:
    """Return wrapped lines that leave flags whole: ``--lr-warmup-iters`` is one word despite its
    hyphens."""
    width = _WIDTH - 6
    return textwrap.wrap(text, width, subsequent_indent=hanging, break_on_hyphens=False)


def options_markdown(sections: Sequence[type[Any]], aliases: Mapping[str, Alias]) -> str:
    """Return ``docs/options.md``: one table per section, then the aliases."""
    lines = [_HEADER]
    for section in sections:
        docs = field_docs(section)
        lines += [
            "",
            f"## {section_name(section)}",
            "",
            _summary(section),
            "",
            "| flag | default | meaning |",
            "|---|---|---|",
        ]
        for option in options_of([section]).values():
            usage = f"{option.flag} {metavar(option.kind)}".rstrip()
            lines.append(_row(f"`{usage}`", f"`{_show(option.default)}`", docs[option.name]))
    lines += [
        "",
        "## Megatron's names",
        "",
        "Megatron's flags are field names here, except for these.",
        "",
        "| flag | here |",
        "|---|---|",
    ]
    lines += [_row(f"`{flag(name)}`", _meaning(alias)) for name, alias in aliases.items()]
    return "\n".join(lines) + "\n"


def metavar(kind: Any) -> str:
    """Return the form of a value: ``INT``, ``a|b``; empty for a boolean, which needs none."""
    members = [member for member in get_args(kind) if member is not type(None)]
    if type(None) in get_args(kind):
        return metavar(members[0])
    if get_origin(kind) is Literal:
        return "|".join(members)
    if get_origin(kind) is tuple:
        return metavar(members[0]) + " ..."
    if get_origin(kind) is dict:
        return "JSON"
    names: dict[Any, str] = {int: "INT", float: "FLOAT", str: "TEXT", bool: ""}
    return names[kind]


def _summary(section: type[Any]) -> str:
    """Return the first paragraph of a section's docstring, on one line."""
    first = (section.__doc__ or "").strip().split("\n\n")[0]
    return " ".join(first.split()).replace("``", "`")


def _show(default: Any) -> str:
    if default is None or default in ((), ""):
        return "none"
    if isinstance(default, tuple):
        return " ".join(shlex.quote(str(item)) for item in default)
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:_}" if isinstance(default, int) and default >= 100_000 else str(default)


def _default(option: Option) -> str:
    return "required" if option.default is MISSING else f"default: {_show(option.default)}"


def _meaning(alias: Alias) -> str:
    if alias.field is None:
        return alias.help
    more = (
        f", and without that option `{flag(alias.implies[0])} {alias.implies[1]}`"
        if alias.implies
        else ""
    )
    more += f": {alias.help}" if alias.help else ""
    return (
        f"`{flag(alias.field)}`" if alias.value is None else f"`{flag(alias.field)} {alias.value}`"
    ) + more


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main(argv: Sequence[str]) -> None:
    """Write the options of a training run to the file named by the first argument."""
    target = Path(argv[0])
    with replacing(target) as temporary:
        temporary.write_text(options_markdown(config_sections(), MEGATRON), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
