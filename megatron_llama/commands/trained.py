"""A trained model for a command that runs it in one process: its weights, its tokenizer, and the tokens that end its texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_llama.commands.options import ModelFolderConfig, SamplingConfig
from megatron_llama.config import Config
from megatron_llama.errors import ConfigError, describe, listing

if TYPE_CHECKING:
    from megatron_llama.checkpoint.formats import Source
    from megatron_llama.generation import Sampling
    from megatron_llama.model.llama import Stage
    from megatron_llama.tokenizer.base import Tokenizer


@dataclass(frozen=True)
class Trained:
    """What ``open_trained`` finds."""

    stage: Stage
    tokenizer: Tokenizer
    stops: frozenset[int]
    """Tokens that end a text: those of generation_config.json and config.json, else the tokenizer's end token."""
    companions: tuple[Path, ...]
    """Files beside the tokenizer: a chat template among them."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.stage.config.max_position_embeddings


def open_trained(options: ModelFolderConfig) -> Trained:
    """Raises ConfigError, CheckpointError or DataError."""
    import torch

    from megatron_llama import device as devices
    from megatron_llama.checkpoint.places import local_copy
    from megatron_llama.mesh import Mesh
    from megatron_llama.model.llama import build_stages
    from megatron_llama.model.load import load_stages, rank_specs
    from megatron_llama.tokenizer.load import load_tokenizer

    source = _source(options)
    companions = tuple(source.companions)
    with local_copy(companions[0].parent if companions else source.folder) as folder:
        tokenizer = load_tokenizer(options.tokenizer_model or folder)
    config, mesh = Config(model=source.model), Mesh.single(devices.accelerator(0))
    [stage] = build_stages(config, mesh).values()
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    load_stages([stage], rank_specs(config, mesh), source, dtype=dtype, device=mesh.device)
    own = frozenset() if tokenizer.eos_id is None else frozenset({tokenizer.eos_id})
    stops = frozenset(_end_tokens(source)) or own
    return Trained(stage, tokenizer, stops, companions)


def _source(options: ModelFolderConfig) -> Source:
    from megatron_llama.checkpoint.formats import open_source
    from megatron_llama.checkpoint.native_source import NativeSource
    from megatron_llama.checkpoint.places import is_remote, place

    if (options.load is None) == (options.init_from_hf is None):
        found = "neither" if options.load is None else "both"
        do = "give --load FOLDER or --init-from-hf FOLDER"
        raise ConfigError(describe("--load, --init-from-hf", got=found, expected="one of them", do=do))
    folder = place(options.load or options.init_from_hf or "")
    if is_remote(folder):
        return NativeSource(folder, options.hf_config, options.vocab_size)
    return open_source(folder, config=options.hf_config, vocab_size=options.vocab_size)


def _end_tokens(source: Source) -> Iterator[int]:
    """The model's word: a chat model ends its messages with other tokens than its documents."""
    found: list[Any] = [source.model.eos_token_id, source.extra.get("eos_token_id")]
    for path in source.companions:
        if path.name == "generation_config.json":
            found.append(json.loads(path.read_text()).get("eos_token_id"))
    for entry in found:
        for token in entry if isinstance(entry, list) else [entry]:
            if isinstance(token, int):
                yield token


def sampling_of(options: SamplingConfig) -> Sampling:
    """Raises ConfigError with all that is wrong."""
    from megatron_llama.generation import Sampling

    wrong = [
        describe(flag, got=value, expected=expected, do="correct it")
        for flag, value, expected, fits in (
            ("--max-new-tokens", options.max_new_tokens, "1 or more", options.max_new_tokens >= 1),
            ("--temperature", options.temperature, "0 or more", options.temperature >= 0),
            ("--top-k", options.top_k, "0 or more", options.top_k >= 0),
            ("--top-p", options.top_p, "more than 0, at most 1", 0 < options.top_p <= 1),
            ("--seed", options.seed, "0 or more", options.seed >= 0),
        )
        if not fits
    ]
    if wrong:
        raise ConfigError(listing("These options cannot be used:", wrong))
    return Sampling(options.max_new_tokens, options.temperature, options.top_k, options.top_p)
