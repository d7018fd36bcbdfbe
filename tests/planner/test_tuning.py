"""Plans of runs that train a part of the model, or have their optimizer on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron_llama.cli import main
from megatron_llama.config.schema import Config, LoraConfig
from megatron_llama.engine.offload_options import OffloadConfig, ZenFlowConfig
from megatron_llama.metrics.flops import flops_per_token
from megatron_llama.planner.candidate import Candidate
from megatron_llama.planner.choice import choose
from megatron_llama.planner.fitted import FITTED
from megatron_llama.planner.kernels import Kernels
from megatron_llama.planner.report import command
from megatron_llama.planner.steps import HOST_UPDATE, estimate, host_wait
from megatron_llama.planner.training_job import Machine
from megatron_llama.schedule import Op
from megatron_llama.train.setup.memory import MemoryPlan
from megatron_llama.train.setup.resolve import problems, resolve

from tests.oracle.flops import planned_flops
from tests.planner.test_plan import H100, config, machine, plan_command

LORA = LoraConfig(lora_rank=16)
EXACT, ZENFLOW = (OffloadConfig(optimizer_offload="exact"), OffloadConfig(optimizer_offload="zenflow"))


def planned(asked: Config, gpus: int = 8) -> Candidate:
    assert problems(asked, gpus) == []
    return Candidate(resolve(asked, gpus), machine(gpus), FITTED)


def tuned(**sections: object) -> Config:
    return replace(config("llama2-7b", 64, tensor_model_parallel_size=2, sequence_parallel=True), **sections)  # type: ignore[arg-type]


KINDS = {
    "whole": {},
    "lora": {"lora": LORA},
    "offload": {"offload": EXACT},
    "half": {"offload": replace(EXACT, optimizer_offload_fraction=0.5)},
    "zenflow": {"offload": ZENFLOW, "zenflow": ZenFlowConfig(zenflow_update_interval="4")},
}


@pytest.mark.parametrize("kind", KINDS)
def test_flops_and_memory_are_those_of_the_plans(kind: str) -> None:
    plan = planned(tuned(**KINDS[kind]))
    whole = MemoryPlan(plan.config, 8)
    assert planned_flops(plan) == flops_per_token(plan.config.model, plan.job.seq, causal=False, lora=plan.config.lora)
    assert sum(plan.fullest.values()) == whole.needed("none", 0) and plan.host_bytes == whole.offloaded()
    assert plan.seconds == pytest.approx(estimate(plan.job, FITTED).seconds, rel=0.05)


def test_frozen_weights_have_no_gradients() -> None:
    """Neither products, nor messages, nor updates."""
    full, lora = planned(tuned()), planned(tuned(lora=LORA))
    half = planned(tuned(optimizer=replace(Config().optimizer, freeze=tuple(f"model.layers.{layer}.*" for layer in range(16)))))
    products = [Kernels(plan.job, FITTED).weight_gradients() for plan in (full, half, lora)]
    assert products[1] == pytest.approx(products[0] / 2) and products[2] < 0.25 * products[0]
    forward = [Kernels(plan.job, FITTED).forward().matmul for plan in (full, half, lora)]
    assert forward[0] == forward[1] < forward[2] < 1.25 * forward[0]
    assert lora.seconds < 0.9 * full.seconds and half.seconds < 0.9 * full.seconds
    assert lora.step_time.update < 0.05 * full.step_time.update and lora.step_time.data < 0.1 * full.step_time.data
    assert lora.job.trained.head_frozen and not half.job.trained.head_frozen
    assert "--lora-rank 16" in command(lora) and f"--freeze {chr(39)}model.layers.0.*{chr(39)} " in command(half)


def test_the_bounds_of_offload() -> None:
    """n (f + b) + max(0, A - f) with clipping, max(0, A - f - b) without, where copies are faster than updates."""
    plan = planned(tuned(offload=EXACT))
    (stage,), (away,) = plan.stage_times, plan.away
    forward, backward = stage.of(Op.FORWARD), stage.of(Op.BACKWARD)
    owned = sum(plan.short.bucket_plans[0].shard_numel(bucket.index) for bucket in plan.short.bucket_plans[0].buckets)
    assert away == owned
    gpu = replace(H100, pcie=1e15, host=HOST_UPDATE * away / FITTED.host / (forward + backward + 1.0))

    def waits(plan: Candidate) -> float:
        slow = replace(plan.job, machine=replace(plan.machine, gpu=gpu))
        return host_wait(slow, FITTED, away, forward, backward)

    assert waits(plan) == pytest.approx(backward + 1.0)
    unclipped = planned(tuned(offload=EXACT, optimizer=replace(Config().optimizer, clip_grad=0.0)))
    assert waits(unclipped) == pytest.approx(1.0) == waits(planned(tuned(offload=replace(EXACT, offload_speculative=True))))
    every, beside = (
        planned(tuned(offload=ZENFLOW, zenflow=ZenFlowConfig(zenflow_update_interval="4", zenflow_overlap_step=overlap)))
        for overlap in (False, True)
    )
    assert waits(every) == pytest.approx((backward + 1.0) / 4) and waits(beside) == 0
    narrow = replace(gpu, pcie=4 * away / FITTED.pcie / (backward + 3.0), host=1e15)
    assert host_wait(replace(plan.job, machine=replace(plan.machine, gpu=narrow)), FITTED, away, forward, backward) >= 3.0


def test_offload_is_tried_where_nothing_else_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*plan_command("llama2-13b", 1, 8, 2048), "--top", "1", "--recompute-granularity", "full"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "likelier than not to fit, with --optimizer-offload exact" in out and "--optimizer-offload exact --data-path" in out
    assert "194.56 GiB of the 256.00 GiB of host memory" in out and "a step copies 48.49 GiB to the host and 24.24 GiB to the device" in out
    assert main([*words, "--explain", "recompute-full/mbs1/offload-exact"]) == 0
    assert "/offload-exact: " in capsys.readouterr().out
    single = Machine(H100, 1, 8, 8, H100.nic)
    asked = config("llama2-13b", 8, seq=2048)
    choice = choose(asked, single, FITTED, {})
    assert choice.config.offload.optimizer_offload == "exact" and "--optimizer-offload exact" in choice.notes[0]
    small = replace(single, gpu=replace(H100, host_memory=64 << 30))
    assert main([*words, "--optimizer-offload", "none"]) == 2
    with pytest.raises(Exception, match="would do"):
        choose(asked, small, FITTED, {})
