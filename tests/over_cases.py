"""A test that goes over its cases itself, where there are many that take less time than pytest takes around each test."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from itertools import product
from typing import Any

import pytest


def over_cases(test: Callable[..., None]) -> Callable[[], None]:
    """Make one test of the many that the marks ``parametrize`` below would make. It fails if a case fails, and names all that do.
    Without this line each case is a test again: to choose one by ``-k``."""
    marks: list[pytest.Mark] = list(getattr(test, "pytestmark", []))
    cases = list(product(*(list(_labelled(mark)) for mark in marks if mark.name == "parametrize")))
    given = {name for _, values in cases[0] for name in values}
    # A fixture would be the same for all cases, and what one of them leaves in it would be there for the next.
    assert given == inspect.signature(test).parameters.keys(), f"{test.__name__} has a fixture"

    @wraps(test)
    def test_over_cases() -> None:
        failures: dict[str, BaseException] = {}
        for case in cases:
            try:
                test(**{name: value for _, values in case for name, value in values.items()})
            except (Exception, pytest.fail.Exception) as error:
                failures[", ".join(label for label, _ in case)] = error
        if failures:
            labels = "\n".join(failures)
            raise AssertionError(f"{len(failures)} of {len(cases)} cases, the first of them above:\n{labels}") from next(iter(failures.values()))

    test_over_cases.__dict__["pytestmark"] = [mark for mark in marks if mark.name != "parametrize"]
    # pytest reads there which fixtures a test takes: none.
    test_over_cases.__dict__["__signature__"] = inspect.Signature()
    return test_over_cases


def _labelled(mark: pytest.Mark) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each case of a mark: its id, or what it consists of, and its values by the names of the parameters."""
    given, cases = mark.args
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)
    ids = mark.kwargs.get("ids")
    labels = list(ids) if ids is not None and not callable(ids) else [None] * len(list(cases))
    for label, case in zip(labels, cases, strict=True):
        assert not hasattr(case, "marks"), "a case with a mark is a test of its own"
        values = dict(zip(names, case if len(names) > 1 else [case], strict=True))
        yield str(label or ", ".join(f"{name}={value!r}" for name, value in values.items())), values
