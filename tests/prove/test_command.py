"""The command ``prove``: what it prints, writes and returns. What it compares is the subject of ``tests/prove``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from megatron_llama.cli import main
from megatron_llama.prove import fuzz, proof
from megatron_llama.prove.case import Case
from megatron_llama.prove.compare import Row
from megatron_llama.prove.pool import WorkerPool
from megatron_llama.prove.proof import CheckResult, Proof

EXAMPLES = Path(__file__).parents[2] / "examples"
SEVENTY = ("prove", "--config", str(EXAMPLES / "llama3_70b.yaml"))


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Case, float]]:
    """What would be proven, and in how much time: a check holds, the second one is not run, and with --seed 7 the third differs."""
    asked: list[tuple[Case, float]] = []

    def prove_case(pool: WorkerPool, case: Case, folder: Path, budget: float, *, say: Callable[[str], None]) -> Proof:
        asked.append((case, budget))
        got = math.nan if case.options.get("seed") == 7 else 1e-9
        checks = (
            CheckResult("one process", (Row("one process", "loss", 1e-9, 1e-6, step=1),), 1.0),
            CheckResult("transformers", (), 0.0, not_run="transformers is not installed"),
            CheckResult("data", (Row("data", "samples", got, 1e-6),), 1.0),
        )
        return Proof(case, checks, None, 2.0)

    monkeypatch.setattr(proof, "prove_case", prove_case)
    return asked


def said(capsys: pytest.CaptureFixture[str], argv: Sequence[str]) -> tuple[int, str, str]:
    """Exit status, output, errors."""
    status = main(argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_what_is_scaled_is_told_before_what_was_found(
    proven: list[tuple[Case, float]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, out, err = said(capsys, [*SEVENTY, "--budget", "1m", "--output", str(tmp_path / "a" / "b")])
    ((case, budget),) = proven
    assert (status, err) == (0, "") and case.world_size == 8 and 50 < budget <= 60
    lines = out.splitlines()
    assert lines[0] == "tp 2 pp 2 dp 2: pretrain, 512 processes shown on 8 processes"
    assert any(line.split()[:4] == ["--num-hidden-layers", "80", "->", "4:"] for line in lines)
    assert "  kept: --rope-theta 500000" in out
    said_once = " ".join(out.split())
    assert "left out: --preset (it stands for the fields of the model); --train-iters (prove runs a few steps);" in said_once
    assert "--data-path (prove reads text of its own, with a tokenizer of its own)" in said_once
    assert "--save, --save-interval, --save-retain (prove writes checkpoints and exports of its own);" in said_once
    assert out.index("kept:") < out.index("loss") < out.index("not run: transformers is not installed")
    assert lines[-1] == "holds: everything that was compared; 1 check was not run"
    differing, told, _ = said(capsys, [*SEVENTY, "--seed", "7"])
    assert differing == 1 and told.splitlines()[-1] == "DIFFERS: tp 2 pp 2 dp 2"
    written = json.loads((tmp_path / "a" / "b" / "prove.json").read_text())
    assert written["holds"] and "prove.html" in {path.name for path in (tmp_path / "a" / "b").iterdir()}


def test_what_has_no_effect_is_no_more_than_kept(proven: list[tuple[Case, float]], capsys: pytest.CaptureFixture[str]) -> None:
    guide = ["prove", "--config", str(EXAMPLES / "guide.yaml"), "--vocab-size", "300", "--world-size", "1"]
    status, out, _ = said(capsys, [*guide, "--loss-spike-factor", "3", "--nccl-pp-max-ctas", "8"])
    words = " ".join(out.split())  # long ones are wrapped
    assert status == 0 and "--loss-spike-factor 3: kept; seen only if a step here is bad" in words
    assert "--nccl-pp-max-ctas 8: kept; on CPUs it changes nothing" in words
    assert "--nccl" not in words.partition(" kept: ")[2].partition(" comparing, ")[0]


def test_nothing_compared_is_nothing_proven(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def prove_case(pool: WorkerPool, case: Case, folder: Path, budget: float, *, say: Callable[[str], None]) -> Proof:
        return Proof(case, (CheckResult("one process", (), 0.0, not_run="no time is left"),), None, 2.0)

    monkeypatch.setattr(proof, "prove_case", prove_case)
    status, out, _ = said(capsys, SEVENTY)
    assert status == 1 and out.splitlines()[-1] == "NOT PROVEN: nothing was compared of tp 2 pp 2 dp 2; give a larger --budget"


def test_axes_that_do_not_fit_share_the_time(proven: list[tuple[Case, float]], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = said(capsys, [*SEVENTY, "--ranks", "4", "--budget", "1h"])
    assert status == 0 and [case.name for case, _ in proven] == ["tp 2 pp 2", "tp 2 dp 2", "pp 2 dp 2"]
    assert 1100 < proven[0][1] <= 1200 and "axes seen together" in out


def test_processes_that_nobody_names(proven: list[tuple[Case, float]], capsys: pytest.CaptureFixture[str]) -> None:
    guide = ["prove", "--config", str(EXAMPLES / "guide.yaml"), "--tensor-model-parallel-size", "2"]
    status, out, _ = said(capsys, guide)
    assert status == 0 and out.startswith("note: --world-size is not given, and there is no launch: block: taken for 4 processes\n")
    status, out, _ = said(capsys, [*guide, "--world-size", "2", "--packing"])
    assert status == 0 and proven[1][0].world_size == 2 and proven[1][0].sft and out.startswith("tp 2: sft, 2 processes")


WRONG = [
    (["prove", "--config", "absent.yaml"], "absent.yaml"),
    (["prove"], "model: got no hidden_size"),
    ([*SEVENTY, "--dry-run"], "--dry-run: got an unknown flag"),
    ([*SEVENTY, "--ranks", "1"], "--ranks: got 1, expected 2 or more"),
    ([*SEVENTY, "--budget", "3"], "--budget: got 3, expected a number of seconds, minutes or hours"),
    ([*SEVENTY, "--budget", "0m"], "--budget: got 0m"),
    ([*SEVENTY, "--world-size", "100"], "processes: got 100, expected a multiple of"),
    ([*SEVENTY, "--output", str(EXAMPLES / "llama3_70b.yaml")], "--output: got "),
    ([*SEVENTY, "--auto-parallel"], "--auto-parallel: got true"),
    (["prove", "--model", "llama3-8b", "--micro-batch-size", "0"], "--micro-batch-size: got 0"),
    (["prove", "--fuzz", "-1"], "--fuzz: got -1"),
    (["prove", "--fuzz", "3", "--steps-from", "a"], "--fuzz, --steps-from: got both"),
    (["prove", "--steps-from", "a", "b", "c"], "--steps-from: got 3 logs"),
    (["prove", "--fuzz", "3", "--ranks", "4", "--output", "out"], "--fuzz 3: got --output, --ranks, expected no such option beside it"),
    (["prove", "--fuzz", "3", "--config", str(EXAMPLES / "guide.yaml")], "--fuzz 3: got --eval-interval, "),
    ([*SEVENTY, "--log-dtype", "bf16"], "a configuration: got --log-dtype, expected no such option"),
    ([*SEVENTY, "--steps-from", "a", "--log-dtype", "bf16", "--ranks", "2"], "--steps-from LOG: got --log-dtype, --ranks, expected"),
    (["prove", "--steps-from", "a", "b", "--budget", "4m"], "--steps-from LOG OTHER: got --budget, expected"),
]


def test_what_is_wrong_is_refused_before_anything_runs(
    proven: list[tuple[Case, float]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for argv, says in WRONG:
        status, out, err = said(capsys, argv)
        assert (status, proven) == (2, []) and says in err and "Traceback" not in err + out, says
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    status, _, err = said(capsys, SEVENTY)
    assert status == 1 and "prove: got 8 processes that torchrun or srun started, expected one" in err


def log(path: Path, drift: float) -> str:
    """A log of 200 steps whose loss falls, and then goes away from another one's."""
    losses = [6 * 0.99**step + drift * max(0, step - 100) + 1e-4 * ((step * 7919) % 13 - 6) * (drift != 0) for step in range(200)]
    lines = ({"kind": "train", "iteration": step + 1, "lm_loss": loss, "grad_norm": 1.0} for step, loss in enumerate(losses))
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


