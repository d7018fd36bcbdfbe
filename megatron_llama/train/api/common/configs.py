"""Options of functions that are no part of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_llama.option import NOT_NEGATIVE, Check, left_out, option, section

_ONE_OR_MORE = Check(lambda value: value >= 1, "1 or more", "correct it")
_NOT_NEGATIVE = replace(NOT_NEGATIVE, do="correct it")


@section(changes="messages", small=left_out("a layout is given"))
@dataclass(frozen=True)
class ModelFolderConfig:
    """The trained model to use, in one process."""

    load: str | None = None
    """Model folder of any format: checkpoints of a run (any layout; the newest complete one is
    read), HuggingFace, Megatron, Meta."""
    init_from_hf: str | None = None
    """HuggingFace folder, the same as --load FOLDER; or a model's name on the hub, `org/name` or
    `org/name@revision` (needs `pip install '.[hub]'`)."""
    tokenizer_model: str | None = None
    """Tokenizer file or folder. Default: the one saved with the checkpoint or lying in the model
    folder."""
    hf_config: str | None = None
    """A config.json of HuggingFace, for what a Megatron or Meta folder does not say of its
    model."""
    ignore_hf_config_fields: tuple[str, ...] = ()
    """Names of fields in a HuggingFace config.json that do not change what the model computes.
    Fields that are not known here are refused otherwise."""
    vocab_size: int = 0
    """Number of token ids, for a folder that stores only a padded vocabulary. 0: what the folder or
    its tokenizer says."""
    bf16: bool = False
    """Compute in bfloat16."""


@dataclass(frozen=True)
class GenerateConfig:
    """Continue prompts with a trained model."""

    prompt: tuple[str, ...] = ("",)
    """One or more texts to continue."""
    prompt_file: str | None = None
    """File with a text to continue on each line, instead of --prompt."""
    batch_size: int = option(8, check=_ONE_OR_MORE)
    """Prompts that are continued side by side. More are faster and take more memory; texts stay the
    same."""
    stop: tuple[str, ...] = option(
        (), check=Check(lambda value: "" not in value, "some text", "leave it out")
    )
    """Texts that end a continuation, as the end token does. They are not part of it."""
    json: bool = False
    """Print a JSON object on a line for each prompt, when its text is done: prompt, text (the
    continuation alone), token_ids (its tokens; with --stop, those of the stop text too),
    finish_reason (stop: by an end token or --stop; length: by --max-new-tokens or the model's
    longest sequence)."""


@dataclass(frozen=True)
class SamplingConfig:
    """How new tokens are drawn."""

    max_new_tokens: int = option(64, check=_ONE_OR_MORE)
    """Tokens to add to each prompt; the end token ends it earlier."""
    temperature: float = option(0.8, check=_NOT_NEGATIVE)
    """Divides the logits before sampling. 0: always the most probable token."""
    top_k: int = option(0, check=_NOT_NEGATIVE)
    """Sample among the k most probable tokens. 0: no limit."""
    top_p: float = option(
        0.95, check=Check(lambda value: 0 < value <= 1, "more than 0, at most 1", "correct it")
    )
    """Sample among the most probable tokens that together have this probability."""
    seed: int = option(1234, check=_NOT_NEGATIVE)
    """Same seed, same text."""
