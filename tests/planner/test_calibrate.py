"""``plan calibrate``: points to coefficients, and their files."""

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
from megatron_llama.planner.kernels import Kernels
from megatron_llama.planner.measurements import MeasuredDevice, Point, coefficients_of, job_of_step, lines
from megatron_llama.planner.steps import estimate
from megatron_llama.planner.training_job import Matmul

SHAPE = ["--hidden-size", "64", "--intermediate-size", "128", "--num-hidden-layers", "2", "--num-attention-heads", "4"]
SMALL = [*SHAPE, "--vocab-size", "512", "--seq-length", "64", "--global-batch-size", "8"]
RUN = ["pretrain", *SMALL, "--train-iters", "1", "--dry-run", "--world-size", "4", "--auto-parallel"]
FIXED = ["--micro-batch-size", "1", "--pipeline-model-parallel-size", "1"]


def written(path: Path, calibration: Calibration) -> str:
    path.write_text(json.dumps(as_json(calibration)))
    return str(path)


@pytest.mark.tries("coefficients")
def test_a_run_is_planned_with_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = replace(HOST, gpu=replace(CPU, name="desk", peak=CPU.peak / 50, hbm=CPU.hbm / 50, source="a desk"))
    file = written(tmp_path / "desk.json", measured)
    assert read_calibration(Path(file)) == replace(measured, notes=(f"times are those of {file}, measured on a desk",))
    seconds = []
    for more in ([], ["--coefficients", file]):
        assert main([*RUN, *FIXED, *more]) == 0
        out = capsys.readouterr().out
        assert more or ("on 4 x cpu, 4 in a node" in out and "plan calibrate measures this machine" in out)
        seconds.append(float(re.findall(r"planned: (\S+) s a step", out)[0]))
    assert seconds[1] > 10 * seconds[0] and "on 4 x desk" in out and "measured on a desk" in out
    layouts = []
    for more in ([], ["--bf16"]):
        words = ["--gpus", "4", "--coefficients", file, "--explain", "tp2/optim", "--json", str(tmp_path / "plan.json"), *more]
        assert main(["plan", *SMALL, *words]) == 0
        assert "4 x desk" in capsys.readouterr().out
        layouts.append(json.loads((tmp_path / "plan.json").read_text())["layouts"][0])
    small, narrow = layouts
    assert narrow["memory_bytes"]["activations"] < small["memory_bytes"]["activations"], "planned in the precision that was measured"


SPEEDS = {"matmul_own": 0.8, "matmul_bytes": 1.5, "attention_own": 0.25, "memory": 2.0, "nvlink": 1.0, "family_torchtitan": 1.3}
TRUTH = replace(HOST.fit, **SPEEDS, launch=3e-5, step=2e-3, straggle=0.0, latency=4e-5, hop_inside=0.0)
DESK = replace(CPU, peak=2e11, hbm=2e10, nvlink=3e9, memory=8 << 30)


def points(device: MeasuredDevice) -> dict[Point, float]:
    """What a machine that is as TRUTH says would have measured."""
    gpu, made = DESK, dict[Point, float]()
    steps = [(2, 64, 256, 1, 512, 16), (6, 64, 256, 1, 512, 16), (2, 1024, 2816, 16, 512, 1024), (4, 1024, 2816, 16, 512, 1024)]
    kernels = Kernels(job_of_step(steps[0], gpu, device), TRUTH)
    for m, n, k in ((256, 256, 256), (1024, 256, 1024), (1024, 1024, 1024), (64, 1024, 256), (4096, 64, 64)):
        made["product", (m, n, k)] = kernels.matmul(Matmul(m, n, k))
    made["product", (1 << 20, 1 << 20, 1 << 20)] = 2 * 2**60 / (gpu.peak * TRUTH.matmul_own)
    made["attention", (8, 512, 128)] = 2.0 * 8 * 512 * 512 * 128 / kernels.attention_rate
    made["copy", (1 << 26,)] = 2 * 2**26 / gpu.hbm
    made["norm", (1 << 20,)], made["gate", (1 << 20,)] = (times * 4 * 2**20 * TRUTH.memory / gpu.hbm for times in (2, 3))
    for ranks, size in ((2, 1 << 12), (2, 1 << 24), (4, 1 << 20)):
        gather = TRUTH.latency + (ranks - 1) / ranks * size / gpu.nvlink
        made["gather", (ranks, 1, size)], made["reduce", (ranks, 1, size)] = gather, 2 * gather
    made |= {("beside", (0,)): 1e-2, ("beside", (1,)): 1e-2, ("beside", (2,)): 1.4e-2}
    return made | {("step", sizes): estimate(job_of_step(sizes, gpu, device), TRUTH).seconds for sizes in steps}


def test_a_machine_is_found_again() -> None:
    device = MeasuredDevice(DESK, 4, 4)
    measured = points(device)
    found = coefficients_of(measured, device, HOST.fit)
    gpu, fit = found.gpu, found.fit
    assert found.precision == "fp32" and gpu.family == "own" and (gpu.node, gpu.domain) == (4, 4)
    assert gpu.peak * fit.matmul_own == pytest.approx(DESK.peak * TRUTH.matmul_own, rel=0.02) and fit.matmul_bytes == pytest.approx(
        1.5, rel=0.05
    )
    assert gpu.peak * fit.attention_own == pytest.approx(DESK.peak * TRUTH.attention_own) and gpu.hbm == pytest.approx(DESK.hbm)
    assert fit.memory == pytest.approx(2.0) and gpu.nvlink == pytest.approx(DESK.nvlink) and fit.latency == pytest.approx(TRUTH.latency)
    assert fit.data_exposed == pytest.approx(0.4) == fit.parameters_exposed and fit.latency_across == HOST.fit.latency_across
    assert fit.family_torchtitan == pytest.approx(1.3, rel=0.05) and fit.step == pytest.approx(2e-3, rel=0.1)
    for (kind, sizes), seconds in measured.items():
        if kind == "step":
            assert estimate(job_of_step(sizes, gpu, device), fit).seconds == pytest.approx(seconds, rel=0.05)
    assert any("GFLOP/s" in line for line in lines(measured, found))
    alone = coefficients_of(
        {point: seconds for point, seconds in measured.items() if point[0] not in ("gather", "reduce", "beside")}, device, HOST.fit
    )
    assert (alone.fit.latency, alone.gpu.nvlink, alone.fit.data_exposed) == (HOST.fit.latency, DESK.nvlink, HOST.fit.data_exposed)
    across = {
        (kind, (sizes[0], sizes[0], sizes[2]) if kind in ("gather", "reduce") else sizes): seconds
        for (kind, sizes), seconds in measured.items()
    }
    apart = coefficients_of(across, replace(device, node=1), HOST.fit)
    assert apart.gpu.nic == pytest.approx(DESK.nvlink) and apart.fit.latency_across == pytest.approx(TRUTH.latency) and apart.fit.hop == 0


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
    content["device"]["peak"], content["coefficients"]["speed"], content["precision"] = ("fast", 1.0, "fp8")
    del content["coefficients"]["nvlink"]
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as error:
        read_calibration(path)
    for part in ("device.peak: got 'fast'", "got speed, expected a known name", "got no nvlink", "precision: got fp8"):
        assert part in str(error.value)
    assert calibration_of(None, None).fit == FITTED and calibration_of("a100", None).gpu.name == "a100"