def test_two_logs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one, two, other = (log(tmp_path / f"{name}.jsonl", drift) for name, drift in (("one", 0.0), ("two", 0.0), ("other", 0.01)))
    status, out, err = said(capsys, ["prove", "--steps-from", one, two, "--output", str(tmp_path / "out")])
    written = json.loads((tmp_path / "out" / "prove.json").read_text())
    assert (status, err, written["verdict"], written["dtype"]) == (0, "", "rounding", "bf16") and "rounding" in out
    assert "fp32)" in said(capsys, ["prove", "--steps-from", one, two, "--lr", "1e-3"])[1], "a configuration without --bf16 is fp32"
    status, out, _ = said(capsys, ["prove", "--steps-from", one, other, "--log-dtype", "fp32"])
    assert status == 1 and "drift" in out


def test_drawn_configurations(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge is that of ``tests/prove/test_fuzz.py``; here each case holds."""
    judged: list[Case] = []

    class Judge:
        def __init__(self, pool: WorkerPool, folder: Path, budget: float) -> None:
            assert budget == 20

        def __call__(self, case: Case) -> fuzz.Finding:
            judged.append(case)
            return fuzz.Finding("equal")

    monkeypatch.setattr(fuzz, "Prover", Judge)
    status, out, _ = said(capsys, ["prove", "--fuzz", "5", "--seed", "3", "--budget", "20s"])
    assert status == 0 and len(judged) == 5 and "5 configurations drawn from seed 3" in out
