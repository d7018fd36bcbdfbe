"""``align``: preference tuning. The training loop is that of ``pretrain``; the samples are judged
answers, and the loss compares them."""

from __future__ import annotations

from megatron_llama.config.parse import Parsed
from megatron_llama.train.commands.common.configs import DryRunConfig
from megatron_llama.train.commands.pretrain import SECTIONS as PRETRAIN
from megatron_llama.train.commands.pretrain import plan_only, status_of_run
from megatron_llama.tune.commands.sft import example_files
from megatron_llama.tune.preference.align_config import AlignConfig
from megatron_llama.tune.preference.option_problems import valid_options
from megatron_llama.tune.sft.sft_config import SFTConfig

SECTIONS = (AlignConfig, SFTConfig, *PRETRAIN)


def align(parsed: Parsed) -> int:
    """Tune a model on preferences. Returns the exit status."""
    planned = parsed.get(DryRunConfig).dry_run
    # A dry run also plans without examples; a strict one is as strict as the run.
    parsed = valid_options(parsed, needs_files=planned != "yes")
    # Imported here, because --help and a wrong option need no reader of examples.
    if planned != "no":
        from megatron_llama.tune.preference.inputs import PairInputs

        pairs = PairInputs(hashes_weights=planned == "strict")
        return plan_only(parsed, pairs.deciders, pairs.checks, examples=example_files)
    from megatron_llama.tune.api.align import run_alignment

    return status_of_run(parsed, lambda parsed, place: run_alignment(parsed, place=place))
