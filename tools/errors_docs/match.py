"""Which site made a text: by the calls that led to it, or by its words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from tools.errors_docs.expressions import PACKAGE
from tools.errors_docs.sites import PARTS, Site, all_sites, sites_of

USUAL = re.compile(
    r"(?P<where>.*?): got (?P<got>.*), expected (?P<expected>.*?); (?P<do>.*)", re.DOTALL
)
"""A sentence, whoever makes it."""


class Made(NamedTuple):
    """A text that the package has made."""

    kind: str
    """``sentence``, or ``title`` for the title of a list and a message of another form."""
    text: str
    calls: tuple[tuple[str, int], ...]
    """File and line of the calls that led to it, the innermost first."""
    test: str = ""
    """The test in which it was made, where that is known."""


@dataclass(frozen=True)
class Sentence:
    """A text of an error, with what it is in the page of errors."""

    key: str
    text: str
    where: str = ""
    got: str = ""
    expected: str = ""
    do: str = ""


def site_that_made(made: Made) -> Site | None:
    """Return the site of a text whose calls are known."""
    called = [_site_at(made.kind, *call) for call in made.calls]
    if called and called[0] is not None:
        return called[0]
    # A function passed the words of its caller on.
    for site in called:
        if site is not None and _pattern(site).fullmatch(made.text):
            return site
    # The error was made elsewhere, and has said its words here.
    return site_of_text(made.text) if made.kind == "sentence" else None


def _site_at(kind: str, file: str, line: int) -> Site | None:
    is_title = kind == "title"
    sites = [
        site
        for site in sites_of(PACKAGE / file)
        if line in site.lines and ("title" in site.parts) == is_title
    ]
    return min(sites, key=lambda site: len(site.lines), default=None)


def site_of_text(text: str) -> Site | None:
    """Return the site whose template fits a text, the one that leaves the least to placeholders."""
    fitting = {
        site: _left_open(found)
        for site in all_sites()
        # Most are ruled out by their words: expressions take long where a text is.
        if all(words in text for words in site.sentence if isinstance(words, str))
        and (found := _pattern(site).fullmatch(text)) is not None
    }
    return min(fitting, key=lambda site: fitting[site], default=None)


def _left_open(found: re.Match[str]) -> int:
    """Return the number of characters in placeholders: the groups without names."""
    named = found.re.groupindex.values()
    return sum(len(text or "") for at, text in enumerate(found.groups(), 1) if at not in named)


@cache
def _pattern(site: Site) -> re.Pattern[str]:
    return re.compile(site.pattern)


def sentence_of(site: Site, text: str) -> Sentence:
    """Return a text of a site, in its parts."""
    found = _pattern(site).fullmatch(text) or USUAL.fullmatch(text)
    parts: Mapping[str, str] = found.groupdict() if found else {}
    return Sentence(site.key, text, **{name: parts[name] for name in PARTS if name in parts})
