"""--fp8 tensorwise in plans: messages, memory, times, and small models that prove it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron_llama.cli import main
from megatron_llama.model.plan.fp8 import ScaleMessages, scale_messages
from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.hardware import gpu_named
from megatron_llama.planner.kernels import Kernels
from megatron_llama.planner.training_job import Machine, job_of
from megatron_llama.prove.given import SECTIONS
from megatron_llama.prove.shrink import shrink
from megatron_llama.train.api.common.options import read_options
from megatron_llama.train.setup.memory import MemoryPlan
from megatron_llama.train.setup.resolve import assemble, problems, resolve

from tests.prove.test_fp8 import WIDE
from tests.refused import refused
from tests.train.setup.test_fp8 import CONFIG, IN_FP8, spread

TENSORWISE = replace(CONFIG, training=replace(IN_FP8, fp8="tensorwise"))


def test_weight_codes_and_an_inputs_codes_are_planned() -> None:
    """Two bytes for each element of a matrix and a scale; with one scale a byte for each number of the widest gradient."""
    block = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    bf16 = replace(CONFIG, training=replace(IN_FP8, fp8="none"))
    plan, plain = (MemoryPlan(resolve(spread(config, pipeline_model_parallel_size=2), 8), 8) for config in (TENSORWISE, bf16))
    assert plan.state_by_component(0)["weight codes in FP8"] == 15 * (2 * block + 4 * 4)
    assert plan.activations(0, "none", 0) - plain.activations(0, "none", 0) == 4096 * 2 * 14336 + 4
    many = {"num_attention_heads": 256, "num_key_value_heads": 32}  # of 128 numbers, wider than gate and up
    plan, plain = (MemoryPlan(resolve(spread(replace(config, model=replace(config.model, **many)), pipeline_model_parallel_size=2), 8), 8) for config in (TENSORWISE, bf16))
    assert plan.activations(0, "none", 0) - plain.activations(0, "none", 0) == 4096 * (256 + 2 * 32) * 128 + 4


def test_messages_of_scales_are_counted_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale_messages(spread(CONFIG, tensor_model_parallel_size=2)) == {} == scale_messages(TENSORWISE)
    assert scale_messages(spread(TENSORWISE, tensor_model_parallel_size=2, context_parallel_size=2)) == {
        "tp": ScaleMessages(2, 2, 4),
        "cp": ScaleMessages(4, 4, 0),
    }
    layout = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--bf16", "--fp8", "tensorwise", "--fp8-gather"]
    sizes = ["--seq-length", "4096", "--micro-batch-size", "1", "--global-batch-size", "8", "--train-iters", "1"]
    assert main(["pretrain", "--model", "llama3-8b", *layout, *sizes, "--world-size", "8", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "over tp, in a block in FP8, of each microbatch: forward 4 messages, backward 2, 4 B each; 4 for weights" in printed
    assert "over tp       in a block in FP8, of each microbatch: forward 4 messages" in printed
    # Pipeline ranks whose blocks are all in bf16 agree on no scales.
    ends = ["--pipeline-model-parallel-size", "4", "--fp8-bf16-layers", "8"]
    assert main(["pretrain", "--model", "llama3-8b", *layout, *sizes, *ends, "--world-size", "8", "--dry-run"]) == 0
    assert ["  scales " in rank for rank in capsys.readouterr().out.split("\npp rank ")[1:]] == [False, True, True, False]


def test_the_planner_halves_what_is_in_fp8_and_no_weight_gradient() -> None:
    gpu = gpu_named("h100")
    fit = Coefficients(fp8=1.0, matmul_bytes=0.0)
    plain, narrow = (
        Kernels(job_of(resolve(replace(CONFIG, training=replace(IN_FP8, fp8=recipe, fp8_bf16_layers=0)), 8), Machine(gpu, 8, 8, 8, gpu.nic)), fit)
        for recipe in ("none", "tensorwise")
    )
    assert narrow.forward().matmul == pytest.approx(plain.forward().matmul / 2)
    assert narrow.weight_gradients() == pytest.approx(plain.weight_gradients())


@pytest.mark.parametrize(("gpu", "status"), [("h100", 0), ("b200", 0), ("a100", 2)])
def test_a_plan_for_gpus_without_fp8_is_refused(gpu: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama3-8b", "--gpus", "8", "--gpu", gpu, "--fp8", "tensorwise", "--top", "1", "--seq-length", "4096"]) == status
    printed = capsys.readouterr()
    if status:
        assert refused(printed.err).got == f"--gpu {gpu}"


@pytest.mark.parametrize("layout", [{}, {"fp8_gather": True}, {"num_key_value_heads": 8}, {"pipeline_model_parallel_size": 8}], ids=str)
def test_small_models_that_prove_it_can_run(layout: dict[str, object]) -> None:
    for case in shrink(read_options(None, {**WIDE, "fp8": "tensorwise", **layout}, SECTIONS), 16, 4):
        config = assemble(read_options(None, {**case.options, "train_iters": 1}, SECTIONS))
        assert config.training.fp8 == "tensorwise" and config.training.fp8_gather == ("fp8_gather" in layout)
        assert problems(config, case.world_size) == []
