"""Real English text that every Python installation has: its own documentation. Examples and tests
use it instead of a download."""

from __future__ import annotations

import ast
import json
import random
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

from megatron_llama.files import replace_file

_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
_SHORTEST = 40
_COMMON = 200
"""Number of frequent words that replace others in corrupted documentation."""


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
    """Yield pairs for instruction tuning in a fixed order: the signature of a function of the
    standard library (``def join(*paths)`` and the module), and the first paragraph of its
    documentation. Each signature comes once."""
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
    pairs = _mixed_pairs()
    _write_lines(
        Path(path),
        [{"messages": [_message("user", q), _message("assistant", a)]} for q, a in pairs],
    )
    return len(pairs)


def write_preferences(path: str | Path, held_out: str | Path) -> tuple[int, int]:
    """Write ``docstring_pairs`` as preferences, JSON lines of ``prompt``, ``chosen`` and
    ``rejected``: the documentation of a signature, and the same with other words in it
    (``with_common_words``). The second file gets the last 5 % of the pairs, in the order of
    ``write_pairs``, which ``sft`` holds out with ``--split 95,5,0``. Return the number in each."""
    pairs = _mixed_pairs()
    counts = Counter(word for _, answer in pairs for word in answer.split())
    common = [word for word, _ in counts.most_common(_COMMON)]
    draw = random.Random(1)
    records = [
        {
            "prompt": [_message("user", question)],
            "chosen": [_message("assistant", answer)],
            "rejected": [_message("assistant", with_common_words(answer, common, draw))],
        }
        for question, answer in pairs
    ]
    first = round(0.95 * len(records))
    _write_lines(Path(path), records[:first])
    _write_lines(Path(held_out), records[first:])
    return first, len(records) - first


def with_common_words(text: str, common: Sequence[str], draw: random.Random) -> str:
    """Return the text with every third word, rounded up, replaced by one of the ``common`` words
    that differs from it. Places and words are drawn. To a language model the result is about as
    likely as the text: the new words are less expected where they stand, but easier to spell."""
    words = text.split()
    for place in draw.sample(range(len(words)), -(-len(words) // 3)):
        words[place] = draw.choice([word for word in common if word != words[place]])
    return " ".join(words)


def _mixed_pairs() -> list[tuple[str, str]]:
    pairs = list(docstring_pairs())
    random.Random(0).shuffle(pairs)
    return pairs


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _write_lines(path: Path, records: Sequence[object]) -> None:
    replace_file(path, "".join(json.dumps(record) + "\n" for record in records).encode())


def _docstrings(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_bytes())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None and len(text) > _SHORTEST:
                yield text
