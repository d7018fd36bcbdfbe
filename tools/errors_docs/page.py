"""The page of all sentences, and the keys that tests have not provoked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby

from tools.errors_docs.match import Made, site_that_made
from tools.errors_docs.sites import Site, all_sites

HEADER = """\
# Errors

All sentences of errors, by the place that makes them. Written by
`python -m tools.errors_docs docs/errors.md` from the code; a test holds it current.

A message has the form `WHERE: got WHAT WAS FOUND, expected WHAT FITS; WHAT TO DO`. To find one,
search for a few words of it that are not a name, a path or a number of yours. Here `{path}` stands
for what only a run knows, `[one | other]` for one of two readings, and `[ in a folder]` for words
that are said at times. A line that ends in a colon is the title of a list of such messages.

Behind a sentence stands its key: the function that makes it, without `megatron_llama.`, and `:2`
for the second sentence of a function. Tests name errors by their keys (`tests/refused.py`)."""


def errors_markdown() -> str:
    """Return the document."""
    lines = [HEADER]
    for room, sites in groupby(all_sites(), lambda site: site.key.partition(".")[0]):
        lines += ["", f"## {room}", ""]
        lines += [f"- {_code(site.text)}<br>`{site.key}`" for site in sites]
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    """Return a sentence as code in Markdown. It may have backticks."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def unprovoked(lines: Iterable[str]) -> Iterator[Site]:
    """Yield the sites that no test has provoked. ``lines`` are those of ``--error-keys``."""
    tests = tests_by_site(lines)
    yield from (site for site in all_sites() if site not in tests)


def tests_by_site(lines: Iterable[str]) -> dict[Site, set[str]]:
    """Return the tests that have provoked each site. ``lines`` each have the JSON of a ``Made``."""
    tests: dict[Site, set[str]] = {}
    for kind, text, calls, test in map(json.loads, set(lines)):
        made = Made(kind, text, tuple((file, line) for file, line in calls))
        if (site := site_that_made(made)) is not None:
            tests.setdefault(site, set()).add(test)
    return tests
