"""Problems of the options of ``align`` that are known before a file is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megatron_llama.config.parse import Parsed, flag
from megatron_llama.config.schema import LogConfig, ModelConfig, TrainingConfig
from megatron_llama.errors import ConfigError, describe
from megatron_llama.train.setup.checks.ranges import value_problems
from megatron_llama.tune.preference.align_config import BETAS, WITH_REFERENCE, AlignConfig
from megatron_llama.tune.sft.option_problems import data_problems, missing_data, refuse
from megatron_llama.tune.sft.sft_config import SFTConfig

READ_BY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "beta": tuple(BETAS),
        "label_smoothing": ("dpo",),
        "length_normalization": ("dpo",),
        "sft_loss_weight": ("dpo", "ipo", "simpo"),
        "simpo_gamma": ("simpo",),
        "desirable_weight": ("kto",),
        "undesirable_weight": ("kto",),
        "center_rewards_coefficient": ("reward",),
        "reference_scores": WITH_REFERENCE,
        "only_reference_scores": WITH_REFERENCE,
    }
)
"""The methods that read an option, for options that not all methods read."""
OF_SFT: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "data_format": (
            "nothing: conversations are no preferences",
            "leave it out; --preference-format says what an example looks like",
        ),
        "loss_on": (
            "nothing: the loss compares the answers that are judged, each whole",
            "leave it out",
        ),
        "neftune_noise_alpha": (
            "nothing: noise would blur what the answers are compared by",
            "leave it out",
        ),
    }
)
"""Options of ``sft`` without a meaning here: the expected value of each, and the remedy."""

BESIDE_THE_STEP = (
    "--method kto: a forward pass over as many mismatched answers precedes each step; "
    "what is said of a step's messages, time and MFU leaves it out"
)
"""The note of kto: the schedule in a step's plan lacks the passes that estimate the divergence."""


def valid_options(parsed: Parsed, *, needs_files: bool = True) -> Parsed:
    """Return the options of a run of ``align``, with the mark of a reward model, and for ``kto`` a
    note on what plans do not count. ``needs_files``: the run reads --train-data. Raises ConfigError
    with every problem."""
    missing = missing_data(parsed.get(SFTConfig)) if needs_files else ()
    refuse([*align_problems(parsed), *missing])
    method = parsed.get(AlignConfig).method
    if method == "kto":
        return replace(parsed, notes=(*parsed.notes, BESIDE_THE_STEP))
    if method != "reward":
        return parsed
    model = replace(parsed.get(ModelConfig), num_labels=1)
    return replace(
        parsed,
        instances={**parsed.instances, ModelConfig: model},
        sources={"num_labels": "--method reward", **parsed.sources},
    )


def objective_fields(options: AlignConfig) -> dict[str, Any]:
    """Return the identity of the loss, for JSON: the method, and the value of every option that it
    reads."""
    read = {
        name: getattr(options, name)
        for name, methods in READ_BY.items()
        if options.method in methods and name not in ("reference_scores", "only_reference_scores")
    }
    if "beta" in read and options.beta is None:
        read["beta"] = BETAS[options.method]
    return {"method": options.method, **read}


def objective_changes(
    where: str, before: Mapping[str, Any], options: AlignConfig
) -> tuple[str, ...]:
    """Return a line for each option of the loss that has another value than in the run that saved
    the checkpoint ``where``, whose ``objective_fields`` were ``before``. Raises ConfigError for
    another method."""
    now = objective_fields(options)
    if before["method"] != now["method"]:
        raise ConfigError(
            "--method",
            got=now["method"],
            expected=f"{before['method']}, with which {where} was trained",
            do="give that, or --finetune to begin anew with its weights",
        )
    return tuple(
        f"{flag(name)} was {before.get(name)} when the checkpoint was saved and is {value}: the "
        "loss is another one"
        for name, value in now.items()
        if before.get(name) != value
    )


def align_problems(parsed: Parsed) -> Iterator[str]:
    """Yield every problem of the options of a run of ``align``, whatever its files hold."""
    options = parsed.get(AlignConfig)
    yield from data_problems(parsed, "align")
    for name, (expected, do) in OF_SFT.items():
        if name in parsed.explicit:
            yield describe(flag(name), got="a value", expected=expected, do=do)
    for name, methods in READ_BY.items():
        if name in parsed.explicit and options.method not in methods:
            yield describe(
                flag(name),
                got=f"a value, with --method {options.method}",
                expected=f"--method {' or '.join(methods)}, which alone read it",
                do="leave it out, or choose another method",
            )
    yield from _out_of_range(options)
    if options.preference_format == "completion_label" and options.method != "kto":
        yield describe(
            "--preference-format",
            got=f"completion_label, with --method {options.method}",
            expected="pairs of answers",
            do="choose --method kto, which alone learns from single answers",
        )
    labels = 1 if options.method == "reward" else 0
    if "num_labels" in parsed.explicit and parsed.get(ModelConfig).num_labels != labels:
        yield describe(
            "--num-labels",
            got=f"{parsed.get(ModelConfig).num_labels}, with --method {options.method}",
            expected=f"{labels}",
            do="leave it out: --method reward alone trains a reward model",
        )
    log = parsed.get(LogConfig)
    if options.method == "reward" and (log.sample_interval or log.sample_prompt):
        yield describe(
            "--sample-interval, --sample-prompt",
            got="texts to continue, with --method reward",
            expected="nothing: a reward model gives a score, and continues no text",
            do="leave it out",
        )
    if parsed.get(TrainingConfig).z_loss_weight:
        yield describe(
            "--z-loss-weight",
            got=parsed.get(TrainingConfig).z_loss_weight,
            expected="0: the losses of preference tuning compare answers, not tokens",
            do="leave it out",
        )
    training = parsed.get(TrainingConfig)
    if training.counts_experts_first and options.method == "kto":
        yield describe(
            "--moe-router-load-balancing-type",
            got=f"{training.moe_router_load_balancing_type}, with --method kto",
            expected="seq_aux_loss: the pass before each step is that of the mismatched answers, "
            "and counts no tokens of experts",
            do="change one of the two",
        )


def _out_of_range(options: AlignConfig) -> Iterator[str]:
    beta = options.beta
    if beta is not None and beta <= 0:
        usual = BETAS.get(options.method)
        do = f"{usual:g} is the usual one" if usual is not None else "leave it out"
        yield describe("--beta", got=f"{beta:g}", expected="more than 0", do=do)
    yield from value_problems(options)
    if options.desirable_weight == 0 and options.undesirable_weight == 0:
        yield describe(
            "--desirable-weight, --undesirable-weight",
            got="0 for both",
            expected="one above 0: else nothing is learned",
            do="leave one out",
        )
