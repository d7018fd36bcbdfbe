"""Simulates the headline results of the trainers that this one learnt from, next to what they
published."""

from __future__ import annotations

from dataclasses import replace

from megatron_llama.config.schema import Config
from megatron_llama.model.presets import PRESETS
from megatron_llama.planner.candidate import Candidate
from megatron_llama.planner.fitted import FITTED
from megatron_llama.planner.hardware import GBIT, gpu_named
from megatron_llama.planner.steps import estimate
from megatron_llama.planner.training_job import Machine
from megatron_llama.train.setup.resolve import resolve
from tools.planner_eval.published import OTHERS

A100 = gpu_named("a100")
LAYERS = (
    ("llama2-70b", 2048, 10, 6.97, 8.87),
    ("llama2-70b", 4096, 50, 11.07, 11.93),
    ("llama3-70b", 2048, 20, 7.17, 9.76),
)
"""Model, sequence, layers that recompute, and seconds of YaFSDP and of FSDP: README of
yandex/YaFSDP, 256 A100-80GB, batch 1."""
OVERLAPPED = 1890
DISTRIBUTED = 1630
"""Tokens/s/GPU of both distributed optimizers: README of alibaba/Megatron-LLaMA, 256 A100-80GB, 4 x
200 Gbit/s."""


def run(model: str, gpus: int, batch: int, seq: int, micro: int, **parallel: object) -> Config:
    """Return a resolved configuration in bfloat16."""
    whole = Config(model=replace(PRESETS[model], preset=model))
    training = replace(
        whole.training,
        bf16=True,
        global_batch_size=batch,
        micro_batch_size=micro,
        seq_length=seq,
        train_iters=1,
    )
    return resolve(
        replace(whole, parallel=replace(whole.parallel, **parallel), training=training),  # type: ignore[arg-type]
        gpus,
    )


def scaling() -> None:
    """Print the speed of LLaMA-13B on 32 to 512 A100 with 4 x 200 Gbit/s at half efficiency, with
    one and eight microbatches, for each optimizer."""
    fit = replace(FITTED, nic=0.5)
    print(
        "LLaMA-13B, tp 2, micro-batch 4, sequence 2048, "
        "A100 with 4 x 200 Gbit/s at half efficiency: tokens/s/GPU"
    )
    print(f"{'microbatches':>12} {'GPUs':>5} {'optim':>7} {'optim_grads':>12} {'serial':>7}")
    for microbatches in (1, 8):
        for gpus in (32, 64, 128, 256, 512):
            machine = Machine(A100, gpus, 8, 8, 100 * GBIT)
            speeds = []
            for strategy in ("optim", "optim_grads"):
                chosen = run(
                    *("llama-13b", gpus, microbatches * 4 * gpus // 2, 2048, 4),
                    tensor_model_parallel_size=2,
                    sequence_parallel=True,
                    data_parallel_sharding_strategy=strategy,
                )
                speeds.append(Candidate(chosen, machine, fit).speed)
            job = replace(Candidate(chosen, machine, fit).job, sharding="optimizer")
            serial = replace(job, traits=replace(job.traits, overlap_data=False))
            speeds.append(job.total_tokens / estimate(serial, fit).seconds / gpus)
            optim, optim_grads, serial_speed = (f"{speed:,.0f}" for speed in speeds)
            row = f"{optim:>7} {optim_grads:>12} {serial_speed:>7}"
            print(f"{microbatches:>12} {gpus:>5} {row}")
    print(f"published for 256: {OVERLAPPED:,} overlapped, {DISTRIBUTED:,} serial; batch not stated")


def layer_sharding() -> None:
    """Print the step of 70B models with layer sharding and with FSDP's schedule."""
    machine = Machine(A100, 256, 8, 8, A100.nic)
    print("70B on 256 A100, micro-batch 1: seconds of a step")
    head = f"{'model':>11} {'sequence':>8} {'layers':>7} {'FSDP':>6} {'gain':>5}"
    print(f"{head}   published: YaFSDP, FSDP, gain")
    for model, seq, recomputed, yandex, fsdp in LAYERS:
        chosen = run(
            *(model, 256, 256, seq, 1),
            data_parallel_sharding_strategy="optim_grads_params",
            recompute_granularity="full",
            recompute_num_layers=str(recomputed),
        )
        ours = Candidate(
            chosen, machine, replace(FITTED, family_torchtitan=FITTED.family("yafsdp"))
        ).seconds
        job = replace(
            Candidate(chosen, machine, FITTED).job, traits=replace(OTHERS, family="fsdp1")
        )
        theirs = estimate(job, FITTED).seconds
        gains = f"{1 - ours / theirs:>5.0%}   {yandex:.2f}, {fsdp:.2f}, {1 - yandex / fsdp:.0%}"
        print(f"{model:>11} {seq:>8} {ours:>7.2f} {theirs:>6.2f} {gains}")
