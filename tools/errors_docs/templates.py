"""Sentences as templates: the words of the code, and placeholders for what only a run knows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MOST_CHOICES = 4
"""Most readings of one part that are shown. A part with more is a placeholder."""


@dataclass(frozen=True)
class Hole:
    """What only a run knows, by a name that a reader understands."""

    name: str


@dataclass(frozen=True)
class Either:
    """One of several readings."""

    choices: tuple[Template, ...]


Template = tuple[str | Hole | Either, ...]


def joined(*templates: Template) -> Template:
    """Return the templates one behind the other, with neighboring words in one piece."""
    pieces: list[str | Hole | Either] = []
    for piece in (piece for template in templates for piece in template):
        last = pieces[-1] if pieces else None
        if isinstance(piece, str) and isinstance(last, str):
            pieces[-1] = last + piece
        elif piece != "":
            pieces.append(piece)
    return tuple(pieces)


def either(name: str, templates: Sequence[Template]) -> Template:
    """Return a template with a choice between some. ``name``: of the placeholder for too many."""
    choices: list[Template] = []
    for template in templates:
        is_choice = len(template) == 1 and isinstance(template[0], Either)
        alternatives = template[0].choices if is_choice else (template,)  # type: ignore[union-attr]
        choices += [choice for choice in alternatives if choice not in choices]
    if len(choices) == 1:
        return choices[0]
    return (Either(tuple(choices)),) if len(choices) <= MOST_CHOICES else (Hole(name),)


def shown(template: Template) -> str:
    """Return a template as the page shows it: ``got {count}[ files], expected [one | none]``."""
    text = ""
    for piece in template:
        if isinstance(piece, str):
            text += piece
        elif isinstance(piece, Hole):
            text += f"{{{piece.name}}}"
        else:
            text += f"[{' | '.join(shown(choice) for choice in piece.choices if choice)}]"
    return text


def pattern(template: Template) -> str:
    """Return the regular expression of the texts that a template can become. Each placeholder is a
    group without a name."""
    text = ""
    for piece in template:
        if isinstance(piece, str):
            text += re.escape(piece)
        elif isinstance(piece, Hole):
            text += "((?s:.*?))"
        else:
            text += f"(?:{'|'.join(map(pattern, piece.choices))})"
    return text


def has_words(template: Template) -> bool:
    """Return whether a template says anything that is not a placeholder."""
    return any(re.search(r"[A-Za-z]", word) for word in literals(template))


def literals(template: Template) -> Iterator[str]:
    """Yield the words of a template, those of all choices too."""
    for piece in template:
        if isinstance(piece, str):
            yield piece
        elif isinstance(piece, Either):
            for choice in piece.choices:
                yield from literals(choice)
