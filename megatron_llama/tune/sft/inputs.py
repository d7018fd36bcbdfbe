"""What ``sft`` reads: examples, with the tokenizer and the template that make tokens of them."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from megatron_llama.engine.comm.object_collectives import broadcast_object, raise_on_all_ranks
from megatron_llama.errors import DataError, describe
from megatron_llama.train.setup.checks.model import require_language_model
from megatron_llama.train.setup.draft import By, Draft, Need, decides
from megatron_llama.train.setup.inputs import Reading
from megatron_llama.train.setup.start import resumed
from megatron_llama.tune.sft.chat import ChatTokenizer
from megatron_llama.tune.sft.dataset import RENDERED
from megatron_llama.tune.sft.run import ExampleData
from megatron_llama.tune.sft.sft_config import SFTConfig


@decides("reading", "notes", needs=Need.FILES, by=By.ALL_TOGETHER)
def read_examples(draft: Draft) -> Draft:
    """Read --train-data. Collective. Raises UserError."""
    options = draft.parsed.get(SFTConfig)
    config = draft.config
    world = draft.processes.world
    require_language_model(config.model, "training on --train-data")
    tokenizer, rendered = chat_tokenizer(draft, options)
    with raise_on_all_ranks(world):
        warnings = tokenizer.require_end()
    data = ExampleData(options, config, world, tokenizer, rendered)
    with raise_on_all_ranks(world):
        notes = (
            f"chat template: {tokenizer.template.name}; in the loss: "
            f"{loss_parts(tokenizer.template.marks_answers, options)}",
            *warnings,
            *data.report(config),
        )
        if options.valid_data and config.training.eval_interval == 0:
            notes += ("warning: --valid-data without --eval-interval: it is never evaluated",)
    reading = Reading(
        data.samples, tokenizer, tokenizer.prompt, same_data=options.on_changed_data == "stop"
    )
    return replace(draft, reading=reading, notes=(*draft.notes, *notes))


EXAMPLES = (read_examples,)
"""What ``sft`` reads."""


def chat_tokenizer(draft: Draft, options: SFTConfig) -> tuple[ChatTokenizer, str | None]:
    """Return the tokenizer, and the day that its template writes into the texts, if it does.

    The day is the same on all ranks, and in a resumed run that on which the run began. Collective.
    Raises DataError."""
    meta = resumed(draft.config.checkpoint, draft.start)
    known = (meta.state.data or {}).get(RENDERED) if meta is not None else None
    world = draft.processes.world
    vocabulary = draft.vocabulary
    # Midnight does not come to all ranks at once.
    now = str(known or broadcast_object(datetime.now().date().isoformat(), world))
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
