"""Real English text that every Python installation has: its own documentation. Examples and tests
use it instead of a download."""

from __future__ import annotations

import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from megatron_llama.tokenizer.files import replace_file

_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
_SHORTEST = 40


def python_documentation() -> Iterator[str]:
    """Yield the language reference of ``pydoc``, then the standard library's docstrings of more
    than 40 characters, in a fixed order: about 2.2 MB. The same Python installation gives the same
    text.
    """
    for name in sorted(topics):
        yield topics[name]
    library = Path(sysconfig.get_path("stdlib"))
    for source in sorted(library.rglob("*.py")):
        if not _SKIPPED.intersection(source.relative_to(library).parts):
            yield from _docstrings(source)


def write_corpus(path: str | Path) -> int:
    """Write ``python_documentation`` as JSON lines with the field ``text``, and return the number
    of documents."""
    lines = [
        json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in python_documentation()
    ]
    replace_file(Path(path), "".join(lines).encode())
    return len(lines)


def docstring_pairs() -> Iterator[tuple[str, str]]:
    """Yield pairs for instruction tuning: the signature of a function of the standard library
    (``def join(*paths)`` and the module), and the first paragraph of its documentation. The order
    is fixed, and each signature comes once."""
    library = Path(sysconfig.get_path("stdlib"))
    seen = set()
    for source in sorted(library.rglob("*.py")):
        relative = source.relative_to(library)
        if _SKIPPED.intersection(relative.parts):
            continue
        for node in ast.walk(ast.parse(source.read_bytes())):
            if (
                not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                or len(text := ast.get_docstring(node) or "") <= _SHORTEST
            ):
                continue
            signature = f"def {node.name}({ast.unparse(node.args)})"
            if signature not in seen:
                seen.add(signature)
                yield (
                    f"{signature}  # {'.'.join(relative.with_suffix('').parts)}",
                    " ".join(text.split("\n\n")[0].split()),
                )


def write_pairs(path: str | Path) -> int:
    """Write ``docstring_pairs`` as JSON lines of ``messages``, in an order that mixes modules, and
    return the number of pairs."""
    pairs = list(docstring_pairs())
    random.Random(0).shuffle(pairs)
    roles = ("user", "assistant")
    lines = [
        json.dumps(
            {"messages": [{"role": r, "content": t} for r, t in zip(roles, pair, strict=True)]}
        )
        + "\n"
        for pair in pairs
    ]
    replace_file(Path(path), "".join(lines).encode())
    return len(lines)


def _docstrings(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_bytes())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None and len(text) > _SHORTEST:
                yield text
