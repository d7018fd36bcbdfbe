"""Writes the table of limits into a page: ``python -m tools.limits_docs docs/faults.md``."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

from megatron_llama.config import limits

BEGIN = "<!-- limits: written by python -m tools.limits_docs docs/faults.md -->"
END = "<!-- end of limits -->"


def table() -> str:
    """Return the table: what is limited, how much is allowed, and why."""
    rows = [f"| `{names}` | {values} | {reason} |" for names, values, reason in _limits()]
    return "\n".join(["| limit | allowed | reason |", "|---|---|---|", *rows])


def _limits() -> Iterator[tuple[str, str, str]]:
    """Yield names, values and reason. Names without a reason of their own share the next one's."""
    names: list[str] = []
    for node in ast.parse(Path(limits.__file__).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names.append(node.targets[0].id)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and names:
            values = " and ".join(_shown(getattr(limits, name)) for name in names)
            yield "`, `".join(names), values, " ".join(str(node.value.value).split())
            names = []


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value}"


def with_table(page: str) -> str:
    """Return a page with the table between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, "the page has no marks"
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.limits_docs",
        description="Write the table of config/limits.py between the two marks of a page.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="docs/faults.md")
    path = parser.parse_args().file
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
