"""``--data-path``: one dataset, or several with weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_llama.config.limits import LONGEST_WEIGHT, WEIGHT_EXPONENT_DIGITS
from megatron_llama.errors import ConfigError, describe

_FORMS = "PREFIX, PREFIX PREFIX ..., or WEIGHT PREFIX WEIGHT PREFIX ..."


@dataclass(frozen=True)
class Blend:
    """The datasets of a run."""

    prefixes: tuple[str, ...]
    weights: tuple[int, ...] | None
    """Whole numbers in the ratio of the given weights. None: each dataset contributes all its
    samples."""
    shares: tuple[float, ...] | None = None
    """The weights as given."""


def read_blend(words: Sequence[str]) -> Blend:
    """Read the words of ``--data-path``. Raises ConfigError where they mix datasets with and
    without weights, or stand in one word."""
    parts = re.split(r"[,\s]+", " ".join(words).strip())
    # A prefix may have a comma or a space in it, but not weights too.
    if parts != list(words) and len(parts) % 2 == 0 and all(map(is_number, parts[0::2])):
        do = f"separate them by spaces, outside of quotes: --data-path {' '.join(parts)}"
        raise ConfigError(describe("--data-path", got=" ".join(words), expected=_FORMS, do=do))
    if len(words) == 1:
        return Blend(tuple(words), None)
    weights = words[0::2]
    prefixes = words[1::2]
    if not any(map(is_number, words)):
        return Blend(tuple(words), None)
    if len(weights) != len(prefixes) or not all(map(is_number, weights)):
        do = "give every dataset a weight, or none; a folder whose name is a number is ./NUMBER"
        raise ConfigError(describe("--data-path", got=" ".join(words), expected=_FORMS, do=do))
    # Exact values: 0.1 is a tenth, not the float next to it.
    shares = [Fraction(word) for word in weights]
    if min(shares) <= 0:
        raise ConfigError(
            describe(
                "--data-path",
                got=" ".join(words),
                expected="weights above 0",
                do="leave out what is not to be read",
            )
        )
    scale = math.lcm(*(share.denominator for share in shares))
    whole = tuple(int(share * scale) for share in shares)
    return Blend(tuple(prefixes), whole, tuple(float(share) for share in shares))


def is_number(word: str) -> bool:
    """Whether a word is a weight. A number with an exponent beyond any weight counts as a name: as
    a whole number it would fill the memory."""
    _, _, exponent = word.lower().partition("e")
    if len(word) > LONGEST_WEIGHT or len(exponent.lstrip("+-0")) > WEIGHT_EXPONENT_DIGITS:
        return False
    try:
        Fraction(word)
    except (ValueError, ZeroDivisionError):
        return False
    return True


def blend_problems(words: Sequence[str]) -> Iterator[str]:
    """Yield problems of ``--data-path``."""
    try:
        read_blend(words)
    except ConfigError as error:
        yield str(error)
