"""Errors by their keys (docs/errors.md): what a test provokes is one place of the package, whose words it does not repeat.

``refused(error).key == "converter.api.convert.convert:2"``; ``.where``, ``.got``, ``.expected`` and ``.do`` are the parts of the sentence.
``error`` is what was raised, or what a process has printed.
"""

from __future__ import annotations

import gc
import re
from functools import cache

from tools.errors_docs.match import Sentence, sentence_of, site_of_text, site_that_made
from tools.errors_docs.sites import all_sites

from tests.recorded import recorder

PRINTED = re.compile(r"^(error( on rank \d+)?: )?(rank \d+: )?")
FAILED_RANKS = re.compile(r" \(\d+ of \d+ ranks failed\)$")


def refused(error: BaseException | str) -> Sentence:
    """The only sentence of an error, or the only one under its title."""
    sentences = all_refused(error)
    assert len(sentences) == 1, f"{len(sentences)} sentences of {error}: {[sentence.key for sentence in sentences]}"
    return sentences[0]


def all_refused(error: BaseException | str) -> list[Sentence]:
    """Every sentence of an error, without the title of a list; what no place of the package says is left out."""
    text = FAILED_RANKS.sub("", PRINTED.sub("", str(error).strip()))
    title, *problems = text.split("\n  - ")
    found = [sentence for part in problems or [title] if (sentence := _sentence(part)) is not None]
    assert found, f"docs/errors.md has no such sentence: {error}"
    return found


def keys(error: BaseException | str) -> list[str]:
    """The keys of every sentence of an error, in its order."""
    return [sentence.key for sentence in all_refused(error)]


def _sentence(text: str) -> Sentence | None:
    _read_sites()
    made = recorder().made.get(text)
    site = site_that_made(made) if made is not None else site_of_text(text)
    return sentence_of(site, text) if site is not None else None


@cache
def _read_sites() -> None:
    """Read the package, without looking for garbage meanwhile or at a million nodes of syntax trees in each collection after: a command
    collects garbage when it ends."""
    gc.disable()
    all_sites()
    gc.freeze()
    gc.enable()
