"""The rules of an option, beside the type, default and help of its field.

A section is a frozen dataclass, and each of its fields is an option. ``option`` gives a field its
own rules: its valid values, what in a run depends on it, and how ``prove`` treats it. ``section``
gives rules to all fields of a class that have none of their own, and refuses a class in which a
field has none. Rules are read from the field (``Option`` of ``parse.py``): there is no other list
of options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, TypeVar

T = TypeVar("T")
_METADATA = "option"
_RULES = "OPTION_RULES"

Changes = Literal["weights", "messages", "nothing"]
"""The effects of an option. ``weights``: it changes the trained weights. ``messages``: it changes
which process holds, sends and computes what and when; one process trains the same but for rounding.
``nothing``: it changes no training step, but files, output, the watch, or the end of a run."""


@dataclass(frozen=True)
class Check:
    """A condition on a value, whatever the other options are."""

    holds: Callable[[Any], bool]
    expected: str
    do: str = ""
    """The remedy. Empty: give the option such a value."""


NOT_NEGATIVE = Check(lambda value: value >= 0, "0 or more")
"""The default check of numbers."""
POSITIVE = Check(lambda value: value > 0, "a positive number")
ANY_NUMBER = Check(lambda value: True, "a number")
"""For a number whose range depends on other options: ``train/setup/checks`` has it."""


def is_count(text: str) -> bool:
    """Whether a text is a whole number above 0."""
    return text.isascii() and text.isdecimal() and int(text) > 0


@dataclass(frozen=True)
class Small:
    """The treatment of an option by ``prove``, where a small run stands for the user's."""

    fate: Literal["kept", "scaled", "left out"]
    why: str
    """Why the small run shows the same as the user's, or what it does not show. Empty where a value
    that is kept takes effect."""
    most: int | None = None
    """The largest value of an interval that is kept. None: ``prove/small_model.py`` or
    ``prove/small_run.py`` has a rule for the scaled value, since it depends on other options."""


def kept(without_effect: str = "") -> Small:
    """Keep the value, which may have no effect in a small run for the reason ``without_effect``."""
    return Small("kept", without_effect)


KEPT = kept()


def scaled(why: str) -> Small:
    """Scale the value in relation to others, by a rule of ``prove/small_model.py`` or
    ``prove/small_run.py``."""
    return Small("scaled", why)


def lowered(most: int, why: str) -> Small:
    """Take ``most`` for a larger value, where the user's run has more steps than the small one."""
    return Small("scaled", why, most)


def left_out(why: str) -> Small:
    """Run without the option."""
    return Small("left out", why)


@dataclass(frozen=True)
class Rules:
    """The rules of an option, as its field has them."""

    check: Check | None = None
    """None: the type's own check, for numbers NOT_NEGATIVE."""
    largest: int | None = None
    """The largest integer that plans accept. Beyond it tables would take minutes or the machine's
    memory. None: the largest of int64."""
    changes: Changes | None = None
    """None: what the section says."""
    small: Small | None = None
    """None: what the section says."""
    draws: tuple[object, ...] = ()
    """Values from which ``prove --fuzz`` draws. Empty: ``prove/draw.py`` draws the option together
    with others, or leaves it out."""
    repeats: bool = False
    """Whether a flag that is given again adds its values to the earlier ones."""
    bare: str | None = None
    """The word that the flag alone stands for. None: it needs one, unless it is a boolean."""
    words: tuple[tuple[str, str], ...] = ()
    """Other trainers' words for values: (theirs, ours)."""


PLAIN = Rules()
"""The rules of a field without ``option``, in a class that is no section of a run."""


def option(
    default: T,
    *,
    check: Check | None = None,
    largest: int | None = None,
    changes: Changes | None = None,
    small: Small | None = None,
    draws: tuple[object, ...] = (),
    repeats: bool = False,
    bare: str | None = None,
    words: tuple[tuple[str, str], ...] = (),
) -> T:
    """Return a field with a default and its ``Rules``, which explain the arguments."""
    rules = Rules(check, largest, changes, small, draws, repeats, bare, words)
    return field(default=default, metadata={_METADATA: rules})


def section(
    *, changes: Changes = "weights", small: Small | None = None
) -> Callable[[type[T]], type[T]]:
    """Make a dataclass a section of a run, with rules for fields that have none of their own.
    Raises TypeError for a field without a rule of how ``prove`` treats it."""

    def with_rules(owner: type[T]) -> type[T]:
        rules = {}
        for item in fields(owner):  # type: ignore[arg-type]
            own: Rules = item.metadata.get(_METADATA, PLAIN)
            if own.small is None and small is None:
                raise TypeError(
                    f"{owner.__name__}.{item.name} does not say what prove does with it: give it "
                    "option(default, small=kept()), or lowered, scaled, left_out "
                    "(megatron_llama/option.py)"
                )
            rules[item.name] = replace(
                own, changes=own.changes or changes, small=own.small or small
            )
        setattr(owner, _RULES, MappingProxyType(rules))
        return owner

    return with_rules


def rules_of(owner: type[Any]) -> Mapping[str, Rules]:
    """Return the rules of each field of a section, or of a part of a section; for another class,
    the rules of those fields that have some."""
    whole = getattr(owner, "WHOLE", owner)
    named = {
        item.name: item.metadata[_METADATA] for item in fields(whole) if _METADATA in item.metadata
    }
    rules: Mapping[str, Rules] = getattr(whole, _RULES, named)
    return rules
