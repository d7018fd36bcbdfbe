"""The bounds before allocation: each has a reason, users can look them up, and what is beyond them is refused at once."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from megatron_llama.config.lines import bounded_lines, parse_json
from megatron_llama.errors import nearest_divisors
from megatron_llama.schedule import ScheduleError, schedule_named
from megatron_llama.train.setup.resolve import problems
from tools.limits_docs import with_table

from tests.train.setup.test_resolve import config_of

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"


def test_the_table_of_the_docs_is_that_of_the_module() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), "run python -m tools.limits_docs docs/faults.md"


@pytest.mark.parametrize(
    ("given", "world", "said"),
    [
        ({"num_hidden_layers": 10**9}, 1, "--num-hidden-layers: got 1000000000, expected at most 2,048"),
        ({"hidden_size": 10**12}, 1, "--hidden-size: got 1000000000000, expected at most"),
        ({"intermediate_size": 10**30}, 1, "--intermediate-size: got 1"),
        ({}, 10**9, "processes: got 1,000,000,000, expected at most"),
        ({"tensor_model_parallel_size": 10**9}, 1, "--tensor-model-parallel-size: got 1000000000"),
        ({"pipeline_model_parallel_size": 1000}, 1000, "pipeline ranks x chunks: got 1,000, expected at most 512"),
        ({"virtual_pipeline_model_parallel_size": 10**5}, 1, "pipeline ranks x chunks: got 100,000"),
        ({"global_batch_size": 10**9}, 1, "stages x microbatches: got 1 x 1,000,000,000"),
        (
            {"global_batch_size": 100, "rampup_batch_size": (1, 1, 10**12)},
            1,
            "--rampup-batch-size: got 99 sizes in up to 1,000,000,000,000 steps",
        ),
        ({"train_samples": 10**30}, 1, "--train-samples: got 1"),
        ({"lr": float("inf")}, 1, "--lr: got inf, expected a finite number"),
        ({"clip_grad": float("nan")}, 1, "--clip-grad: got nan, expected a finite number"),
    ],
    ids=str,
)
def test_numbers_for_which_plans_would_take_the_machine(given: dict[str, Any], world: int, said: str) -> None:
    assert any(problem.startswith(said) for problem in problems(config_of(**given), world))


@pytest.mark.parametrize(
    "size", [{"ranks": 10**9, "microbatches": 1}, {"ranks": 2, "microbatches": 10**9}, {"ranks": 2, "microbatches": 2, "virtual": 10**9}]
)
def test_schedules_that_are_too_long_to_be_listed(size: dict[str, int]) -> None:
    with pytest.raises(ScheduleError, match="expected at most"):
        schedule_named("interleaved", **size)


def test_divisors_of_large_numbers() -> None:
    assert (nearest_divisors(36, 5), nearest_divisors(36, 1), nearest_divisors(1, 1), nearest_divisors(97, 5)) == (
        "4 or 6", "2", "", "1 or 97",
    )
    assert nearest_divisors(2**40, 1000) == "512 or 1024" and nearest_divisors(10**18, 3) == "2 or 4"


def test_lines_are_bounded() -> None:
    text = "ab\n" + "x" * 10 + "\ncd\n" + "y" * 9
    assert list(bounded_lines(io.StringIO(text), 4)) == ["ab\n", None, "cd\n", None]
    assert list(bounded_lines(io.BytesIO(b"abc\nabcd\n\n"), 4)) == [b"abc\n", None, b"\n"]


@pytest.mark.parametrize("depth", [101, 900, 100_000])
def test_nesting_is_bounded(depth: int) -> None:
    assert parse_json("[" * 100 + "]" * 100)
    with pytest.raises(ValueError, match="nested"):
        parse_json("[" * depth + "]" * depth)
    with pytest.raises(ValueError, match="nested"):
        parse_json('{"a":' * depth + "1" + "}" * depth)
