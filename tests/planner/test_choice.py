"""What ``--auto-parallel`` chooses, without a run: the fastest layout that the search finds, with little risk, and the user's options."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from megatron_llama.cli import main
from megatron_llama.errors import ConfigError
from megatron_llama.planner.calibration import HOST
from megatron_llama.planner.candidate import Candidate
from megatron_llama.planner.choice import RISK, SEARCHED, choose, searchable, value_of
from megatron_llama.planner.fitted import FITTED
from megatron_llama.planner.hardware import CPU, GPUS
from megatron_llama.planner.kernels import Kernels
from megatron_llama.planner.search import search
from megatron_llama.planner.steps import estimate
from megatron_llama.planner.training_job import Machine, job_of
from megatron_llama.train.setup.resolve import problems, resolve

from tests.planner.test_plan import AUTO, config, machine

PIPE = {"pipeline_model_parallel_size": 1, "context_parallel_size": 1, "micro_batch_size": 1}


def test_the_fastest_layout_with_little_risk_is_chosen() -> None:
    asked = config("llama2-7b", 64)
    choice = choose(asked, machine(8), FITTED, PIPE)
    assert choice == choose(asked, machine(8), FITTED, PIPE)
    assert problems(choice.config, 8) == []
    planned = Candidate(resolve(choice.config, 8), machine(8), FITTED)
    found = search(searchable(asked), machine(8), FITTED, top=1, pinned=PIPE)
    assert planned.oom_probability < RISK and planned.seconds >= found.best[0].seconds
    assert value_of(choice.config, "pipeline_model_parallel_size") == 1 and "--pipeline-model-parallel-size" not in choice.notes[0]
    # What is not a matter of layout is left alone, and what is printed is what was chosen.
    assert replace(choice.config, parallel=asked.parallel, training=asked.training) == asked
    printed = dict(re.findall(r"--([a-z-]+) (\S+)", choice.notes[0]))
    assert printed == {name.replace("_", "-"): str(value_of(choice.config, name)).lower() for name in SEARCHED if name not in PIPE}
    assert "--context-parallel-size 1" in choice.notes[1] and "runner-up  2 loses" in choice.notes[3]


def test_where_everything_is_a_risk_it_is_taken_and_said() -> None:
    asked = config("llama2-7b", 16)
    given = {**PIPE, "tensor_model_parallel_size": 1, "recompute_granularity": "full", "data_parallel_sharding_strategy": "optim"}
    full = resolve(replace(asked, parallel=replace(asked.parallel, recompute_granularity="full")), 8)
    needed = sum(Candidate(full, machine(8), FITTED).fullest.values())
    tight = replace(machine(8), gpu=replace(GPUS["h100"], memory=int(needed / 0.955 * 1.03)))
    notes = choose(asked, tight, FITTED, given).notes
    assert any("probability of running out of memory" in note for note in notes)
    with pytest.raises(ConfigError, match="GPUs at least, with"):
        choose(asked, replace(tight, gpu=replace(tight.gpu, memory=needed // 2)), FITTED, given)


def test_float32_takes_twice_the_bytes_and_its_own_peak() -> None:
    whole = resolve(config("llama2-7b", 64), 8)
    wide = replace(whole, training=replace(whole.training, bf16=False))
    jobs = [job_of(one, machine(8)) for one in (whole, wide)]
    assert [job.itemsize for job in jobs] == [2, 4] and jobs[1].stream == 2 * jobs[0].stream
    rates = [Kernels(job, FITTED).rate for job in jobs]
    assert rates[1] == pytest.approx(rates[0] * GPUS["h100"].single)
    assert estimate(jobs[1], FITTED).seconds > 5 * estimate(jobs[0], FITTED).seconds
    host = Machine(CPU, 8, 8, 8, CPU.nic)
    assert estimate(job_of(wide, host), HOST.fit).seconds > 1000 * estimate(jobs[0], FITTED).seconds


@pytest.mark.tries("gpu", "nic_gbit")
def test_a_dry_run_prints_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*more: str) -> tuple[float, str]:
        assert main([*AUTO, "--world-size", "16", *more]) == 0
        out = capsys.readouterr().out
        return float(re.findall(r"planned: (\S+) s a step", out)[0]), out

    usual, out = planned("--gpu", "h100", "--gpus-per-node", "8", "--micro-batch-size", "1")
    assert (
        "on 16 x h100, 8 in a node, of those with --pipeline-model-parallel-size 1 --recompute-granularity none --micro-batch-size 1" in out
        and "valid for 16 processes" in out
    )
    tp = re.findall(r"--auto-parallel: --tensor-model-parallel-size (\d)", out)[0]
    assert f"16 processes = tp {tp} x cp 1 x pp 1 x dp {16 // int(tp)}" in out
    assert planned("--gpu", "a100", "--gpus-per-node", "8", "--micro-batch-size", "1")[0] > 1.5 * usual
    assert planned("--gpu", "h100", "--gpus-per-node", "8", "--micro-batch-size", "1", "--nic-gbit", "5")[0] > 1.2 * usual
