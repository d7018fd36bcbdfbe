"""What the planner says of --fp8 beside the rate of products: messages, codes of weights, and blocks that stay in bf16."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from megatron_llama.cli import main
from megatron_llama.config.schema import Config
from megatron_llama.planner.calibration import HOST, as_json
from megatron_llama.planner.candidate import Candidate
from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.fitted import FITTED
from megatron_llama.planner.footprint import fuller_end
from megatron_llama.planner.kernels import Kernels
from megatron_llama.planner.links import rank_groups
from megatron_llama.planner.steps import BlockTime, block_time, estimate
from megatron_llama.planner.training_job import job_of
from megatron_llama.train.setup.resolve import resolve

from tests.planner.test_plan import config, machine
from tests.planner.test_tensor_pieces import FIT
from tests.refused import refused

LAYERS = 32
BLOCK = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
"""Elements of the matrices of a block of LLaMA 3 8B, of which two stay in bf16 unless a test says otherwise."""
IN_FP8 = (LAYERS - 2) / LAYERS


def planned(fp8: str, gpus: int = 8, *, ends: int = 1, gather: bool = False, **parallel: object) -> Config:
    whole = config("llama3-8b", 64, **parallel)
    return resolve(replace(whole, training=replace(whole.training, fp8=fp8, fp8_bf16_layers=ends, fp8_gather=gather)), gpus)  # type: ignore[arg-type]


def block(chosen: Config, fit: Coefficients = FITTED) -> BlockTime:
    """The mean of all blocks."""
    job = job_of(chosen, machine(8))
    return block_time(job, rank_groups(job, fit), Kernels(job, fit), fit)


@pytest.mark.parametrize("again", [0, 1], ids=["", "recomputed"])
def test_messages_about_scales_take_time(again: int) -> None:
    """Two of four products agree over tp and all of them over cp, each way; a gather of codes saves half of the bytes of two gathers, and takes two
    messages more. The two messages about gradients wait for gathers that products hide in bf16."""
    layout = {"tensor_model_parallel_size": 4, "context_parallel_size": 2, "sequence_parallel": True}
    layout |= {"recompute_granularity": "full"} if again else {}
    job = job_of(planned("tensorwise", **layout), machine(8))
    groups = rank_groups(job, FITTED)
    over_tp, over_cp = (IN_FP8 * group.reduce(4) for group in (groups.tp, groups.cp))
    behind = 2 * IN_FP8 * groups.tp.gather(job.stream)
    saved = IN_FP8 * (groups.tp.gather(job.stream) - groups.tp.gather(0))
    plain, blockwise = block(planned("none", **layout)), block(planned("blockwise", **layout))
    for gather, forward in ((False, 2 * over_tp), (True, 4 * over_tp - saved)):
        found = block(planned("tensorwise", gather=gather, **layout))
        assert found.forward.tensor - plain.forward.tensor == pytest.approx(forward)
        assert found.backward.tensor - plain.backward.tensor == pytest.approx(2 * over_tp + behind + again * forward)
        assert found.forward.context - plain.forward.context == pytest.approx(4 * over_cp)
        assert found.backward.context - plain.backward.context == pytest.approx((4 + 4 * again) * over_cp)
    assert (blockwise.forward.tensor, blockwise.forward.context) == (plain.forward.tensor, plain.forward.context)


def test_what_waits_for_no_gather() -> None:
    """Whole rows, and weight gradients that are put off: messages about scales are all."""
    for layout in ({}, {"sequence_parallel": True, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}):
        layout |= {"tensor_model_parallel_size": 4}
        found, plain = (block(planned(fp8, **layout)).backward.tensor for fp8 in ("tensorwise", "none"))
        groups = rank_groups(job_of(planned("none", **layout), machine(8)), FITTED)
        assert found - plain == pytest.approx(2 * IN_FP8 * groups.tp.reduce(4))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_stages_take_as_long_as_their_own_blocks(schedule: str) -> None:
    """With one block a stage the first two and the last two are as in bf16, and all others are as if every block were in FP8."""
    layout = {"pipeline_model_parallel_size": 32, "pipeline_schedule": schedule}
    times, plain, narrow = (
        Candidate(planned(fp8, 32, ends=ends, **layout), machine(32), FITTED).stage_times
        for fp8, ends in (("blockwise", 2), ("none", 1), ("blockwise", 0))
    )
    for stage, (found, wide, fast) in enumerate(zip(times, plain, narrow, strict=True)):
        assert found == (wide if stage in (0, 1, 30, 31) else fast)
    assert narrow[1].forward < 0.8 * plain[1].forward and narrow[1].backward_weight == plain[1].backward_weight


@pytest.mark.parametrize("pp", [1, 8, 32])
def test_both_ways_to_a_step_agree(pp: int) -> None:
    """The closed form, which ranks, knows that stages at the ends are slower."""
    layout = {"pipeline_model_parallel_size": pp}
    for recipe in ("blockwise", "tensorwise"):
        chosen = planned(recipe, 32, **layout)
        seconds = estimate(job_of(chosen, machine(32)), FITTED).seconds
        assert seconds == pytest.approx(Candidate(chosen, machine(32), FITTED).seconds, rel=0.05)


@pytest.mark.parametrize(("recipe", "moved"), [("blockwise", 4), ("tensorwise", 7)])
def test_codes_of_weights_take_time(recipe: str, moved: int) -> None:
    """After each update; where blocks take turns in slots, in both passes of each microbatch."""
    kernels = Kernels(job_of(planned(recipe), machine(8)), FITTED)
    seconds = moved * BLOCK / kernels.hbm
    found, plain = (Candidate(planned(fp8), machine(8), FITTED) for fp8 in (recipe, "none"))
    assert found.step_time.update - plain.step_time.update == pytest.approx((LAYERS - 2) * seconds)
    assert estimate(found.job, FITTED).update - estimate(plain.job, FITTED).update == pytest.approx((LAYERS - 2) * seconds)
    for slots, passes in (("2", 1), ("all", 0)):
        layout = {"data_parallel_sharding_strategy": "optim_grads_params", "param_slots": slots, "recompute_granularity": "full"}
        found, plain = (Candidate(planned(fp8, **layout), machine(8), FITTED) for fp8 in (recipe, "none"))
        assert found.step_time.update - plain.step_time.update == pytest.approx((1 - passes) * (LAYERS - 2) * seconds)
        narrow, wide = (block(candidate.config) for candidate in (found, plain))
        assert narrow.forward.memory - wide.forward.memory == pytest.approx(passes * IN_FP8 * seconds, abs=1e-12)
        assert narrow.backward.memory - wide.backward.memory == pytest.approx(passes * IN_FP8 * seconds, abs=1e-12)


def test_frozen_weights_keep_their_codes() -> None:
    chosen = planned("blockwise")
    frozen = replace(chosen, lora=replace(chosen.lora, lora_rank=8))
    found, plain = (
        Candidate(replace(frozen, training=replace(frozen.training, fp8=fp8)), machine(8), FITTED).step_time.update for fp8 in ("blockwise", "none")
    )
    assert found == pytest.approx(plain)


def test_layouts_without_memory_for_codes_are_ruled_out() -> None:
    """Two bytes for each element of a matrix, as the plan of memory has them but for the scales; by turns those of two blocks."""
    for layout, layers in (({}, LAYERS - 2), ({"data_parallel_sharding_strategy": "optim_grads_params"}, 2), ({"pipeline_model_parallel_size": 8}, 3)):
        found, plain = (job_of(planned(fp8, **layout), machine(8)) for fp8 in ("blockwise", "none"))
        assert fuller_end(found) - fuller_end(plain) == pytest.approx(2 * layers * BLOCK)
        planned_bytes = Candidate(planned("blockwise", **layout), machine(8), FITTED).short.state_by_component(0)["weight codes in FP8"]
        assert planned_bytes == pytest.approx(2 * layers * BLOCK, rel=1e-3)


def test_a_weight_gradient_in_bf16_hides_a_message() -> None:
    """Products in FP8 that take no time hide nothing, but the weight gradient of the MLP still does: of the four gathers and sums of a backward pass
    that of the attention's gradient is hidden."""
    own = machine(8)
    fast = replace(own, gpu=replace(own.gpu, peak=1e9, fp8=1e30, hbm=1e30))
    layout = {"tensor_model_parallel_size": 8, "sequence_parallel": True, "tp_comm_overlap": "4"}
    job = job_of(planned("blockwise", ends=0, **layout), fast)
    groups = rank_groups(job, FIT)
    found = block_time(job, groups, Kernels(job, FIT), FIT)
    assert found.backward.tensor / groups.tp.gather(job.stream) == pytest.approx(3)


def test_measured_rates_have_no_fp8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rates.json"
    content = as_json(HOST)
    file.write_text(json.dumps({**content, "precision": "bf16"}))
    words = f"plan --model llama3-8b --gpus 8 --seq-length 4096 --fp8 tensorwise --coefficients {file}"
    assert main(words.split()) == 2
    said = refused(capsys.readouterr().err)
    assert said.got == f"--coefficients {file}" and said.do.startswith("give --gpu")
