"""Reads typed fields of a HuggingFace ``config.json`` and collects what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_llama.errors import describe

COPY = "copy the model's own config.json"
LARGEST = 2**31 - 1
"""No published model has a size near this; with a larger one nothing can be computed."""


class ConfigReader:
    """Typed fields of one ``config.json``. What is wrong is collected, so that all of it can be
    said at once."""

    def __init__(
        self, config_json: Mapping[str, Any], where: str, defaults: Mapping[str, Any]
    ) -> None:
        """``where`` is the path of the file, for messages; ``defaults`` has the values of absent
        fields."""
        self.json = config_json
        self.where = where
        self.problems: list[str] = []
        self.seen: set[str] = set()
        """Names that were asked for: fields that count, whether the file has them or not."""
        self._defaults = defaults
        self._refused: set[str] = set()

    def problem(self, name: str, got: object, expected: str, do: str) -> None:
        """Add one, unless there is one of this field already."""
        if name not in self._refused:
            text = describe(f"{self.where} {name}", got=got, expected=expected, do=do)
            self.problems.append(text)
        self._refused.add(name)

    def value(self, name: str, default: Any) -> Any:
        """Return the field as it is; ``default`` where it is absent and the family has no
        default."""
        self.seen.add(name)
        return self.json.get(name, self.default(name, default))

    def default(self, name: str, default: Any) -> Any:
        """Return the family's default of a field, or ``default``."""
        return self._defaults.get(name, default)

    def size(self, name: str, *, default: int | None = None) -> int:
        """Return a positive integer that a tensor can have as its size; absent and null mean
        ``default``. 0 stands for a size that was refused."""
        value = self.value(name, None)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= LARGEST:
            got = "nothing" if value is None else repr(value)
            expected = "a positive integer"
            if isinstance(value, int) and value > LARGEST:
                expected = f"at most {LARGEST:,}"
            self.problem(name, got, expected, COPY)
            return 0
        return value

    def count(self, name: str, *, default: int = 0) -> int:
        """Return an integer that may be 0."""
        value = self.value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.problem(name, repr(value), "an integer, 0 or more", COPY)
            return 0
        return value

    def number(self, name: str, *, default: float, zero: bool = False) -> float:
        """Return a positive number; ``zero``: it may be 0, too."""
        value = self.value(name, default)
        return 0.0 if zero and value in (0, 0.0) else self.positive(name, value)

    def positive(self, name: str, value: Any) -> float:
        """Return a value if it is a positive number; 1 stands for one that was refused."""
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < float("inf")
        ):
            self.problem(name, repr(value), "a positive number", COPY)
            return 1.0
        return float(value)

    def switch(self, name: str, *, default: bool = False) -> bool:
        """Return true or false; absent and null mean ``default``."""
        value = self.value(name, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problem(name, repr(value), "true or false", COPY)
            return default
        return value

    def token(self, name: str) -> int | None:
        """Return a token id, the first of a list."""
        value = self.value(name, None)
        first = value[0] if isinstance(value, list) and value else value
        if first is not None and (isinstance(first, bool) or not isinstance(first, int)):
            self.problem(name, repr(value), "a token id or a list of them", COPY)
            return None
        return first
