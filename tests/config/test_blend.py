"""The words of --data-path."""

from __future__ import annotations

import pytest
from megatron_llama.config.blend import Blend, blend_problems, read_blend


@pytest.mark.parametrize(
    ("words", "blend"),
    [
        ("a", Blend(("a",), None)),
        ("7", Blend(("7",), None)),
        ("a b", Blend(("a", "b"), None)),
        ("a b c", Blend(("a", "b", "c"), None)),
        ("0.7 a 0.3 b", Blend(("a", "b"), (7, 3), (0.7, 0.3))),
        ("1 a 2e-1 b .05 c", Blend(("a", "b", "c"), (20, 4, 1), (1.0, 0.2, 0.05))),
        ("3 a", Blend(("a",), (3,), (3.0,))),
        ("0.1 a 0.2 b 0.3 a", Blend(("a", "b", "a"), (1, 2, 3), (0.1, 0.2, 0.3))),
    ],
)
def test_forms(words: str, blend: Blend) -> None:
    assert read_blend(words.split()) == blend and list(blend_problems(words.split())) == []


FORMS = "expected PREFIX, PREFIX PREFIX ..., or WEIGHT PREFIX WEIGHT PREFIX ...; give"
APART = "; separate them by spaces, outside of quotes: --data-path 0.7 a 0.3 b"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        *((words.split(), f"--data-path: got {words}, {FORMS}") for words in ("0.7 a b", "0.7 a 0.3", "a 0.7 b 0.3", "0.7 a b c", "0.7 0.3 a b")),
        *((words, APART) for words in (["0.7,a,0.3,b"], ["0.7 a 0.3 b"], ["0.7,a", "0.3,b"], ["0.7", "a,", "0.3", "b"])),
        *((words.split(), f"got {words}, expected weights above 0; leave out what is not to be read") for words in ("0 a 1 b", "1 a -1 b")),
    ],
)
def test_what_is_refused(words: list[str], says: str) -> None:
    [problem] = blend_problems(words)
    assert says in problem and problem.startswith("--data-path: got ")


@pytest.mark.parametrize("words", [["a,b"], ["my data/corpus"], ["1,2 and 3"], ["0.7", "my data", "0.3", "a,b"]])
def test_prefixes_may_have_spaces_and_commas(words: list[str]) -> None:
    assert list(blend_problems(words)) == [] and len(read_blend(words).prefixes) == max(1, len(words) // 2)
