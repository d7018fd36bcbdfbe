"""``sft``: instruction tuning. The training loop is that of ``pretrain``; the samples are examples,
and the loss counts their answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_llama.config.parse import Parsed
from megatron_llama.train.commands.common.configs import DryRunConfig
from megatron_llama.train.commands.pretrain import SECTIONS as PRETRAIN
from megatron_llama.train.commands.pretrain import run
from megatron_llama.tune.sft.option_problems import require_valid
from megatron_llama.tune.sft.sft_config import SFTConfig

if TYPE_CHECKING:
    from megatron_llama.train.commands.common.dry_run import ExampleFiles

SECTIONS = (SFTConfig, *PRETRAIN)


def sft(parsed: Parsed) -> int:
    """Train a model on examples. Returns the exit status."""
    # Imported here, because --help and a wrong option need no reader of examples.
    from megatron_llama.tune.sft.inputs import EXAMPLES

    # A dry run also plans without examples; a strict one is as strict as the run.
    planned = parsed.get(DryRunConfig).dry_run == "yes"
    require_valid(parsed, needs_files=not planned)
    return run(parsed, EXAMPLES, examples=example_files)


def example_files(parsed: Parsed) -> ExampleFiles:
    """Return the files that the options of ``sft`` and ``align`` name."""
    from megatron_llama.train.commands.common.dry_run import ExampleFiles
    from megatron_llama.tune.sft.built_in_templates import BUILT_IN

    options = parsed.get(SFTConfig)
    paths = [("train_data", path) for path in options.train_data]
    paths += [("valid_data", path) for path in options.valid_data]
    if options.chat_template is not None and options.chat_template not in BUILT_IN:
        paths.append(("chat_template", options.chat_template))
    return ExampleFiles("train_data", tuple(paths))
