"""Checks of the learning rate, its schedule, and the limits of update rules."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.config.parse import flag
from megatron_llama.config.schema import Config, OptimizerConfig, TrainingConfig
from megatron_llama.engine.options import BF16, EIGHT_BIT, FP32, SCHEDULE_FREE
from megatron_llama.engine.plan.buckets import ALIGN
from megatron_llama.errors import describe
from megatron_llama.train.setup.checks.whole_units import whole_units

LEAST_BF16 = 2.0**-8
"""The least share by which any number in bf16 can fall."""


def optimizer_problems(optimizer: OptimizerConfig, training: TrainingConfig) -> Iterator[str]:
    """Yield problems of the learning rate and its schedule. The length of the run is resolved,
    unless it is given in epochs of a dataset that is not open yet."""
    if optimizer.min_lr > optimizer.lr >= 0:
        yield describe(
            "--min-lr",
            got=optimizer.min_lr,
            expected=f"at most lr {optimizer.lr}",
            do="lower --min-lr or raise --lr",
        )
    yield from _decay_problems(optimizer, training)


def _decay_problems(optimizer: OptimizerConfig, training: TrainingConfig) -> Iterator[str]:
    """Yield problems of the schedule, in iterations or in samples. The end of a decay of length 0
    is not known yet: then nothing is compared with it."""
    named = {
        unit: [f"lr_{phase}_{unit}" for phase in ("decay", "warmup", "wsd_decay")]
        for unit in ("iters", "samples")
    }
    given = {
        unit: [flag(name) for name in names if getattr(optimizer, name) > 0]
        for unit, names in named.items()
    }
    if given["iters"] and given["samples"]:
        got = " ".join([*given["iters"], *given["samples"]])
        do = "leave out those in iterations, or those in samples"
        yield describe("the learning rate's schedule", got=got, expected="one unit", do=do)
        return
    if given["samples"] and not (training.train_samples or training.epochs):
        do = "give the run's length in samples too, or the schedule in iterations"
        yield describe(
            " ".join(given["samples"]), got="no --train-samples", expected="a run of samples", do=do
        )
        return
    unit = "samples" if given["samples"] else "iters"
    whole, warmup, last = (getattr(optimizer, name) for name in named[unit])
    share = optimizer.lr_warmup_fraction
    if share > 0 and (warmup or share >= 1):
        got = f"{share}{f' with --lr-warmup-{unit} {warmup}' if warmup else ''}"
        do = "give one length of the warm-up, and 0 for the other"
        yield describe(
            "--lr-warmup-fraction", got=got, expected="a share below 1, and no other length", do=do
        )
        return
    stable = whole - (warmup or int(share * whole))
    if optimizer.lr_decay_style == "WSD" and stable > 0 and not 0 < last <= stable:
        wanted = f"1 to {stable}, the lr_decay_{unit} after the warm-up"
        yield describe(
            f"--lr-wsd-decay-{unit}",
            got=last,
            expected=wanted,
            do="give the length of the decay at the end",
        )
    if optimizer.lr_decay_style != "constant" and 0 < whole <= warmup:
        wanted = f"less than lr_decay_{unit} {whole}, which includes the warm-up"
        yield describe(f"--lr-warmup-{unit}", got=warmup, expected=wanted, do="shorten the warm-up")


def schedule_free_problems(config: Config) -> Iterator[str]:
    """Yield options with which schedule-free AdamW cannot be used."""
    optimizer = config.optimizer
    offload = config.offload.optimizer_offload
    if optimizer.optimizer != SCHEDULE_FREE:
        return
    where = f"--optimizer {SCHEDULE_FREE}"
    if optimizer.lr_decay_style != "constant":
        yield describe(
            where,
            got=f"--lr-decay-style {optimizer.lr_decay_style}",
            expected="constant: its average takes the place of the decay",
            do="give --lr-decay-style constant; a warm-up may stay",
        )
    if offload != "none":
        yield describe(
            where,
            got=f"--optimizer-offload {offload}",
            expected="none: the weights are averaged where the model computes",
            do="leave --optimizer-offload out, or take --optimizer adam",
        )


def moment_problems(config: Config) -> Iterator[str]:
    """Yield options with which moments in bf16 or 8 bits cannot be used."""
    optimizer = config.optimizer
    offload = config.offload.optimizer_offload
    for name, beta in (("exp_avg_dtype", "adam_beta1"), ("exp_avg_sq_dtype", "adam_beta2")):
        kept = getattr(optimizer, name)
        if kept == FP32:
            continue
        where = f"{flag(name)} {kept}"
        if kept == BF16 and 0 <= 1 - getattr(optimizer, beta) < LEAST_BF16:
            yield describe(
                where,
                got=f"{flag(beta)} {getattr(optimizer, beta)}",
                expected=f"at most {1 - LEAST_BF16:.3f}: a step that takes less of a moment is "
                "rounded back",
                do=f"lower {flag(beta)} (0.95 is usual), or keep this moment in fp32 or 8 bits",
            )
        refused = [
            (f"--optimizer-offload {offload}", offload != "none", "none: the host has it in fp32"),
            (
                f"--optimizer {optimizer.optimizer}",
                optimizer.optimizer != "adam",
                "adam: the state of others is in fp32",
            ),
            ("--fp64", config.training.fp64, "training in fp32, bf16 or fp16"),
            (
                f"--lora-rank {config.lora.lora_rank}",
                kept == EIGHT_BIT and config.lora.lora_rank,
                "weights that are trained: low-rank additions are small",
            ),
        ]
        for got, given, expected in refused:
            if given:
                yield describe(where, got=got, expected=expected, do="leave one of them out")
    if EIGHT_BIT in (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype):
        yield from _row_problems(config)


def _row_problems(config: Config) -> Iterator[str]:
    """Yield matrices whose rows a rank cannot cut into blocks for moments in 8 bits."""
    tp = config.parallel.tensor_model_parallel_size
    cut = {
        spec.slices[0].name: spec.width
        for unit in whole_units(config, tp=tp)
        for spec in unit.params
        if spec.trainable and not spec.adapter and not spec.resident and spec.width % ALIGN
    }
    if cut:
        name, width = next(iter(cut.items()))
        more = f" (and {len(cut) - 1} more)" if len(cut) > 1 else ""
        yield describe(
            "moments in 8 bits",
            got=f"{width} elements in a row of {name}{more} on a rank of "
            f"--tensor-model-parallel-size {tp}",
            expected=f"a multiple of {ALIGN}, which have a scale together",
            do="keep moments in bf16, or take another --tensor-model-parallel-size",
        )
