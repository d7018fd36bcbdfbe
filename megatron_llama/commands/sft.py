"""``sft``: instruction tuning. The training loop is that of ``pretrain``; the samples are examples,
and the loss counts their answers."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.commands.common.configs import DryRunConfig
from megatron_llama.commands.pretrain import SECTIONS as PRETRAIN
from megatron_llama.commands.pretrain import run
from megatron_llama.config.parse import Parsed
from megatron_llama.errors import describe
from megatron_llama.sft.option_problems import data_problems, missing_data, refuse
from megatron_llama.sft.sft_config import SFTConfig

SECTIONS = (SFTConfig, *PRETRAIN)


def sft(parsed: Parsed) -> int:
    """Train a model on examples. Returns the exit status."""
    options = parsed.get(SFTConfig)
    # Here, because --help and a wrong option need nothing of what reads examples.
    from megatron_llama.api.common.examples import open_example_inputs

    # A dry run plans without examples, too; a strict one is as strict as the run.
    planned = parsed.get(DryRunConfig).dry_run == "yes"
    refuse([*_problems(parsed, options), *([] if planned else missing_data(options))])
    return run(parsed, open_example_inputs, needs_data=False)


def _problems(parsed: Parsed, options: SFTConfig) -> Iterator[str]:
    yield from data_problems(parsed, "sft")
    if options.neftune_noise_alpha < 0:
        yield describe(
            "--neftune-noise-alpha",
            got=options.neftune_noise_alpha,
            expected="0 or more",
            do="5 is usual, 0 is none",
        )
