"""``python -m tools.errors_docs docs/errors.md`` writes the page of all sentences of errors.

Of the tests that ran with ``pytest --error-keys KEYS``, ``--unprovoked KEYS`` lists the keys that
none has provoked, and ``--provoked KEYS`` the others with their tests, those of most tests first.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, and no other

from megatron_llama.files import replacing
from tools.errors_docs.page import errors_markdown, tests_by_site, unprovoked


def main() -> None:
    """Write the page, or list keys."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.errors_docs",
        description="Write all sentences of errors with their keys, from the code.",
    )
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help="docs/errors.md")
    parser.add_argument(
        "--unprovoked",
        type=Path,
        metavar="KEYS",
        help="list the keys that are not in what pytest --error-keys KEYS wrote",
    )
    parser.add_argument(
        "--provoked", type=Path, metavar="KEYS", help="list the keys that are there, with tests"
    )
    given = parser.parse_args()
    if sum(name is not None for name in vars(given).values()) != 1:
        parser.error("give FILE, --unprovoked KEYS or --provoked KEYS")
    if given.unprovoked is not None:
        for site in unprovoked(given.unprovoked.read_text(encoding="utf-8").splitlines()):
            print(f"{site.key}  {site.text}")
        return
    if given.provoked is not None:
        tests = tests_by_site(given.provoked.read_text(encoding="utf-8").splitlines())
        for site in sorted(tests, key=lambda site: (-len(tests[site]), site.key)):
            print(f"{site.key}  {len(tests[site])} tests", *sorted(tests[site]), sep="\n    ")
        return
    with replacing(given.file) as temporary:
        temporary.write_text(errors_markdown(), encoding="utf-8")


if __name__ == "__main__":
    main()
