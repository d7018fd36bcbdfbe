"""Transformers' Trainer and TRL's with the engine: 20 steps as under DDP, with accumulation, schedules, evaluation and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.ranks import Ranks, deviation

SCRIPT = "tests.integrations.trainer_run"
BOUND = 2e-6
"""Of losses, gradient norms and learning rates, in fp32: the order of sums is another one."""


@pytest.mark.long
def test_a_trainer_trains_as_under_ddp_and_resumes(ranks: Ranks, tmp_path: Path) -> None:
    """From its own checkpoint with the same bits, and from one without the engine."""
    by_kind = ranks.find("hf", tmp_path)
    assert len(by_kind["plain"]) == 24 and by_kind["plain"][-1][1] < by_kind["plain"][0][1] - 0.5
    assert deviation(by_kind["engine"], by_kind["plain"]) < BOUND
    assert by_kind["resumed"] == by_kind["engine"]
    assert deviation(by_kind["from plain"], by_kind["plain"]) < BOUND
    assert deviation(by_kind["engine unclipped"], by_kind["plain unclipped"]) < BOUND
    assert by_kind["same names"] and by_kind["largest difference"] < 1e-6


@pytest.mark.long
def test_preferences_are_learned_by_adapters_without_a_second_model(ranks: Ranks, tmp_path: Path) -> None:
    """The reference of DPO is the model whose adapters are switched off, within the step."""
    by_kind = ranks.find("dpo", tmp_path)
    assert len(by_kind["plain"]) == 20 and min(line[1] for line in by_kind["plain"]) < by_kind["plain"][0][1] - 1e-3
    assert deviation(by_kind["engine"], by_kind["plain"]) < BOUND
    assert by_kind["resumed"] == by_kind["engine"]
    assert by_kind["same names"] and by_kind["largest difference"] < 1e-6


@pytest.mark.long
def test_instructions_are_learned(ranks: Ranks, tmp_path: Path) -> None:
    by_kind = ranks.find("sft", tmp_path)
    assert len(by_kind["plain"]) == 20 and by_kind["plain"][-1][1] < by_kind["plain"][0][1] - 0.5
    assert deviation(by_kind["engine"], by_kind["plain"]) < BOUND
