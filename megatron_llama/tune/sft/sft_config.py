"""Options of ``sft`` and of the ``data`` commands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megatron_llama.config.schema import OWN_TEXT
from megatron_llama.option import KEPT, NOT_NEGATIVE, option, scaled, section
from megatron_llama.tune.sft.repair import Repair

Format = Literal["auto", "messages", "sharegpt", "alpaca", "prompt", "text"]


@section()
@dataclass(frozen=True)
class SFTConfig:
    """Conversations, what of them is in the loss, and how they fill samples."""

    train_data: tuple[str, ...] = option((), small=OWN_TEXT)
    """Files or folders of examples: `.jsonl`, `.json` (an array of objects), `.parquet`, `.arrow`,
    `.feather`. A folder may be one that `save_to_disk` of `datasets` wrote."""
    valid_data: tuple[str, ...] = option(
        (), small=scaled("a file of its own, as yours"), draws=(("valid.jsonl",),)
    )
    """Files for evaluation. Default: a share of --train-data, as --split says."""
    data_format: Format = option(
        "auto", small=KEPT, draws=("messages", "sharegpt", "alpaca", "prompt", "text")
    )
    """Format of the examples: `messages` (OpenAI), `sharegpt` (`conversations` of `from` and
    `value`), `alpaca` (`instruction`, `input`, `output`), `prompt` (`prompt` and `completion`),
    `text`. `auto`: that of the first example of each file."""
    chat_template: str | None = option(
        None,
        small=scaled("the tokenizer here has a template of its own"),
        draws=("plain", "chatml", "llama2", "llama3"),
    )
    """Jinja file, or one of the built-in `plain`, `chatml`, `llama2`, `llama3`, `qwen2.5`, `qwen3`,
    `phi3`, `gemma`, `gemma3`, `mistral`. Default: the tokenizer's own (for a conversation with
    tools the one named `tool_use`, if there is one), else `plain`."""
    loss_on: Literal["assistant", "last", "all"] = option(
        "assistant", small=KEPT, draws=("last", "all")
    )
    """Tokens in the loss: all answers, the last answer of each conversation, or everything. A
    `text` example is all answer."""
    repair_conversations: tuple[Repair, ...] = option((), small=KEPT)
    """Mend conversations in these ways, and say how many: leave out what the assistant says before
    the first question; join messages of one role that follow each other, by an empty line; leave
    out what follows the last answer."""
    ignore_keys: tuple[str, ...] = option((), small=OWN_TEXT)
    """Names of fields of examples and messages that are not read. A field that is not known here
    is refused otherwise, unless it only tells about the example, as `id` or `source` do."""
    on_bad_sample: Literal["stop", "drop"] = option("stop", small=KEPT, draws=("drop",))
    """When an example cannot be used: stop before training with a list, or leave it out and say how
    many."""
    on_long_sample: Literal["truncate", "drop", "stop"] = option(
        "truncate", small=KEPT, draws=("drop",)
    )
    """When an example has more than seq_length + 1 tokens: cut its end, and leave it out only if no
    answer is left then; leave it out in any case; or count it as one that cannot be used."""
    on_changed_data: Literal["stop", "continue"] = option("stop", small=OWN_TEXT)
    """When a run is resumed and its training samples are not those that its checkpoint was trained
    on: stop before training and say what differs, or warn and go on at the same place in the new
    ones."""
    packing: bool = option(False, small=KEPT, draws=(True, True, True))
    """Put several examples into each sample, by best fit. Attention and positions stay within an
    example."""
    neftune_noise_alpha: float = option(
        0.0, check=replace(NOT_NEGATIVE, do="5 is usual, 0 is none"), small=KEPT, draws=(5.0,)
    )
    """NEFTune: add uniform noise of up to alpha / sqrt(length x hidden_size) to the embeddings of
    training samples. 0: none."""


@dataclass(frozen=True)
class DataToolConfig:
    """The inspection of the files of --train-data, and the model for which they are read."""

    action: Literal["preview", "check", "stats"] = "check"
    """`preview`: an example as text and as tokens, those in the loss marked. `check`: every
    problem, with file, line and field, counts and lengths; the exit status is 1 if a run would
    stop. `stats`: histograms in a page."""
    tokenizer_model: str | None = None
    """Tokenizer file or folder."""
    seq_length: int = 2048
    """Tokens per sample, as in the run: longer examples are cut or left out."""
    example: int = 1
    """Which example to preview, from 1, over all files."""
    output: str = "stats.html"
    """The page that `stats` writes."""
    color: Literal["auto", "always", "never"] = "auto"
    """Mark tokens in the loss by color, otherwise by brackets. `auto`: color on a terminal."""
