"""``sft``: instruction tuning. The training loop is that of ``pretrain``; the samples are examples,
and the loss counts their answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_llama.commands.common.configs import DryRunConfig
from megatron_llama.commands.pretrain import SECTIONS as PRETRAIN
from megatron_llama.commands.pretrain import run
from megatron_llama.config.parse import Parsed, flag
from megatron_llama.config.schema import DataConfig
from megatron_llama.errors import ConfigError, describe, listing
from megatron_llama.sft.sft_config import SFTConfig

if TYPE_CHECKING:
    pass

SECTIONS = (SFTConfig, *PRETRAIN)
OTHER_DATA = (
    "data_path",
    "megatron_data_order",
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
)
"""Options of token streams, which sft does not read."""


def sft(parsed: Parsed) -> int:
    """Train a model on examples. Returns the exit status."""
    options = parsed.get(SFTConfig)
    # Here, because --help and a wrong option need nothing of what reads examples.
    from megatron_llama.api.common.examples import open_example_inputs

    # A dry run plans without examples, too; a strict one is as strict as the run.
    planned = parsed.get(DryRunConfig).dry_run == "yes"
    refuse([*_problems(parsed, options), *([] if planned else _missing(options))])
    return run(parsed, open_example_inputs, needs_data=False)


def refuse(problems: list[str]) -> None:
    """Raise ConfigError with all problems, if there are any."""
    if problems:
        raise ConfigError(listing("These options cannot be used:", problems))


def _problems(parsed: Parsed, options: SFTConfig) -> Iterator[str]:
    for name in OTHER_DATA:
        if name in parsed.explicit:
            expected = "nothing: sft reads --train-data"
            do = "leave it out; --packing keeps examples apart by itself"
            given = getattr(parsed.get(DataConfig), name)
            yield describe(
                flag(name),
                got=" ".join(given) if isinstance(given, tuple) else given,
                expected=expected,
                do=do,
            )
    if options.valid_data and "split" in parsed.explicit:
        yield describe(
            "--split, --valid-data",
            got="both",
            expected="one way to tell what evaluation reads",
            do="leave one out",
        )
    if options.neftune_noise_alpha < 0:
        yield describe(
            "--neftune-noise-alpha",
            got=options.neftune_noise_alpha,
            expected="0 or more",
            do="5 is usual, 0 is none",
        )


def _missing(options: SFTConfig) -> Iterator[str]:
    if not options.train_data:
        yield describe(
            "--train-data",
            got="nothing",
            expected="files of examples",
            do="give --train-data FILE ...",
        )
