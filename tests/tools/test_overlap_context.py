"""The benchmark of context parallelism: what it divides by what, and that it refuses types that compute other gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from megatron_llama.model.nn.attention import PLAIN_SCORES
from megatron_llama.model.nn.sliding import sliding_attention
from tools.overlap.context import COMPUTE, HEADS, LAYERS, LENGTH, TYPES, ContextJob, report, whole

from tests.model.nn.spmd import numbers


def found(gradient: float) -> dict[tuple[str, int], list[tuple[float, float, float]]]:
    samples = {(kind, 8): [(0.4, 8e6, 1.0), (0.6, 8e6, 1.0), (0.5, 8e6, gradient)] for kind in TYPES}
    return {**samples, (COMPUTE, 0): [(0.25, 0.0, 0.0)]}


def test_a_step_is_divided_by_its_computation(tmp_path: Path) -> None:
    job = ContextJob(4, "400mbit", 3, str(tmp_path / "rows.json"))
    lines = report(job, found(1.0)).splitlines()
    assert f"compute alone {250 / LAYERS:.1f} ms a layer" in lines[0] and "2.000 (1.60 - 2.40)" in lines[2] and lines[2].endswith(f"{8 / LAYERS:.2f}")
    assert [row["type"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]] == [*TYPES, COMPUTE]
    # Three hosts' keys and values of all heads, in fp32, at 50 MB/s.
    assert job.forward_seconds == pytest.approx(2 * (LENGTH // 4) * 3 * HEADS * 64 * 4 / 50e6)


def test_other_gradients_end_it() -> None:
    with pytest.raises(SystemExit, match="has other gradients"):
        report(ContextJob(4, "400mbit", 3, None), found(1.01))


def test_whole_sequences_are_attended_to_as_the_model_does() -> None:
    heads = [numbers(12, 2, count, 8, seed=seed).detach().requires_grad_() for seed, count in enumerate((4, 2, 2))]
    ours, theirs = whole(*heads), sliding_attention(*heads, rule=PLAIN_SCORES)
    torch.testing.assert_close(ours, theirs)
    for one, other in zip(torch.autograd.grad(ours.square().sum(), heads), torch.autograd.grad(theirs.square().sum(), heads), strict=True):
        torch.testing.assert_close(one, other)
