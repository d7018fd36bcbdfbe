"""One test over many cases: it goes over all of them, and names all that fail."""

from __future__ import annotations

import pytest

from tests.over_cases import over_cases


def test_all_cases_that_fail_are_named() -> None:
    seen = []

    @over_cases
    @pytest.mark.parametrize(("low", "high"), [(1, 2), (3, 4)], ids=["small", "large"])
    @pytest.mark.parametrize("other", [2, 3, 5])
    def increasing(low: int, high: int, other: int) -> None:
        seen.append((low, high, other))
        assert low < other

    with pytest.raises(AssertionError) as failure:
        increasing()
    assert seen == [(low, high, other) for other in (2, 3, 5) for low, high in ((1, 2), (3, 4))]
    assert str(failure.value).splitlines() == ["2 of 6 cases, the first of them above:", "other=2, large", "other=3, large"]
    assert "assert 3 < 2" in str(failure.value.__cause__)


def test_a_case_that_does_not_raise_what_it_should_fails() -> None:
    @over_cases
    @pytest.mark.parametrize("case", ["1", "x"])
    def refuses(case: str) -> None:
        with pytest.raises(ValueError):
            int(case)

    with pytest.raises(AssertionError, match=r"1 of 2 cases.*\ncase='1'"):
        refuses()


def test_fixtures_and_cases_with_marks_are_refused() -> None:
    def on_a_folder(case: int, tmp_path: object) -> None: ...

    def long(case: int) -> None: ...

    with pytest.raises(AssertionError, match="on_a_folder has a fixture"):
        over_cases(pytest.mark.parametrize("case", [1])(on_a_folder))
    with pytest.raises(AssertionError, match="a case with a mark"):
        over_cases(pytest.mark.parametrize("case", [pytest.param(1, marks=pytest.mark.long)])(long))
