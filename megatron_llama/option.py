"""What a field says of its option, beside its type, its default and its help.

A section is a frozen dataclass, and each of its fields is an option. ``option`` gives a field what
is true of it alone: which values can be meant, what in a run depends on it, and what ``prove`` does
with it. ``section`` gives the same to all fields of a class that do not say it themselves, and
refuses a class in which a field says nothing. Whoever needs to know asks the field (``Option`` of
``parse.py``): nobody else has a list of options.
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
"""What depends on an option. ``weights``: what is trained. ``messages``: who holds, sends and
computes what and when; one process trains the same but for rounding. ``nothing``: no training
step, but what is saved, printed or watched, or when a run ends."""


@dataclass(frozen=True)
class Check:
    """What a value has to be, whatever the other options are."""

    holds: Callable[[Any], bool]
    expected: str
    do: str = ""
    """Empty: give the option such a value."""


NOT_NEGATIVE = Check(lambda value: value >= 0, "0 or more")
"""The check of every number that has no other."""
POSITIVE = Check(lambda value: value > 0, "a positive number")
ANY_NUMBER = Check(lambda value: True, "a number")
"""For a number whose range depends on other options: ``train/setup/checks`` has it."""


def is_count(text: str) -> bool:
    """Whether a text is a whole number above 0."""
    return text.isascii() and text.isdecimal() and int(text) > 0


@dataclass(frozen=True)
class Small:
    """What ``prove`` does with an option where a small run stands for the user's."""

    fate: Literal["kept", "scaled", "left out"]
    why: str
    """Why the small run shows what the user's would show, or what it does not show. Empty where a
    value that is kept takes effect."""
    most: int | None = None
    """The largest value that is kept of an interval. None: what is scaled has a rule in
    ``prove/small_model.py`` or ``prove/small_run.py``, since it depends on other options."""


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
    """What a field says of its option."""

    check: Check | None = None
    """None: what the type says, of numbers NOT_NEGATIVE."""
    largest: int | None = None
    """The largest integer that is planned with: beyond it tables would take minutes or the
    machine's memory. None: that of int64."""
    changes: Changes | None = None
    """None: what the section says."""
    small: Small | None = None
    """None: what the section says."""
    draws: tuple[object, ...] = ()
    """Values of which ``prove --fuzz`` draws one. Empty: ``prove/draw.py`` draws the option
    together with others, or it is left out."""
    repeats: bool = False
    """Whether a flag that is given again adds its values to the earlier ones."""


PLAIN = Rules()
"""What the fields of a class say that is no section of a run."""


def option(
    default: T,
    *,
    check: Check | None = None,
    largest: int | None = None,
    changes: Changes | None = None,
    small: Small | None = None,
    draws: tuple[object, ...] = (),
    repeats: bool = False,
) -> T:
    """Return a field with a default and its ``Rules``, which explain the arguments."""
    rules = Rules(check, largest, changes, small, draws, repeats)
    return field(default=default, metadata={_METADATA: rules})


def section(
    *, changes: Changes = "weights", small: Small | None = None
) -> Callable[[type[T]], type[T]]:
    """Make a dataclass a section of a run, with what its fields say if they do not say it
    themselves. Raises TypeError for a field of which neither says what ``prove`` does with it."""

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
    """Return what each field of a section says of its option, for a part of a section too. The
    fields of other classes say nothing."""
    whole = getattr(owner, "WHOLE", owner)
    rules: Mapping[str, Rules] = getattr(whole, _RULES, MappingProxyType({}))
    return rules
