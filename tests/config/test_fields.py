"""Fields of files: kind, range and finiteness, and all problems at once."""

from __future__ import annotations

from typing import Any

import pytest
from megatron_llama.config.fields import Fields, read_fields
from megatron_llama.errors import CheckpointError, DataError

GOOD = {"r": 8, "alpha": 16, "scale": 0.5, "name": "LORA", "on": True, "sizes": [1, 2], "inner": {"depth": 3}, "nothing": None}


def read(content: dict[str, Any]) -> list[Any]:
    with read_fields(content, "adapter_config.json", error=DataError) as fields:
        return [
            fields.integer("r", low=1, high=64),
            fields.number("alpha", above=0),
            fields.number("scale", low=0, high=1),
            fields.text("name", choices=("LORA", "OTHER")),
            fields.switch("on"),
            fields.sequence("sizes", int, length=2),
            fields.inner("inner").integer("depth"),
            fields.integer("nothing", null=True),
            fields.integer("absent", default=None),
            fields.number("also_absent", default=2.0),
        ]


def test_good_fields() -> None:
    values = read(GOOD)
    assert values == [8, 16.0, 0.5, "LORA", True, [1, 2], 3, None, None, 2.0]
    assert isinstance(values[1], float)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("r", [2.5, 2.0, True, "2", None, 0, 65, -1, [], {}, 10**400]),
        ("alpha", [float("nan"), float("inf"), 0, -1, True, "16", None, 10**400]),
        ("scale", [1.5, -0.1, float("nan")]),
        ("name", ["lora", 1, None, []]),
        ("on", [1, 0, "true", None]),
        ("sizes", [[1], [1, 2.0], [1, True], "12", None, {}, [1, 10**400]]),
        ("inner", [[], None, 1, {"depth": -1}, {}, {1: 2}]),
        ("absent", [None, "3"]),
        ("also_absent", [None, "3"]),
    ],
)
def test_bad_fields_are_named(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(DataError, match=rf"adapter_config.json {name}") as problem:
            read({**GOOD, name: value})
        assert "cannot be used" not in str(problem.value), "other fields were blamed too"


def test_all_at_once() -> None:
    with pytest.raises(CheckpointError) as problem, read_fields({"r": 0}, "file") as fields:
        fields.integer("r", low=1)
        1 / fields.integer("missing")  # it stumbles over the stand-in, 0
    assert "file r: got 0, expected an integer of at least 1" in str(problem.value)
    assert "file missing: got no such field" in str(problem.value)


def test_errors_of_the_program_stay() -> None:
    with pytest.raises(ZeroDivisionError), read_fields({"r": 0}, "file") as fields:
        1 / fields.integer("r")


def test_long_values_are_cut() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    fields = Fields({"a": "x" * 1000, "b": deep}, "file")
    fields.integer("a")
    fields.integer("b")
    assert all(len(problem) < 300 for problem in fields.problems)
