"""Published runs as jobs, their memory, how predictions are judged and fitted, and the tool's commands."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.fitted import FITTED, HIGH, LOW
from megatron_llama.planner.footprint import footprint
from megatron_llama.planner.hardware import GPUS
from megatron_llama.planner.nearest import nearest, read_citations
from megatron_llama.planner.oom_probability import ALLOCATABLE, out_of_memory
from megatron_llama.planner.steps import estimate
from tools.planner_eval import fit, headlines
from tools.planner_eval.__main__ import main
from tools.planner_eval.judge import Prediction, byte_figures, calibrated, spearman, step_figures, sweep_figures
from tools.planner_eval.published import Cells, PublishedRun, job_of_row, nic_of, runs_of, workspaces
from tools.planner_eval.score import score

LLAMA: Cells = {
    **{"id": "R1", "group": "study", "model": "llama-13b", "n_layers": "40", "hidden": "5120", "ffn": "13824", "heads": "40", "kv_heads": "40"},
    **{"vocab": "32000", "gated_mlp": "1", "tied_emb": "0", "seq": "2048", "gpu": "A100-80GB", "n_gpus": "64", "gpus_per_node": "8"},
    **{"tp": "2", "pp": "2", "dp": "16", "mbs": "1", "gbs": "2048", "recompute": "none", "dp_shard": "zero1", "precision": "bf16"},
    **{"framework": "NeMo", "attention": "flash", "step_s": "40", "status": "ok", "quality": "A", "sp": "1"},
}
MEGATRON: Cells = {
    **{"source": "golden_values_dev_dgx_a100.json", "model": "gpt", "n_layers": "12", "hidden": "512", "ffn": "2048", "heads": "8", "kv_heads": "8"},
    **{"vocab": "GPT2 BPE 50257", "gated_mlp": "0", "tied_emb": "1", "seq": "1024", "gpu": "A100-80GB", "n_gpus": "8", "mbs": "4", "gbs": "32"},
    **{"framework": "Megatron-Core CI", "sp": "0", "precision": "bf16", "recompute": "none", "quality": "A"},
    "notes": "attn=nan impl=transformer_engine det=True",
}


def runs(*rows: Cells) -> list[PublishedRun]:
    return list(runs_of(rows))


def test_rows_become_jobs() -> None:
    job = job_of_row(LLAMA)
    assert job is not None
    assert (job.tp, job.pp, job.dp, job.microbatches, job.total_tokens) == (2, 2, 16, 128, 2048 * 2048)
    assert job.block_numel == (4 * 5120**2 + 3 * 5120 * 13824) // 2 + 2 * 5120
    assert job_of_row({**LLAMA, "gpu": "TPUv4"}) is None and job_of_row({**LLAMA, "tp": ""}) is None
    assert job_of_row({**LLAMA, "pp": "64"}) is None  # more than the GPUs there are


@pytest.mark.parametrize(
    ("text", "node", "gbit"),
    [
        ("8x200Gb/s HDR IB", 8, 200),
        ("4x100Gb/s RoCE", 8, 50),
        ("800Gb/s/node", 8, 100),
        ("400Gb/s RDMA per GPU", 8, 400),
        ("1600Gb/s RoCE", 8, 200),
        ("4x Omni-Path 100", 4, 100),
    ],
)
def test_words_for_networks(text: str, node: int, gbit: int) -> None:
    assert nic_of(text, GPUS["a100"], node) == gbit * 1e9 / 8


def test_what_makes_a_run_slower() -> None:
    def seconds(**cells: str) -> float:
        job = job_of_row({**LLAMA, **cells})
        assert job is not None
        return estimate(job, FITTED).seconds

    plain = seconds()
    assert seconds(recompute="full") > 1.2 * plain
    assert seconds(attention="torch") > plain and seconds(inter_node="1x10Gb/s") > plain
    assert seconds(pp="4", dp="8") != plain and seconds(gbs="4096") > 1.9 * plain
    assert seconds(gpu="H100-80GB") < 0.6 * plain and seconds(gpu="H100-80GB", precision="fp8") < seconds(gpu="H100-80GB")
    assert seconds(pp="8", dp="4", vpp="5") < seconds(pp="8", dp="4", framework="PyTorch FSDP2")


@pytest.mark.parametrize(
    ("cells", "allocated", "peak"),
    [
        # Megatron-LM tests/functional_tests/test_cases/gpt, golden values at d98e8a6.
        ({"tp": "1", "pp": "1", "dp": "8", "dp_shard": "zero1"}, 552_128_512, 2_711_714_304),
        ({"tp": "4", "pp": "1", "dp": "2", "dp_shard": "zero1"}, 269_842_944, 1_035_779_584),
        ({"tp": "1", "pp": "4", "vpp": "3", "dp": "2", "dp_shard": "none"}, 730_320_896, 2_648_100_000),
    ],
)
def test_memory_of_megatrons_tests(cells: Cells, allocated: int, peak: int) -> None:
    row = {**MEGATRON, **cells, "mem_alloc_bytes": str(allocated), "mem_peak_bytes": str(peak)}
    (run,) = runs(row)
    found = footprint(run.job, last=True, workspaces=workspaces(run.cells))
    assert found.persistent == pytest.approx(allocated, rel=0.003) and found.peak == pytest.approx(peak, rel=0.08)
    figures = score([row, {**row, "quality": "C"}], FITTED)
    assert figures["rows"] == 2 and figures["rows_judged"] == 1 and figures["persistent_within_1_percent"] == 100


FP8 = {"tp": "2", "pp": "2", "dp": "2", "dp_shard": "zero1", "sp": "1", "precision": "fp8", "gpu": "H100-80GB"}
ENDS = {"tp": "1", "pp": "4", "dp": "2", "dp_shard": "none", "gpu": "H100-80GB"}
LOCAL = MEGATRON["notes"].replace("transformer_engine", "local")


@pytest.mark.parametrize(
    ("cells", "allocated"),
    [
        # The same, with what the columns say of workspaces: layers without Transformer Engine, fp16, overlapped products, ends that count.
        ({"tp": "1", "pp": "1", "dp": "8", "dp_shard": "zero1", "notes": LOCAL}, 615_042_560),
        ({"tp": "4", "pp": "1", "dp": "2", "dp_shard": "none", "notes": LOCAL}, 382_956_544),
        ({"tp": "4", "pp": "1", "dp": "2", "dp_shard": "none", "notes": LOCAL, "precision": "fp16", "gpu": "GB200"}, 416_513_536),
        ({**FP8, "mbs": "2", "model": "fp8_tp_overlap"}, 476_258_816),
        ({**ENDS, "tied_emb": "0", "n_layers": "6", "model": "vp2_account_for_embedding_loss_in_pipeline_split"}, 638_725_632),
        ({"tp": "1", "pp": "1", "dp": "8", "dp_shard": "none", "recompute": "full"}, 1_232_487_936),
    ],
)
def test_workspaces_of_megatrons_tests(cells: Cells, allocated: int) -> None:
    (run,) = runs({**MEGATRON, **cells})
    assert footprint(run.job, last=True, workspaces=workspaces(run.cells)).persistent == pytest.approx(allocated, rel=0.01)


def test_probability_of_running_out() -> None:
    assert out_of_memory(ALLOCATABLE * 80e9, 80e9) == pytest.approx(0.5)
    assert out_of_memory(60e9, 80e9) < 0.01 < 0.99 < out_of_memory(90e9, 80e9)
    (small,), (large,) = (runs({**LLAMA, "status": "ok"}), runs({**LLAMA, "status": "oom", "tp": "1", "pp": "1", "dp": "64", "mbs": "8"}))
    assert score([small.cells, large.cells], FITTED)["fits_right_percent"] == 100


def predictions(*pairs: tuple[str, float, float]) -> list[Prediction]:
    """(source, measured, predicted)."""
    job = job_of_row(LLAMA)
    assert job is not None
    return [
        Prediction(PublishedRun(str(at), source, {}, job, measured, True), predicted)
        for at, (source, measured, predicted) in enumerate(pairs)
    ]


def test_errors_with_and_without_a_row() -> None:
    scaled = predictions(("a", 10, 12), ("a", 20, 24), ("a", 30, 36), ("b", 10, 10))
    figures = step_figures(scaled)
    assert figures["step_mape_none_percent"] == pytest.approx(15.0) and figures["step_mape_one_row_percent"] == pytest.approx(0.0)
    assert figures["step_within_10_none_percent"] == 25 and len(calibrated(scaled)) == 3
    mixed = calibrated(predictions(("a", 10, 10), ("a", 10, 11), ("a", 10, 10)))
    assert mixed[1][0] == pytest.approx(0.1) and mixed[0][1] == 1.0


def test_ranks() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1) and spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2], [1, 2, 2]) == pytest.approx(0.5) and spearman([1, 1], [1, 2]) == 0
    rows = [
        PublishedRun(str(size), "study", LLAMA, replace(one, micro_batch=size), 10.0 + size, True)
        for size in range(1, 13)
        if (one := job_of_row(LLAMA))
    ]
    best_second = [Prediction(run, 1.0 if run.label == "2" else 5.0 + run.job.micro_batch) for run in rows]
    figures = sweep_figures(best_second)
    assert figures["sweep_count"] == 1 and figures["sweep_regret_mean_percent"] == pytest.approx(100 * (12 / 11 - 1))
    assert byte_figures("x", [0.001, -0.2], 0.01) == {
        "x_rows": 2,
        "x_error_mean_percent": pytest.approx(10.05),
        "x_error_median_percent": pytest.approx(10.05),
        "x_within_1_percent": 50,
    }


def test_the_score_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, rows = (tmp_path / "runs.csv", [LLAMA, {**LLAMA, "quality": "C"}, {**LLAMA, "status": "oom", "step_s": ""}])
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, LLAMA)
        writer.writeheader()
        writer.writerows(rows)
    assert main(["score", str(path), "--json", str(tmp_path / "score.json")]) == 0
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    written = json.loads((tmp_path / "score.json").read_text())
    assert printed["rows"] == "3" and printed["rows_judged"] == "2" and printed.keys() == written.keys()
    assert float(printed["step_mape_none_percent"]) == pytest.approx(written["step_mape_none_percent"], rel=1e-3)
    path.write_text("a,b\n1,2\n")
    assert main(["score", str(path)]) == 2
    assert "no column model, n_layers" in capsys.readouterr().err
    assert main(["score", str(tmp_path / "none.csv")]) == 2


@pytest.mark.long
def test_the_fit_finds_a_coefficient_and_leaves_sources_out() -> None:
    truth = replace(Coefficients(), matmul_a100=0.6, nvlink=0.5)
    rows = [
        {**LLAMA, "group": source, "tp": tp, "dp": str(32 // int(tp)), "mbs": mbs, "recompute": again}
        for source in "abcd"
        for tp in ("1", "2", "4", "8")
        for mbs in ("1", "2", "4")
        for again in ("none", "full")
    ]
    made = [replace(run, seconds=estimate(run.job, truth).seconds) for run in runs(*rows)]
    fitted = fit.fit_all(made)
    found = fit.coefficients(fitted.logs)
    worst = max(abs(math.expm1(value - math.log(run.seconds))) for value, run in zip(fitted.predicted, made, strict=True) if run.seconds)
    before = max(abs(math.log(estimate(run.job, Coefficients()).seconds / run.seconds)) for run in made if run.seconds)
    assert worst < 0.02 < 0.15 < before and found.matmul_a100 < 0.75 and found.nvlink < 0.65
    left = fit.left_out(made, fitted)
    assert len(left) == len(made) and step_figures(left)["step_mape_none_percent"] < 2


def test_what_is_shipped() -> None:
    table = read_citations()
    assert 0.7 < LOW < 1 < HIGH < 1.4 and len(table) > 50 and len({run.source for run in table}) > 30
    (first, *_) = nearest(table, known="h100", gpus=64, numel=68_000_000_000, seq=4096)
    assert "70b" in first.model and first.known == "h100" and f"{first.speed:,.0f} tokens/s/GPU" in str(first)


def test_the_headlines_of_other_trainers(capsys: pytest.CaptureFixture[str]) -> None:
    headlines.scaling()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.split()[0] in ("1", "8")]
    speeds = {(row[0], int(row[1])): [float(cell.replace(",", "")) for cell in row[2:]] for row in rows}
    for gpus in (32, 64, 128, 256, 512):
        # One microbatch: what overlaps wins by as much as published; eight: reducing after each of them costs more than it hides.
        one, eight = speeds["1", gpus], speeds["8", gpus]
        assert min(one[:2]) > 1.15 * one[2] and eight[0] > eight[2] > eight[1]
    assert speeds["8", 512][0] > 0.9 * speeds["8", 32][0]
    headlines.layer_sharding()
    for line in capsys.readouterr().out.splitlines()[2:]:
        _, _, ours, fsdp, gain, yandex, published, _ = line.replace(",", "").split()
        assert float(ours) == pytest.approx(float(yandex), rel=0.15) and float(fsdp) == pytest.approx(float(published), rel=0.15)
        assert 0.05 < float(gain.rstrip("%")) / 100 < 0.35
