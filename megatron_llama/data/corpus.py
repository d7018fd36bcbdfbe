"""Real English text that every Python installation carries: its own documentation. For examples and tests without a download."""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from megatron_llama.tokenizer.files import replace_file

_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
_SHORTEST = 40


def python_documentation() -> Iterator[str]:
    """The language reference of ``pydoc``, then the standard library's docstrings of more than 40 characters, in a fixed order.

    About 2.2 MB; the same Python installation gives the same text.
    """
    for name in sorted(topics):
        yield topics[name]
    library = Path(sysconfig.get_path("stdlib"))
    for source in sorted(library.rglob("*.py")):
        if not _SKIPPED.intersection(source.relative_to(library).parts):
            yield from _docstrings(source)


def write_corpus(path: str | Path) -> int:
    """Write ``python_documentation`` as JSON lines with the field ``text``. Returns the number of documents."""
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in python_documentation()]
    replace_file(Path(path), "".join(lines).encode())
    return len(lines)


def _docstrings(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_bytes())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None and len(text) > _SHORTEST:
                yield text
