"""Cross-field problems of how a run goes, whatever its model and layout: optimizer, bad steps,
evaluations, what is recorded."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.config.parse import flag
from megatron_llama.config.schema import Config, OptimizerConfig, TrainingConfig
from megatron_llama.errors import describe


def optimizer_problems(optimizer: OptimizerConfig, training: TrainingConfig) -> Iterator[str]:
    """Of the learning rate and its schedule, and of Adam, in a run whose length is resolved."""
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
    """Of the learning rate's way, in iterations or in samples. Where the length of the run is not
    known yet, neither is its end."""
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
    if share and (warmup or share >= 1):
        got = f"{share}{f' beside --lr-warmup-{unit} {warmup}' if warmup else ''}"
        do = "give one length of the warm-up, and 0 for the other"
        yield describe(
            "--lr-warmup-fraction", got=got, expected="a share below 1, and no other length", do=do
        )
        return
    stable = whole - (warmup or int(share * whole))
    if optimizer.lr_decay_style == "WSD" and stable > 0 and not 0 < last <= stable:
        wanted = f"1 to {stable}, the lr_decay_{unit} behind the warm-up"
        yield describe(
            f"--lr-wsd-decay-{unit}",
            got=last,
            expected=wanted,
            do="give the length of the decay at the end",
        )
    if optimizer.lr_decay_style != "constant" and 0 < whole <= warmup:
        wanted = f"less than lr_decay_{unit} {whole}, which includes the warm-up"
        yield describe(f"--lr-warmup-{unit}", got=warmup, expected=wanted, do="shorten the warm-up")


def bad_step_problems(config: Config) -> Iterator[str]:
    """What --on-bad-step and --loss-spike-factor need."""
    training = config.training
    saving = config.checkpoint
    if training.on_bad_step == "skip" and config.optimizer.clip_grad == 0 and not training.fp16:
        wanted = "--clip-grad above 0: without it weights change while their gradients arrive, before a bad step is known"
        yield describe(
            "--on-bad-step skip",
            got="--clip-grad 0",
            expected=wanted,
            do="give --clip-grad 1, a huge number to clip nothing",
        )
    if training.on_bad_step == "rollback" and (saving.save is None or saving.save_interval == 0):
        missing = " and ".join(
            [flag(name) for name in ("save", "save_interval") if not getattr(saving, name)]
        )
        do = "give --save FOLDER and --save-interval N"
        yield describe(
            "--on-bad-step rollback",
            got=f"no {missing}",
            expected="checkpoints to go back to",
            do=do,
        )
    if 0 < training.loss_spike_factor <= 1:
        do = "give --loss-spike-factor 2 or so"
        yield describe(
            "--loss-spike-factor",
            got=training.loss_spike_factor,
            expected="more than 1, or 0 for no spikes",
            do=do,
        )


def run_problems(config: Config) -> Iterator[str]:
    """Of what is watched during a run: its trace, evaluations and samples."""
    first = config.log.profile_step_start
    last = config.log.profile_step_end
    if (config.log.profile or config.log.record_timeline is not None) and last <= first:
        yield describe(
            "--profile-step-end",
            got=last,
            expected=f"more than profile_step_start {first}",
            do="trace one step or more",
        )
    if config.log.record_timeline is not None and 0 < config.training.train_iters <= first:
        expected = f"less than train_iters {config.training.train_iters}"
        yield describe(
            "--profile-step-start", got=first, expected=expected, do="record a step of this run"
        )
    shares = split_shares(config.data.split)
    if len(shares) != 3 or not any(shares):
        wanted = "three shares of 0 or more, not all 0, such as 969,30,1"
        yield describe(
            "--split", got=config.data.split, expected=wanted, do="give training,validation,test"
        )
    if config.training.early_stop_patience > 0 and config.training.eval_interval == 0:
        do = "give --eval-interval N and a share of --split, or leave it out"
        patience = config.training.early_stop_patience
        yield describe(
            "--early-stop-patience",
            got=patience,
            expected="evaluations whose losses it compares",
            do=do,
        )
    if config.log.sample_interval > 0 and not config.log.sample_prompt:
        yield describe(
            "--sample-interval",
            got="no --sample-prompt",
            expected="texts to continue",
            do="give --sample-prompt TEXT ...",
        )


def split_shares(split: str) -> list[float]:
    """The shares of a split; empty when one is no finite number of 0 or more."""
    try:
        shares = [float(word) for word in split.split(",")]
    except ValueError:
        return []
    return shares if all(0 <= share < float("inf") for share in shares) else []
