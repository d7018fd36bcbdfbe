"""Files of coefficients: read and refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_llama.cli import main
from megatron_llama.errors import ConfigError
from megatron_llama.planner.calibration import HOST, Calibration, as_json, calibration_of, read_calibration
from megatron_llama.planner.fitted import FITTED
from megatron_llama.planner.hardware import CPU

SMALL = ["--hidden-size", "64", "--intermediate-size", "128", "--num-hidden-layers", "2", "--num-attention-heads", "4", "--vocab-size", "512", "--seq-length", "64", "--global-batch-size", "8"]
RUN = ["pretrain", *SMALL, "--train-iters", "1", "--dry-run", "--world-size", "4", "--micro-batch-size", "1", "--pipeline-model-parallel-size", "1", "--auto-parallel"]


def written(path: Path, calibration: Calibration) -> str:
    path.write_text(json.dumps(as_json(calibration)))
    return str(path)


def test_a_run_is_planned_with_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = replace(HOST, gpu=replace(CPU, name="desk", peak=CPU.peak / 50, hbm=CPU.hbm / 50, source="a desk"))
    file = written(tmp_path / "desk.json", measured)
    assert read_calibration(Path(file)) == replace(measured, notes=(f"times are those of {file}, measured on a desk",))
    seconds = []
    for more in ([], ["--coefficients", file]):
        assert main([*RUN, *more]) == 0
        out = capsys.readouterr().out
        seconds.append(float(re.findall(r"planned: (\S+) s a step", out)[0]))
    assert seconds[1] > 10 * seconds[0] and "on 4 x desk" in out and "measured on a desk" in out
    assert main(["plan", *SMALL, "--gpus", "4", "--coefficients", file, "--explain", "tp2/optim", "--json", str(tmp_path / "plan.json")]) == 0
    assert "4 x desk" in capsys.readouterr().out
    small = json.loads((tmp_path / "plan.json").read_text())["layouts"][0]
    assert main(["plan", *SMALL, "--gpus", "4", "--coefficients", file, "--bf16", "--explain", "tp2/optim", "--json", str(tmp_path / "plan.json")]) == 0
    narrow = json.loads((tmp_path / "plan.json").read_text())["layouts"][0]
    assert narrow["memory_bytes"]["activations"] < small["memory_bytes"]["activations"], "planned in the precision that was measured"


def test_a_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    for text, message in (("[1, 2", "a file of plan calibrate"), ("[1]", "got something else"), ('{"format": 7}', "got format 7")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_calibration(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_calibration(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="leave one out"):
        calibration_of("h100", str(path))
    content = as_json(HOST)
    content["device"]["peak"], content["coefficients"]["speed"], content["precision"] = "fast", 1.0, "fp8"
    del content["coefficients"]["nvlink"]
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as error:
        read_calibration(path)
    for part in ("device.peak: got fast", "got speed, expected a known name", "got no nvlink", "precision: got fp8"):
        assert part in str(error.value)
    assert calibration_of(None, None).fit == FITTED and calibration_of("a100", None).gpu.name == "a100"
