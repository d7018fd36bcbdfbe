"""The benchmark of steps: whole runs of a tiny model, and what it makes of what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from megatron_llama.config.schema import Config, ModelConfig, TrainingConfig
from megatron_llama.engine.comm import device as devices
from megatron_llama.metrics.flops import flops_per_token
from megatron_llama.train.setup.resolve import check, problems
from tools.bench_step import Clock, Found, Row, StepConfig, disagreements, report, rows_of, steps_in_time
from tools.processor import processor
from tools.step.contenders import Entry, configured
from tools.step.families import ratios, tasks_of
from tools.step.families import report as families_report
from tools.step.worker import Sample

ROOT = Path(__file__).parent.parent.parent
TINY = "--hidden-size 32 --intermediate-size 48 --num-layers 2 --num-attention-heads 2 --vocab-size 96 --seq-length 16 --micro-batch-size 2"
HF, OURS = Entry("hf", "fp32"), Entry("ours", "fp32")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.bench_step", *TINY.split(), "--rounds", "1", "--threads", "1", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.long
def test_all_contenders_compute_the_same(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    done = run("--contenders", "hf", "torch", "ours", "--dtypes", "bf16", "--json", str(path))
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    assert [(row["name"], row["dtype"]) for row in rows] == [(name, "bf16") for name in ("hf", "torch", "ours")]
    wanted = {"name", "dtype", "tokens_per_second", "ratio", "mfu", "peak_memory_bytes"}
    assert all(wanted <= row.keys() and row["tokens_per_second"] > 0 and row["peak_memory_bytes"] > 2**20 for row in rows)
    assert rows[0]["ratio"] == 1.0
    last = done.stdout.splitlines()[-3:]
    assert [line.split()[:2] for line in last] == [[row["name"], row["dtype"]] for row in rows]
    assert "avx512_bf16" in done.stdout.splitlines()[0]


@pytest.mark.long
def test_a_contender_that_fails_is_said_and_the_others_go_on() -> None:
    done = run("--contenders", "liger", "ours", "--dtypes", "fp32")
    assert done.returncode == 1
    assert "error: liger fp32: ModuleNotFoundError" in done.stderr and done.stdout.splitlines()[-1].startswith("ours fp32")
    done = run("--contenders", "theirs")
    assert done.returncode == 1 and "--contenders: got theirs" in done.stderr


def found(losses: tuple[float, ...]) -> Found:
    samples = {
        HF: [Sample(2.0, 3.0, (5.0, 4.9), 10), Sample(4.0, 4.0, (4.8,), 12)],
        OURS: [Sample(1.0, 2.4, losses, 7), Sample(3.0, 3.2, (4.8,), 6)],
    }
    return Found(samples, {}, {"fp32": 1e6})


def test_rows_by_hand() -> None:
    model = ModelConfig(vocab_size=10, hidden_size=4, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    config = check(Config(model=model, training=TrainingConfig(seq_length=6, micro_batch_size=2, train_iters=1)), 1).config
    flops = 6 * (4 * 16 + 3 * 32 + 40)
    measured = found((5.0, 4.9))
    [_, ours] = rows_of(measured, config, None)
    # Ratios are medians of those of single rounds.
    assert (ours.ratio, ours.processor_ratio, ours.peak_memory_bytes) == (pytest.approx(0.625), pytest.approx(0.8), 7)
    assert (ours.step_ms, ours.tokens_per_second) == (2000.0, 6.0)
    assert ours.mfu == pytest.approx(6.0 * (flops + 12 * 4 * 6) / 1e6) and ours.mfu_causal == pytest.approx(6.0 * (flops + 6 * 4 * 6) / 1e6)
    assert rows_of(measured, config, 1e7)[1].mfu == pytest.approx(ours.mfu / 10) and ours.of_ceiling == pytest.approx(ours.mfu_causal)
    lines = list(report(rows_of(measured, config, None), measured, HF))
    assert lines[-1].split() == ["ours", "fp32", "0.625", "(0.500", "-", "0.750)", "0.800"]
    assert {field.name for field in fields(Row)} >= {"name", "dtype", "tokens_per_second", "ratio", "mfu", "peak_memory_bytes"}


def test_only_what_is_in_fp8_counts_against_its_peak() -> None:
    """Ours in bf16, whose forward products and input gradients of the inner block count half, with all scores or half of them; others are as
    without --fp8."""
    model = ModelConfig(vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=1)
    training = TrainingConfig(seq_length=64, micro_batch_size=1, train_iters=1, bf16=True, fp8="blockwise")
    config = check(Config(model=model, training=training), 1).config
    entries = Entry("hf", "bf16"), Entry("ours", "bf16"), Entry("ours-compile", "bf16"), Entry("ours", "fp32")
    assert [configured(entry, config).training.fp8 for entry in entries] == ["none", "blockwise", "none", "none"]
    assert [problems(configured(entry, config), 1) for entry in entries] == [[], [], [], []]
    measured = Found({entry: [Sample(1.0, 1.0, (5.0,), 10)] for entry in entries}, {}, {"bf16": 1e6, "fp32": 1e6})
    full, causal = (flops_per_token(config.model, 64, causal=only) for only in (False, True))
    halves = 2 * 128 * (4 * 128 + 3 * 128)
    for row in rows_of(measured, config, 1e9):
        less = halves if (row.name, row.dtype) == ("ours", "bf16") else 0
        assert (row.mfu, row.mfu_causal) == pytest.approx((64 * (full - less) / 1e9, 64 * (causal - less) / 1e9))


def test_other_losses_are_an_error() -> None:
    assert disagreements(found((5.0005, 4.9)).samples) == []
    [problem] = disagreements(found((5.01, 4.9)).samples)
    assert problem.startswith("ours fp32: losses 5.01000, 4.90000 are 2.0e-03 away from those of hf fp32")
    assert len(disagreements(found((float("nan"), 4.9)).samples)) == 1


def test_a_round_has_the_steps_that_there_is_time_for() -> None:
    """Beside 5 s for the ceilings; a step of each takes 5 s."""
    a_step = {HF: 2.0, OURS: 3.0}
    found = [steps_in_time(a_step, StepConfig(steps=2), Clock(budget)) for budget in (float("inf"), 16.0, 11.0, 9.0)]
    assert found == [2, 2, 1, 0]


@pytest.mark.parametrize("multiplies", [False, True], ids=["fp32", "bf16"])
def test_the_processor_says_how_it_multiplies_bf16(multiplies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever processor the tests run on."""
    monkeypatch.setattr(devices, "accelerator", lambda rank: torch.device("cpu"))
    monkeypatch.setattr(devices, "multiplies_bf16", lambda: multiplies)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    words = processor()
    assert ", ONEDNN_MAX_CPU_ISA=AVX2" in words and words.endswith(f"; products of bf16 in {'bf16' if multiplies else 'fp32'}")
    assert Entry("hf", "bf16").leaves_bf16_to_torch is not multiplies
    assert not any(Entry(*words).leaves_bf16_to_torch for words in (("ours", "bf16"), ("hf", "fp32")))


