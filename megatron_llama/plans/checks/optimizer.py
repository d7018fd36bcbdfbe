"""The learning rate, its schedule, and Adam."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.config.parse import flag
from megatron_llama.config.schema import Config, OptimizerConfig, TrainingConfig
from megatron_llama.errors import describe
from megatron_llama.plans.itemsize import BF16
from megatron_llama.plans.params import MUON

LEAST_BF16 = 2.0**-8
"""The least share by which a number in bf16 can fall, whatever it is."""


def optimizer_problems(optimizer: OptimizerConfig, training: TrainingConfig) -> Iterator[str]:
    """Yield what is wrong with Adam, the learning rate and its schedule. The length of the run is
    resolved, unless it is given in epochs of a dataset that has not been opened yet."""
    for name in ("adam_beta1", "adam_beta2"):
        beta = getattr(optimizer, name)
        if not 0 <= beta < 1:
            yield describe(
                flag(name),
                got=beta,
                expected="a number in [0, 1)",
                do=f"give {flag(name)} 0.9 or so",
            )
    if optimizer.min_lr > optimizer.lr >= 0:
        yield describe(
            "--min-lr",
            got=optimizer.min_lr,
            expected=f"at most lr {optimizer.lr}",
            do="lower --min-lr or raise --lr",
        )
    yield from _decay_problems(optimizer, training)


def _decay_problems(optimizer: OptimizerConfig, training: TrainingConfig) -> Iterator[str]:
    """The schedule is given in iterations or in samples. A decay of length 0 has an end that is not
    known yet: then nothing is compared with it."""
    named = {
        unit: [f"lr_{part}_{unit}" for part in ("decay", "warmup", "wsd_decay")]
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


def moment_problems(config: Config) -> Iterator[str]:
    """Yield what moments in bf16 cannot be used with."""
    optimizer = config.optimizer
    offload = config.offload.optimizer_offload
    for name, beta in (("exp_avg_dtype", "adam_beta1"), ("exp_avg_sq_dtype", "adam_beta2")):
        if getattr(optimizer, name) != BF16:
            continue
        where = f"{flag(name)} {BF16}"
        if 0 <= 1 - getattr(optimizer, beta) < LEAST_BF16:
            yield describe(
                where,
                got=f"{flag(beta)} {getattr(optimizer, beta)}",
                expected=f"at most {1 - LEAST_BF16:.3f}: a step that takes less of a moment is "
                "rounded back",
                do=f"lower {flag(beta)} (0.95 is usual), or keep this moment in fp32",
            )
        refused = [
            (f"--optimizer-offload {offload}", offload != "none", "none: the host has it in fp32"),
            ("--optimizer muon", optimizer.optimizer == MUON, "adam: Muon's momentum is in fp32"),
            ("--fp64", config.training.fp64, "training in fp32, bf16 or fp16"),
        ]
        for got, given, expected in refused:
            if given:
                yield describe(where, got=got, expected=expected, do="leave one of them out")
