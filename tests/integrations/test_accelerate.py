"""A loop of Accelerate with the engine: 20 steps as under DDP, with accumulation whose last step in an epoch has fewer microbatches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.ranks import Ranks, deviation

SCRIPT = "tests.integrations.accelerate_run"
BOUND = 1e-6
"""Of losses, gradient norms and learning rates, in fp32: the order of sums is another one."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "mixed", "bound"),
    [
        ("optim_grads_params", "no", BOUND),
        pytest.param("optim", "no", BOUND, marks=pytest.mark.long),
        pytest.param("optim_grads_params", "bf16", 1e-3, marks=pytest.mark.long),
    ],
)
def test_the_loop_trains_as_under_ddp(ranks: Ranks, tmp_path: Path, strategy: str, mixed: str, bound: float) -> None:
    """Under autocast weights are cast as with DDP, but sums in another order are rounded to bf16 further on."""
    by_kind = ranks.find("compare", tmp_path, strategy, mixed)
    assert len(by_kind["plain"]) == 25 and by_kind["plain"][-1][0] < by_kind["plain"][0][0] - 1
    assert deviation(by_kind["engine"], by_kind["plain"]) < bound


@pytest.mark.long
def test_states_are_saved_and_loaded(ranks: Ranks, tmp_path: Path) -> None:
    """What ``save_state`` keeps is gone on from, also what was saved without the engine; models are saved as by Accelerate."""
    by_kind = ranks.find("states", tmp_path)
    for kind in ("engine", "plain"):
        assert deviation(by_kind[f"engine resumed from {kind}"], by_kind["plain resumed"]) < BOUND
    assert by_kind["same names"] and by_kind["largest difference"] < 1e-6


def test_what_the_engine_does_otherwise_is_said(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks.find("refused", tmp_path)
    assert said["clip"].startswith("sharding: got clip")
    assert "got 2 models and 1 optimizers" in said["two models"]
    assert said["scheduler of another"].startswith("StepLR: got a scheduler of another AdamW")
    assert "got max_norm=0.0" in said["max_norm"] and "norm_type=1" in said["norm_type"]
    assert "got 2 of the 29 trained parameters" in said["some parameters"]
    assert "got a read before the step" in said["early read"] and "got a read before the step" in said["early comparison"]
    assert said["before"] == "PendingNorm(no step yet)" and said["after"] > 0