def test_families_at_equal_flops_by_hand() -> None:
    """Without windows; a wider attention costs time that its FLOPs take off again."""
    model = ModelConfig(vocab_size=10, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, head_dim=4)
    config = check(Config(model=model, training=TrainingConfig(seq_length=6, micro_batch_size=2, train_iters=1)), 1).config
    plain, gemma = tasks_of(config, ["gemma3_text"], ["fp32"], threads=1, world_size=1)
    other = gemma.config.model
    assert plain.config.model == config.model and (other.qk_norm, other.norm_position, other.sliding_window) == ("head", "both", 0)
    assert other.hidden_act == "gelu_pytorch_tanh" and other.embedding_multiplier == 8**0.5
    samples = {
        plain.entry: [Sample(2.0, 4.0, (), 0), Sample(3.0, 4.0, (), 0)],
        gemma.entry: [Sample(2.5, 8.0, (), 0), Sample(3.0, 8.0, (), 0)],
    }
    assert ratios([plain, gemma], samples)[gemma.entry] == [1.25, 1.0]
    half = replace(config.model, num_hidden_layers=2)
    work = flops_per_token(config.model, 6, causal=True) / flops_per_token(half, 6, causal=True)
    deeper = replace(gemma, config=replace(config, model=half))
    assert ratios([plain, deeper], samples, "processor_seconds")[gemma.entry] == pytest.approx([2 * work, 2 * work])
    line = list(families_report([plain, gemma], samples))[-1]
    assert line.split() == ["ours-gemma3_text", "fp32", "1.125", "(1.000", "-", "1.250)", "2.000", "2750.0", "ms"]


@pytest.mark.long
def test_families_take_turns() -> None:
    done = run("--families", "qwen3", "--dtypes", "fp32")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[-2:]] == ["ours-llama", "ours-qwen3"]
    assert run("--families", "gpt2").returncode == 1
