"""Sections with some of the options of another, for commands that use only those."""

from __future__ import annotations

from dataclasses import field, fields, make_dataclass
from typing import Any, TypeVar

from megatron_llama.config.parse import Parsed, options_of

T = TypeVar("T")


def part_of(section: type[Any], doc: str, *names: str) -> type[Any]:
    """Return a section with the named options of ``section``, described by ``doc``. It has the name
    of the whole, from which ``help.py`` takes the help of the options."""
    options = options_of([section])
    return make_dataclass(
        section.__name__,
        [(name, options[name].kind, field(default=options[name].default)) for name in names],
        frozen=True,
        namespace={"__doc__": doc, "WHOLE": section},
    )


def completed(section: type[T], parsed: Parsed) -> T:
    """Return the ``section`` with the values of any section of the command line for its options,
    and otherwise with their defaults."""
    values = {
        name: value
        for instance in parsed.instances.values()
        for name, value in vars(instance).items()
    }
    own = [item.name for item in fields(section)]  # type: ignore[arg-type]
    return section(**{name: values[name] for name in own if name in values})
