"""Lightning with the engine: 20 steps as under DDP, with accumulation, a schedule, validation, a test afterwards and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.ranks import Ranks, deviation

SCRIPT = "tests.integrations.lightning_run"
BOUND = 2e-6


@pytest.mark.lightning
def test_a_module_is_fitted_as_under_ddp_and_resumes(ranks: Ranks, tmp_path: Path) -> None:
    """Runs with and without the engine load each other's checkpoints."""
    by_kind = ranks.find("compare", tmp_path)
    plain = by_kind["plain"]
    assert len(plain) == 56 and plain[-1][1] < plain[0][1] / 4
    assert deviation(by_kind["engine"], plain) < BOUND
    assert by_kind["engine test"] == pytest.approx(by_kind["plain test"], rel=BOUND)
    resumed = by_kind["resumed from engine"]
    # It begins with a validation of its own.
    assert resumed[1:] == by_kind["engine"][1 - len(resumed) :]
    for kind in ("resumed from plain", "plain from engine"):
        assert deviation(by_kind[kind], resumed) < BOUND


@pytest.mark.lightning
def test_what_the_engine_does_otherwise_is_said(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks.find("refused", tmp_path)
    assert "got value, expected norm" in said["value"] and "precision=16-true" in said["precision"]
