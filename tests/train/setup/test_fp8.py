"""--fp8: what it cannot be used with, where it runs, and what plans count of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron_llama.cli import main
from megatron_llama.config.schema import Config, LoraConfig, ParallelConfig, TrainingConfig
from megatron_llama.engine.comm import device as devices
from megatron_llama.metrics.flops import flops_per_token, run_peak
from megatron_llama.model.nn.fp8.support import blockwise_problem
from megatron_llama.model.plan.fp8 import fp8_layers
from megatron_llama.model.presets import PRESETS
from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.hardware import gpu_named
from megatron_llama.planner.kernels import Kernels
from megatron_llama.planner.training_job import Machine, job_of
from megatron_llama.train.setup.description import describe_config
from megatron_llama.train.setup.memory import MemoryPlan
from megatron_llama.train.setup.resolve import problems, resolve

from tests.refused import refused

IN_FP8 = TrainingConfig(seq_length=4096, micro_batch_size=1, global_batch_size=8, train_iters=1, bf16=True, fp8="blockwise")
CONFIG = Config(PRESETS["llama3-8b"], ParallelConfig(), IN_FP8)


def spread(config: Config, **parallel: object) -> Config:
    return replace(config, parallel=replace(config.parallel, **parallel))


@pytest.mark.parametrize(("preset", "tp"), [("llama3-8b", 1), ("llama3-8b", 8), ("llama3.1-70b", 8), ("llama3.1-405b", 8), ("llama2-13b", 4)])
def test_published_models_have_whole_tiles(preset: str, tp: int) -> None:
    config = replace(CONFIG, model=PRESETS[preset])
    assert problems(spread(config, tensor_model_parallel_size=tp, sequence_parallel=True), 8) == []


OTHERS: dict[str, tuple[Config, str, str]] = {
    "fp32": (replace(CONFIG, training=replace(IN_FP8, bf16=False)), "fp32", "give --bf16"),
    "fp16": (replace(CONFIG, training=replace(IN_FP8, bf16=False, fp16=True)), "--fp16", "give --bf16"),
    "fp64": (replace(CONFIG, training=replace(IN_FP8, bf16=False, fp64=True)), "--fp64", "give --bf16"),
    "compiled": (replace(CONFIG, training=replace(IN_FP8, compile=True)), "--compile", "leave one"),
    "graphs": (replace(CONFIG, training=replace(IN_FP8, cuda_graph_scope="block")), "--cuda-graph-scope block", "leave one"),
    "fused operators": (
        spread(CONFIG, tensor_model_parallel_size=2, sequence_parallel=True, tp_comm_overlap="symm_mem"),
        "--tp-comm-overlap symm_mem",
        "leave one",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_it_cannot_go_with(other: str) -> None:
    config, got, do = OTHERS[other]
    [problem] = problems(config, 8)
    said = refused(problem)
    assert (said.where, said.got) == ("--fp8 blockwise", got) and said.do.startswith(do)
    assert problems(replace(config, training=replace(config.training, fp8="none")), 8) == []


@pytest.mark.parametrize(
    ("sizes", "tp", "strange", "do"),
    [
        ({"head_dim": 64, "num_attention_heads": 32, "num_key_value_heads": 8}, 8, ("keys 64",), "choose --tensor-model-parallel-size 4"),
        ({"intermediate_size": 14336 + 128}, 2, ("intermediate size 7232",), "choose --tensor-model-parallel-size 1"),
        ({"hidden_size": 4096 + 64}, 1, ("hidden size 4160",), "leave --fp8 out"),
        # 256 rows of 384 fill whole tiles, but a rank's 192 do not: the tile of the other half would be cut.
        ({"head_dim": 96, "num_attention_heads": 32, "num_key_value_heads": 4}, 2, ("keys 192",), "choose --tensor-model-parallel-size 1"),
        ({"head_dim": 64, "num_attention_heads": 32, "num_key_value_heads": 1}, 4, ("keys 64",), "leave --fp8 out"),
    ],
)
def test_tiles_that_a_rank_would_cut(sizes: dict[str, int], tp: int, strange: tuple[str, ...], do: str) -> None:
    """With the layout that would fit, which then is accepted."""
    config = spread(replace(CONFIG, model=replace(CONFIG.model, **sizes)), tensor_model_parallel_size=tp)
    said = refused(*problems(config, 8))
    assert said.where == "--fp8 blockwise" and all(width in said.got for width in strange) and said.do.startswith(do)
    if do.startswith("choose"):
        assert problems(spread(config, tensor_model_parallel_size=int(do.split()[-1])), 8) == []


def test_first_and_last_blocks_stay_in_bf16() -> None:
    assert fp8_layers(CONFIG) == range(1, 31)
    assert fp8_layers(replace(CONFIG, training=replace(IN_FP8, fp8_bf16_layers=0))) == range(32)
    assert fp8_layers(replace(CONFIG, training=replace(IN_FP8, fp8="none"))) == range(0)
    said = refused(*problems(replace(CONFIG, training=replace(IN_FP8, fp8_bf16_layers=16)), 8))
    assert (said.where, said.do) == ("--fp8-bf16-layers", "give --fp8-bf16-layers 15, or leave --fp8 out")
    assert describe_config(resolve(CONFIG, 8), 8)["precision"] == "bf16; layers 1 to 30 multiply in FP8 (blockwise)"


@pytest.mark.parametrize(
    ("capability", "cuda", "got"), [((8, 9), "12.9", "L40S"), ((10, 0), "13.0", "L40S"), ((9, 0), "12.8", "CUDA 12.8"), ((9, 0), "12.9", None), ((9, 0), "13.0", None)]
)
def test_gpus_that_multiply_so(capability: tuple[int, int], cuda: str, got: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "capability", lambda device: capability)
    monkeypatch.setattr(devices, "name", lambda device: "L40S")
    monkeypatch.setattr(devices, "toolkits", lambda: {"CUDA": cuda})
    problem = blockwise_problem(torch.device("cuda", 0))
    assert problem is None if got is None else got in refused(problem).got
    assert blockwise_problem(torch.device("cpu")) is None


def test_weight_codes_are_planned() -> None:
    """On the first of two pipeline ranks: two bytes for each element of a matrix of 15 layers, and a scale for 128 x 128; with two slots for
    blocks, of two layers."""
    block = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    codes = 2 * (block + 4 * block // 128**2)
    bf16 = replace(CONFIG, training=replace(IN_FP8, fp8="none"))
    for parallel, layers in (({}, 15), ({"data_parallel_sharding_strategy": "optim_grads_params", "param_slots": "2"}, 2)):
        pipeline = {"pipeline_model_parallel_size": 2, **parallel}
        plan, plain = (MemoryPlan(resolve(spread(config, **pipeline), 8), 8) for config in (CONFIG, bf16))
        assert plan.state_by_component(0)["weight codes in FP8"] == layers * codes
        assert plan.state(0) - plain.state(0) == layers * codes
        # What is kept for backward is what it was; a product's own codes come and go.
        assert plan.kept(0, "none", 0) == plain.kept(0, "none", 0)
        assert plan.activations(0, "none", 0) - plain.activations(0, "none", 0) == 4096 * 2 * 14336 * (1 + 4 / 128)
    # A rank of blocks in bf16 makes no codes, of weights or of gradients.
    ends = replace(CONFIG, training=replace(IN_FP8, fp8_bf16_layers=4))
    plan, plain = (MemoryPlan(resolve(spread(config, pipeline_model_parallel_size=8), 8), 8) for config in (ends, bf16))
    assert plan.state(0) == plain.state(0) and plan.activations(0, "none", 0) == plain.activations(0, "none", 0)
    assert plan.state(1) > plain.state(1) and plan.activations(1, "none", 0) > plain.activations(1, "none", 0)


def test_each_product_counts_against_its_own_peak() -> None:
    """The time of a step at the peaks: forward products and input gradients of 30 layers in half of it."""
    config, peak = resolve(CONFIG, 8), 1e15
    assert run_peak(replace(config, training=replace(IN_FP8, fp8="none")), peak) == peak and run_peak(config, None) is None
    flops = flops_per_token(config.model, 4096, causal=False)
    narrow = 30 * 2 * 2 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    found = run_peak(config, peak)
    assert found is not None and flops / found == pytest.approx((flops - narrow) / peak + narrow / (2 * peak), rel=1e-12)
    lora = run_peak(replace(config, lora=LoraConfig(lora_rank=8)), peak)
    assert lora is not None and lora > found, "frozen weights have no gradient, the only one of three products that is in bf16"


def test_the_planner_halves_what_is_in_fp8() -> None:
    """And no weight gradient. Blocks in bf16 take as long as they did."""
    gpu = gpu_named("h100")
    machine = Machine(gpu, 8, 8, 8, gpu.nic)
    fit = Coefficients(blockwise=1.0, matmul_bytes=0.0)
    plain, narrow, ends = (
        Kernels(job_of(resolve(replace(CONFIG, training=replace(IN_FP8, **options)), 8), machine), fit)
        for options in ({"fp8": "none"}, {"fp8_bf16_layers": 0}, {"fp8_bf16_layers": 8})
    )
    assert narrow.forward().matmul == pytest.approx(plain.forward().matmul / 2)
    assert ends.forward().matmul == pytest.approx(plain.forward().matmul * 0.75)
    for kernels in (narrow, ends):
        assert kernels.weight_gradients() == pytest.approx(plain.weight_gradients())
        assert kernels.head().matmul == plain.head().matmul and kernels.attention() == plain.attention()


@pytest.mark.parametrize(("gpu", "status"), [("h100", 0), ("b200", 2), ("a100", 2)])
def test_a_plan_for_other_gpus_is_refused(gpu: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama3-8b", "--gpus", "8", "--gpu", gpu, "--fp8", "blockwise", "--top", "1", "--seq-length", "4096"]) == status
    printed = capsys.readouterr()
    if status:
        assert refused(printed.err).got == f"--gpu {gpu}"
    else:
        assert "multiply in FP8" in printed.out
