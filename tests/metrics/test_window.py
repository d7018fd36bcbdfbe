import pytest
from megatron_llama.metrics.flops import flops_per_token, peak_flops
from megatron_llama.metrics.window import Interval, Work, averages
from megatron_llama.model.presets import PRESETS


def test_averages_by_hand() -> None:
    work = Work(flops_per_token=4 * 10**9, world_size=4, peak_flops=1e13)
    got = averages(Interval(steps=10, tokens=10_000, seconds=5.0, exposed_seconds=0.25), work, steps_left=7)
    assert got.elapsed_ms == 500.0
    assert got.tokens_per_second == 2000.0
    assert got.tokens_per_second_per_gpu == 500.0
    assert got.tflops_per_gpu == 2.0
    assert got.mfu == 0.2
    assert got.exposed_comm_ms == 25.0
    assert got.eta_seconds == 3.5


def test_what_is_not_known_stays_unknown() -> None:
    work = Work(flops_per_token=1, world_size=1, peak_flops=peak_flops("cpu"))
    got = averages(Interval(steps=1, tokens=8, seconds=2.0, exposed_seconds=None), work, steps_left=0)
    assert got.mfu is None and got.exposed_comm_ms is None
    assert got.eta_seconds == 0.0


def test_a_published_rate() -> None:
    # 10,000 tokens/s of LLaMA-3 8B at 8192 on an H100 are 579 TFLOP/s or 58.6 % by torchtitan's formula.
    flops = flops_per_token(PRESETS["llama3-8b"], 8192, causal=False)
    work = Work(flops_per_token=flops, world_size=8, peak_flops=peak_flops("NVIDIA H100 80GB HBM3"))
    got = averages(Interval(steps=4, tokens=4 * 8 * 8192, seconds=4 * 0.8192, exposed_seconds=0.0), work, steps_left=1)
    assert got.tokens_per_second_per_gpu == pytest.approx(10_000)
    assert got.tflops_per_gpu == pytest.approx(579.1, abs=0.1)
    assert got.mfu == pytest.approx(0.586, abs=0.001)
