"""Reads typed fields of a HuggingFace ``config.json`` and collects their problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_llama.config.fields import REQUIRED, Fields, finite_number, shown
from megatron_llama.config.limits import LARGEST_REAL, SMALLEST_REAL

COPY = "copy the model's own config.json"
LARGEST = 2**31 - 1
"""No published model has a size near this; larger ones cannot be computed."""


class ConfigReader(Fields):
    """The fields of one ``config.json``, of which absent ones have the defaults of their family."""

    def __init__(
        self, config_json: Mapping[str, Any], where: str, defaults: Mapping[str, Any]
    ) -> None:
        """``where`` is the path of the file, for messages; ``defaults`` has the values of absent
        fields."""
        super().__init__(config_json, where, do=COPY)
        self._defaults = defaults

    def value(self, name: str, default: Any = REQUIRED) -> Any:
        """Return the field as it is; ``default`` where it is absent and the family has no
        default."""
        return super().value(name, self.default(name, default))

    def default(self, name: str, default: Any) -> Any:
        """Return the family's default of a field, or ``default``."""
        return self._defaults.get(name, default)

    def size(self, name: str, *, default: int | None = None, high: int = LARGEST) -> int:
        """Return a positive integer of at most ``high``, by default the largest size of a tensor;
        absent and null mean ``default``. 0 stands for a size that was refused."""
        value = self.value(name, None)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 < value <= high:
            got = "nothing" if value is None else shown(value)
            expected = "a positive integer"
            if type(value) is int and value > high:
                expected = f"at most {high:,}"
            self.problem(name, got, expected)
            return 0
        return value

    def positive(self, name: str, value: Any, *, zero: bool = False) -> float:
        """Return a value, that of the field ``name``, if it is a positive number that a model can
        be computed with; 1 stands for one that was refused. ``zero``: it may be 0, too."""
        number = finite_number(value)
        if zero and number == 0:
            return 0.0
        if number is None or not SMALLEST_REAL <= number <= LARGEST_REAL:
            expected = "a positive number"
            if number is not None and number > 0:
                expected = f"a number from {SMALLEST_REAL:g} to {LARGEST_REAL:g}"
            self.problem(name, shown(value), expected)
            return 1.0
        return number

    def switch(self, name: str, *, default: bool = False) -> bool:
        """Return true or false; absent and null mean ``default``."""
        if self.value(name, default) is None:
            return default
        return super().switch(name, default=default)

    def token(self, name: str) -> int | None:
        """Return a token id, the first of a list. The id of padding may count from the end, like
        rows of torch's embedding; files of 2023 have -1."""
        value = self.value(name, None)
        several = isinstance(value, list) and name == "eos_token_id"
        ids = value if several else [] if value is None else [value]
        least = -LARGEST if name == "pad_token_id" else 0
        if not all(type(id) is int and least <= id <= LARGEST for id in ids):
            self.problem(name, shown(value), "a token id or a list of them")
            return None
        return ids[0] if ids else None
