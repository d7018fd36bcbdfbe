"""The inputs of ``sft``: examples, and the tokenizer and the template that encode them."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import NamedTuple

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
    tokenizer, rendered, warnings = chat_tokenizer(draft, options)
    data = ExampleData(options, config, world, tokenizer, rendered)
    with raise_on_all_ranks(world):
        notes = (
            f"chat template: {tokenizer.template.name}; in the loss: "
            f"{loss_parts(tokenizer.template.marks_answers, options)}",
            *warnings,
            *data.report(config),
        )
    reading = Reading(
        data.samples, tokenizer, tokenizer.prompt, same_data=options.on_changed_data == "stop"
    )
    return replace(draft, reading=reading, notes=(*draft.notes, *notes))


EXAMPLES = (read_examples,)
"""The deciders of the inputs of ``sft``."""


class Chat(NamedTuple):
    """The encoder of conversations in a run."""

    tokenizer: ChatTokenizer
    rendered: str | None
    """The day in the texts, if the template writes it."""
    warnings: tuple[str, ...]


def chat_tokenizer(draft: Draft, options: SFTConfig) -> Chat:
    """Return the tokenizer with its template. The day is the same on all ranks; in a resumed run it
    is that of the first start. Collective. Raises DataError for a tokenizer that is missing, or
    cannot end an answer."""
    meta = resumed(draft.config.checkpoint, draft.start)
    known = (meta.state.data or {}).get(RENDERED) if meta is not None else None
    world = draft.processes.world
    vocabulary = draft.vocabulary
    # Ranks may see midnight at different moments.
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
        warnings = tokenizer.require_end()
    return Chat(tokenizer, now if tokenizer.template.tells_time else None, warnings)


def loss_parts(marks: bool, options: SFTConfig) -> str:
    """Return words on the parts in the loss, and on how they are found."""
    if options.loss_on == "all":
        return "every token (--loss-on all)"
    which = "answers" if options.loss_on == "assistant" else "the last answer"
    return (
        f"{which}, which "
        f"{'the template marks' if marks else 'are what each adds to the text before it'}"
    )
