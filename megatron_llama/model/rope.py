"""Rotary scalings: ``rope_scaling`` of a ``ModelConfig``, which is that of HuggingFace's
``config.json`` in one form.

To add a scaling, enter its name and its numbers in ``ROPE_FIELDS``, and compute its frequencies in
``model/nn/rotary.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron_llama.config.fields import finite_number, shown
from megatron_llama.config.limits import LARGEST_REAL, LARGEST_SIZE, SMALLEST_ROPE
from megatron_llama.errors import describe


@dataclass(frozen=True)
class RopeFields:
    """The fields of one rotary scaling beside ``rope_type``."""

    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    """Fields with a default in transformers; absent and null are the same, but for ``truncate``."""

    @property
    def names(self) -> tuple[str, ...]:
        """All fields, in the order in which they are kept."""
        return (*self.needed, *self.optional)


ORIGINAL = "original_max_position_embeddings"
ROPE_FIELDS: Mapping[str, RopeFields] = MappingProxyType(
    {
        "default": RopeFields(),
        "linear": RopeFields(("factor",)),
        "dynamic": RopeFields(("factor",)),
        "llama3": RopeFields(("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)),
        "yarn": RopeFields(
            ("factor", ORIGINAL),
            (
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "truncate",
                "finetuned",
            ),
        ),
        "longrope": RopeFields(
            ("short_factor", "long_factor", ORIGINAL), ("factor", "attention_factor")
        ),
    }
)
"""The rotary scalings that the model implements. ``dynamic``, and ``longrope`` without ``factor``,
also read the model's max_position_embeddings, as in transformers."""
LISTS = ("short_factor", "long_factor")
"""Fields with a number for each frequency."""
SWITCHES = ("truncate", "finetuned")
"""Fields that are true or false. ``finetuned`` says that a model was trained with its scaling, and
changes nothing."""
DEFAULTED_BY_ZERO = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Numbers for which 0 means "not given", as in transformers."""
ORDERED = (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast"))
"""Pairs of fields of which the first has to be the lower one; those of ``llama3`` may be equal, as
in LLaMA 4's long contexts: then no wave is between them."""


def reads_max_positions(scaling: Mapping[str, Any] | None) -> bool:
    """Whether the frequencies depend on the model's max_position_embeddings."""
    kind = None if scaling is None else scaling["rope_type"]
    return kind == "dynamic" or (kind == "longrope" and "factor" not in (scaling or {}))


def longest_sequence(scaling: Mapping[str, Any] | None, max_position_embeddings: int) -> int:
    """Return how many positions a model with a rotary scaling is good for. max_position_embeddings
    has no room for the length of ``dynamic``, and often lacks that of ``yarn`` (Qwen)."""
    kind = "default" if scaling is None else scaling["rope_type"]
    if scaling is not None and kind == "dynamic":
        return int(max_position_embeddings * scaling["factor"])
    if scaling is not None and kind == "yarn":
        return max(max_position_embeddings, int(scaling["factor"] * scaling[ORIGINAL]))
    return max_position_embeddings


def longest_sequence_name(scaling: Mapping[str, Any] | None, max_position_embeddings: int) -> str:
    """Return the fields that ``longest_sequence`` follows from, with their values, for messages."""
    claimed = f"max_position_embeddings {max_position_embeddings}"
    longest = longest_sequence(scaling, max_position_embeddings)
    if scaling is None or longest == max_position_embeddings:
        return claimed
    factor = f"rope_scaling.factor {scaling['factor']:g}"
    if scaling["rope_type"] == "dynamic":
        return f"{claimed} times {factor}"
    return f"{ORIGINAL} {scaling[ORIGINAL]} times {factor}"


def rope_problems(where: str, scaling: Any, *, frequencies: int = 0) -> list[str]:
    """Return the problems of a ``rope_scaling`` mapping: rope_type and its numbers, without
    rope_theta. ``where`` names it in the messages. ``frequencies``: how many pairs of dims are
    rotated; 0 if that is not known."""
    if not isinstance(scaling, Mapping):
        return [
            describe(
                where,
                got=repr(scaling),
                expected="a mapping with rope_type",
                do="write it as in config.json",
            )
        ]
    kind = scaling.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in ROPE_FIELDS:
        wanted = f"one of {', '.join(ROPE_FIELDS)}"
        return [
            describe(
                f"{where}.rope_type",
                got=repr(kind),
                expected=wanted,
                do="this scaling is not supported",
            )
        ]
    fields = ROPE_FIELDS[kind]
    problems = []
    for name in fields.names:
        value = scaling.get(name)
        # transformers reads null as false, although absent means true.
        is_given = name in scaling if name == "truncate" else value is not None
        if not is_given and name in fields.optional:
            continue
        expected = _expected(name, value, frequencies)
        if expected is not None:
            do = f"rope_type {kind} needs {', '.join(fields.needed)}"
            got = "nothing" if value is None else shown(value)
            problems.append(describe(f"{where}.{name}", got=got, expected=expected, do=do))
    for name in sorted(scaling.keys() - {"rope_type", *fields.names}):
        problems.append(
            describe(
                f"{where}.{name}",
                got=scaling[name],
                expected=f"no such field with rope_type {kind}",
                do="remove it",
            )
        )
    for low, high in ORDERED:
        least = scaling.get(low)
        most = scaling.get(high)
        is_equal = kind == "llama3" and least == most
        if not problems and least and most and not (least < most or is_equal):
            problems.append(
                describe(
                    f"{where}.{low}, {high}",
                    got=f"{least} and {most}",
                    expected=f"{low} < {high}",
                    do="swap them",
                )
            )
    return problems


def _expected(name: str, value: Any, frequencies: int) -> str | None:
    """Return the expectation that a field does not meet; None if it meets it."""
    if name in SWITCHES:
        return None if isinstance(value, bool) else "true or false"
    if name in DEFAULTED_BY_ZERO and value == 0 and not isinstance(value, bool):
        return None
    if name == ORIGINAL:
        length = finite_number(value)
        right = length is not None and 0 < length <= LARGEST_SIZE and length.is_integer()
        return None if right else f"a whole number from 1 to {LARGEST_SIZE}"
    if name not in LISTS:
        if _is_positive(value):
            return None
        number = finite_number(value)
        if number is None or number <= 0:
            return "a positive number"
        return f"a number from {SMALLEST_ROPE:g} to {LARGEST_REAL:g}"
    count = str(frequencies) if frequencies else "as many"
    fits = (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(map(_is_positive, value))
        and len(value) == (frequencies or len(value))
    )
    return None if fits else f"{count} positive numbers, one for each frequency"


def _is_positive(value: Any) -> bool:
    """Whether a value is a number that positions can be multiplied with and divided by."""
    number = finite_number(value)
    return number is not None and SMALLEST_ROPE <= number <= LARGEST_REAL


def normal_rope(scaling: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a valid ``rope_scaling`` in its normal form: one order, one type, and no optional
    fields that are null. None: no scaling."""
    if scaling is None or scaling.get("rope_type", "default") == "default":
        return None
    kind = scaling["rope_type"]
    given = {name: scaling.get(name) for name in ROPE_FIELDS[kind].names}
    numbers = {name: _normal(name, value) for name, value in given.items() if value is not None}
    return {"rope_type": kind, **numbers}


def _normal(name: str, value: Any) -> Any:
    if name in SWITCHES:
        return value
    if name in LISTS:
        return [float(number) for number in value]
    return int(value) if name.startswith("original") else float(value)
