"""Options of functions that are no part of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_llama.option import left_out, section


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
class SamplingConfig:
    """How new tokens are drawn."""

    max_new_tokens: int = 64
    """Tokens to add to each prompt; the end token ends it earlier."""
    temperature: float = 0.8
    """Divides the logits before sampling. 0: always the most probable token."""
    top_k: int = 0
    """Sample among the k most probable tokens. 0: no limit."""
    top_p: float = 0.95
    """Sample among the most probable tokens that together have this probability."""
    seed: int = 1234
    """Same seed, same text."""
