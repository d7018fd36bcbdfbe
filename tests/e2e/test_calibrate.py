"""``plan calibrate`` by two processes, shortly: every kind of point, and a file that plans are made with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from megatron_llama.cli import main
from megatron_llama.planner.calibration import read_calibration

from tests.launcher import Launcher
from tests.planner.test_calibrate import SMALL


@pytest.mark.long
def test_two_processes_measure_this_machine(launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "here.json"
    ended = launcher.start(["plan", "calibrate", file, "--seconds", 1.5], 2).wait().ok()
    assert "GFLOP/s" in ended.out and f"plan with --coefficients {file}" in ended.out
    content, found = json.loads(file.read_text()), read_calibration(file)
    assert {row[0] for row in content["measured"]} == {"product", "attention", "copy", "norm", "gate", "step", "gather", "reduce", "beside"}
    assert min(row[-1] for row in content["measured"]) > 0 and found.gpu.family == "own" and found.precision == "fp32"
    assert (found.gpu.node, found.gpu.name) == (2, "cpu") and 1e8 < found.gpu.peak < 1e13 and found.gpu.source.startswith("2 x ")
    assert main(["plan", *SMALL, "--gpus", "2", "--coefficients", str(file), "--top", "2"]) == 0
    assert "2 x cpu" in capsys.readouterr().out
