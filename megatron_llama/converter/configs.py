"""Options of the commands that convert and compare models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Format: TypeAlias = Literal["hf", "native", "megatron", "megatron-llama", "meta", "torch_dist"]
"""The formats of model folders."""


@dataclass(frozen=True)
class MergeConfig:
    """Add low-rank additions to the weights of their model, and write those as a HuggingFace
    folder, in one process without a GPU."""

    src: str
    """Model folder of any format, or checkpoint of a run with --lora-rank. May stand first, without
    its name: `merge SRC DST`."""
    dst: str
    """Folder to write; it appears whole or not at all."""
    adapter: str | None = None
    """Folder with the additions as HuggingFace's PEFT has them. Default: those of the checkpoint
    itself."""
    ignore_hf_config_fields: tuple[str, ...] = ()
    """Names of fields in a HuggingFace config.json that do not change what the model computes.
    Fields that are not known here are refused otherwise."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the written weights. auto: the model's."""
    max_shard_bytes: int = 5_000_000_000
    """Largest weight file, unless a single tensor is larger."""
    workers: int = 2
    """Files that are written at the same time."""
    overwrite: bool = False
    """Replace an earlier conversion in the target folder. Anything else there is refused all the
    same."""


@dataclass(frozen=True)
class ConvertConfig:
    """Write a model folder of any format in any other, in one process without a GPU: weights,
    configuration, tokenizer."""

    src: str
    """Folder to read. May stand first, without its name: `convert SRC DST --to FORMAT`."""
    dst: str
    """Folder to write; it appears whole or not at all."""
    to: Format
    """Format to write."""
    source_format: Format | None = None
    """Format of the source (also `--from`). Default: found from its content."""
    hf_config: str | None = None
    """A config.json of HuggingFace, for what the source does not say of its model."""
    ignore_hf_config_fields: tuple[str, ...] = ()
    """Names of fields in a HuggingFace config.json, and of Megatron-LM's arguments of experts
    (torch_dist), that do not change what the model computes. Those that are not known here are
    refused otherwise."""
    vocab_size: int = 0
    """Number of token ids, for a source that stores only a padded vocabulary. 0: what the source or
    its tokenizer says."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the written weights (native: what a run computes in; its masters are fp32). auto:
    the source's."""
    tensor_model_parallel_size: int = 1
    """Tensor-parallel size to write (megatron formats), for which the vocabulary is padded
    (torch_dist), or number of consolidated files (meta)."""
    pipeline_model_parallel_size: int = 1
    """Pipeline stages to write (megatron formats)."""
    pipeline_layer_split: tuple[int, ...] = ()
    """Transformer blocks of each stage, first to last. Default: equal shares."""
    expert_model_parallel_size: int = 1
    """Expert-parallel size of the Megatron-LM run that goes on with a written optimizer
    (torch_dist): above 1, experts have an optimizer of their own there."""
    make_vocab_size_divisible_by: int = 128
    """The written embedding is padded to a multiple of this times the tensor-parallel size
    (megatron formats, torch_dist)."""
    megatron_layout: Literal["transformer_engine", "local", "legacy"] = "transformer_engine"
    """Names to write for Megatron-LM: those of its --transformer-impl, or of the models before
    Megatron Core (legacy)."""
    max_shard_bytes: int = 5_000_000_000
    """Largest weight file (hf), unless a single tensor is larger."""
    workers: int = 2
    """Files that are written at the same time."""
    overwrite: bool = False
    """Replace an earlier conversion in the target folder. Anything else there is refused all the
    same."""


@dataclass(frozen=True)
class VerifyConfig:
    """Compare two models: weights bit for bit, configurations field by field, logits within
    rounding. Exit status 1: they differ."""

    a: str
    """Model folder of any format. May stand first, without its name: `verify A B`."""
    b: str
    """The other one."""
    from_a: Format | None = None
    """Format of the first folder. Default: found from its content."""
    from_b: Format | None = None
    """Format of the second folder."""
    hf_config_a: str | None = None
    """A config.json of HuggingFace, for what the first folder does not say of its model."""
    hf_config_b: str | None = None
    """The same for the second folder."""
    ignore_hf_config_fields: tuple[str, ...] = ()
    """Names of fields in a HuggingFace config.json that do not change what the model computes.
    Fields that are not known here are refused otherwise."""
    vocab_size: int = 0
    """Number of token ids, for a format that stores only a padded vocabulary. 0: what the folders
    say."""
    prompt_tokens: int = 0
    """Length of the text whose logits are compared. 0: 64 tokens more than
    original_max_position_embeddings and than the window, 128 without a rotary scaling and a window.
    Fewer are faster, and may miss a wrong scaling or window."""
