"""``sft``: instruction tuning. The training loop is that of ``pretrain``; the samples are examples,
and the loss counts their answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from megatron_llama.api.common.startup import Ready
from megatron_llama.commands.common.configs import DryRunConfig
from megatron_llama.commands.pretrain import SECTIONS as PRETRAIN
from megatron_llama.commands.pretrain import run
from megatron_llama.config.parse import Parsed, flag
from megatron_llama.config.schema import Config, DataConfig
from megatron_llama.errors import ConfigError, DataError, describe, listing
from megatron_llama.sft.sft_config import SFTConfig

if TYPE_CHECKING:
    from megatron_llama.distributed.mesh import Axis
    from megatron_llama.loop.inputs import Inputs
    from megatron_llama.loop.vocabulary import Vocabulary
    from megatron_llama.sft.chat import ChatTokenizer

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
    # A dry run plans without examples, too; a strict one is as strict as the run.
    planned = parsed.get(DryRunConfig).dry_run == "yes"
    refuse([*_problems(parsed, options), *([] if planned else _missing(options))])
    return run(parsed, open_example_inputs, needs_data=False)


def open_example_inputs(parsed: Parsed, ready: Ready, world: Axis) -> Inputs:
    """Open what training on --train-data reads. Collective. Raises UserError."""
    from megatron_llama.distributed.comm.object_collectives import raise_on_all_ranks
    from megatron_llama.loop.inputs import open_inputs
    from megatron_llama.sft.run import ExampleData

    options = parsed.get(SFTConfig)
    config = ready.config
    tokenizer, rendered = _chat_tokenizer(ready.vocabulary, options, config, world)
    with raise_on_all_ranks(world):
        warnings = tokenizer.require_end()
    data = ExampleData(options, config, world, tokenizer, rendered)
    with raise_on_all_ranks(world):
        lines = (
            f"chat template: {tokenizer.template.name}; in the loss: "
            f"{loss_parts(tokenizer.template.marks_answers, options)}",
            *warnings,
            *data.report(config),
        )
        if options.valid_data and config.training.eval_interval == 0:
            lines += ("warning: --valid-data without --eval-interval: it is never evaluated",)
    inputs = open_inputs(
        config,
        world,
        data.samples,
        tokenizer=tokenizer,
        prompt=tokenizer.prompt,
        same_data=options.on_changed_data == "stop",
    )
    return replace(inputs, lines=(*lines, *inputs.lines))


def _chat_tokenizer(
    vocabulary: Vocabulary, options: SFTConfig, config: Config, world: Axis
) -> tuple[ChatTokenizer, str | None]:
    """Return the tokenizer, and the day that its template writes into the texts, if it does.

    The day is the same on all ranks, and in a resumed run that on which the run began. Collective.
    Raises DataError and CheckpointError."""
    from megatron_llama.distributed.comm.object_collectives import on_rank0, raise_on_all_ranks
    from megatron_llama.loop.start import resumed
    from megatron_llama.sft.chat import ChatTokenizer
    from megatron_llama.sft.dataset import RENDERED

    def day() -> str:
        meta = resumed(config.checkpoint)
        known = (meta.state.data or {}).get(RENDERED) if meta is not None else None
        return str(known or datetime.now().date().isoformat())

    now = on_rank0(day, world)
    with raise_on_all_ranks(world):
        if vocabulary.tokenizer is None:
            do = "give --tokenizer-model FOLDER"
            raise DataError(
                describe(
                    "--tokenizer-model", got="nothing", expected="the tokenizer of the model", do=do
                )
            )
        tokenizer = ChatTokenizer(
            vocabulary.tokenizer, options.chat_template, now=datetime.fromisoformat(now)
        )
    return tokenizer, now if tokenizer.template.tells_time else None


def loss_parts(marks: bool, options: SFTConfig) -> str:
    """Say in words what the loss counts and how it is known."""
    if options.loss_on == "all":
        return "every token (--loss-on all)"
    which = "answers" if options.loss_on == "assistant" else "the last answer"
    return (
        f"{which}, which "
        f"{'the template marks' if marks else 'are what each adds to the text before it'}"
    )


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
