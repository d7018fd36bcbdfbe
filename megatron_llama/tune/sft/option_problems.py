"""Problems of the options of a command that trains on examples, before a file is read."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.config.parse import Parsed, flag
from megatron_llama.config.schema import DataConfig, TrainingConfig
from megatron_llama.errors import ConfigError, describe, listing
from megatron_llama.train.setup.checks.ranges import value_problems
from megatron_llama.tune.sft.fields import MESSAGE_PARTS, NO_LEARNING
from megatron_llama.tune.sft.sft_config import SFTConfig

OTHER_DATA = (
    "data_path",
    "megatron_data_order",
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
)
"""Options of token streams, which are not read."""


def require_valid(parsed: Parsed, *, needs_files: bool = True) -> None:
    """Raise ConfigError with every problem of the options of a run of ``sft``. ``needs_files``: the
    run reads --train-data."""
    options = parsed.get(SFTConfig)
    missing = missing_data(options) if needs_files else ()
    refuse([*data_problems(parsed, "sft"), *value_problems(options), *missing])


def refuse(problems: list[str]) -> None:
    """Raise ConfigError with all problems, if there are any."""
    if problems:
        raise ConfigError(listing("These options cannot be used:", problems))


def data_problems(parsed: Parsed, command: str) -> Iterator[str]:
    """Yield options of data that ``command`` does not read, or not together."""
    for name in OTHER_DATA:
        if name in parsed.explicit:
            given = getattr(parsed.get(DataConfig), name)
            yield describe(
                flag(name),
                got=" ".join(given) if isinstance(given, tuple) else given,
                expected=f"nothing: {command} reads --train-data",
                do="leave it out; --packing keeps examples apart by itself",
            )
    yield from ignored_problems(parsed.get(SFTConfig))
    if parsed.get(SFTConfig).valid_data and "split" in parsed.explicit:
        yield describe(
            "--split, --valid-data",
            got="both",
            expected="one way to tell what evaluation reads",
            do="leave one out",
        )
    training = parsed.get(TrainingConfig)
    if parsed.get(SFTConfig).neftune_noise_alpha and training.counts_experts_first:
        yield describe(
            "--neftune-noise-alpha",
            got="a value, with --moe-router-load-balancing-type "
            f"{training.moe_router_load_balancing_type}",
            expected="seq_aux_loss: the pass that counts the tokens of experts has no noise",
            do="change one of the two",
        )
    if training.cuda_graph_scope != "none":
        yield describe(
            "--cuda-graph-scope block",
            got=command,
            expected="pretrain: examples have many lengths, and each launches other kernels",
            do="leave it out",
        )


def ignored_problems(options: SFTConfig) -> Iterator[str]:
    """Yield the keys of --ignore-keys whose absence would change an example."""
    for key in options.ignore_keys:
        if key in (*NO_LEARNING, *MESSAGE_PARTS):
            yield describe(
                "--ignore-keys",
                got=key,
                expected="fields that change nothing in what is to be learned",
                do="leave out the examples with images and sound"
                if key in NO_LEARNING
                else "leave it out: messages consist of it",
            )


def missing_data(options: SFTConfig) -> Iterator[str]:
    """Yield options that a run needs and a dry run does not."""
    if not options.train_data:
        yield describe(
            "--train-data",
            got="nothing",
            expected="files of examples",
            do="give --train-data FILE ...",
        )
