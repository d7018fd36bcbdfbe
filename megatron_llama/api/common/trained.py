"""A trained model for commands that run it in one process: its weights, its tokenizer, and the
tokens that end its texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron_llama.api.common.configs import ModelFolderConfig, SamplingConfig
from megatron_llama.config.schema import Config
from megatron_llama.errors import ConfigError, DataError, describe, listing
from megatron_llama.tokenizer.base import beyond_vocabulary

if TYPE_CHECKING:
    from megatron_llama.conversion.formats import ModelReader
    from megatron_llama.model.generate import Sampling
    from megatron_llama.model.llama import Stage
    from megatron_llama.tokenizer.base import Tokenizer

UNUSED_IN_GENERATION: Mapping[str, Any] = MappingProxyType(
    {
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "encoder_no_repeat_ngram_size": 0,
        "encoder_repetition_penalty": 1.0,
        "bad_words_ids": [],
        "suppress_tokens": [],
        "begin_suppress_tokens": [],
        "forced_bos_token_id": None,
        "forced_eos_token_id": None,
        "sequence_bias": None,
        "exponential_decay_length_penalty": None,
        "min_length": 0,
        "min_new_tokens": 0,
        "num_beams": 1,
        "penalty_alpha": 0.0,
        "guidance_scale": 1.0,
        "min_p": 0.0,
        "typical_p": 1.0,
        "epsilon_cutoff": 0.0,
        "eta_cutoff": 0.0,
        "stop_strings": [],
    }
)
"""Fields of generation_config.json that change what transformers writes, and for which no command
here has an option that the user would set instead (only ``generate`` has --stop); with the values
that change nothing."""


@dataclass(frozen=True)
class Trained:
    """A model with its weights, ready to generate."""

    stage: Stage
    tokenizer: Tokenizer
    stops: frozenset[int]
    """Tokens that end a text: those of generation_config.json and config.json, else the tokenizer's
    end token."""

    def beyond(self, where: str, ids: Sequence[int]) -> str | None:
        """Say which of the tokens the model has no row for, if there is one."""
        do = "leave it out, or train with --resize-embeddings, which gives the model a row for it"
        return beyond_vocabulary(where, ids, self.stage.config.vocab_size, self.tokenizer, do=do)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence."""
        return self.stage.config.max_position_embeddings


def open_trained(options: ModelFolderConfig) -> Trained:
    """Read the model folder that the options name. Raises ConfigError, CheckpointError or
    DataError."""
    import torch

    from megatron_llama.checkpoint.storage_paths import local_copy
    from megatron_llama.distributed import device as devices
    from megatron_llama.distributed.mesh import Mesh
    from megatron_llama.model.llama import build_stages
    from megatron_llama.model.load import load_stages, rank_specs
    from megatron_llama.tokenizer.fingerprint import require_same_ids
    from megatron_llama.tokenizer.load import has_tokenizer, load_tokenizer

    source = open_folder(
        options.load,
        options.init_from_hf,
        config=options.hf_config,
        vocab_size=options.vocab_size,
        ignored=options.ignore_hf_config_fields,
    )
    for note in generation_notes(source):
        print(f"note: {note}", file=sys.stderr, flush=True)
    with local_copy(tokenizer_folder(source)) as folder:
        tokenizer = load_tokenizer(options.tokenizer_model or folder)
        if options.tokenizer_model is not None and has_tokenizer(folder):
            require_same_ids(
                tokenizer,
                load_tokenizer(folder),
                where=f"--tokenizer-model {options.tokenizer_model}",
                owner=folder,
                do="leave it out, or give a tokenizer that only adds tokens behind",
            )
    rows = source.model.vocab_size
    if tokenizer.base_vocab_size > rows:
        raise DataError(
            options.tokenizer_model or tokenizer_folder(source),
            got=f"a tokenizer of {tokenizer.vocab_size} tokens",
            expected=f"that of the model, whose vocab_size is {rows}",
            do="give this model's tokenizer (--tokenizer-model)",
        )
    config = Config(model=source.model)
    mesh = Mesh.single(devices.accelerator(0))
    [stage] = build_stages(config, mesh).values()
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    load_stages([stage], rank_specs(config, mesh), source, dtype=dtype, device=mesh.device)
    own = frozenset() if tokenizer.eos_id is None else frozenset({tokenizer.eos_id})
    stops = frozenset(_end_tokens(source)) or own
    return Trained(stage, tokenizer, stops)


def tokenizer_folder(source: ModelReader) -> Path:
    """The folder of the model's tokenizer, if it has one."""
    return source.tokenizer_files[0].parent if source.tokenizer_files else source.folder


def open_folder(
    load: str | None,
    init_from_hf: str | None,
    *,
    config: str | None = None,
    vocab_size: int = 0,
    tokens: int = 0,
    ignored: Collection[str] = (),
) -> ModelReader:
    """Open the model folder that exactly one of the first two options names; the others are those
    of ``open_model``. Raises ConfigError or CheckpointError."""
    from megatron_llama.checkpoint.storage_paths import is_remote, storage_path
    from megatron_llama.conversion.formats import open_model
    from megatron_llama.conversion.native.reader import NativeReader

    if (load is None) == (init_from_hf is None):
        found = "neither" if load is None else "both"
        do = "give --load FOLDER or --init-from-hf FOLDER"
        raise ConfigError(
            describe("--load, --init-from-hf", got=found, expected="one of them", do=do)
        )
    folder = storage_path(load or init_from_hf or "")
    if is_remote(folder):
        return NativeReader(folder, config, vocab_size)
    return open_model(folder, config=config, vocab_size=vocab_size, tokens=tokens, ignored=ignored)


def generation_notes(source: ModelReader) -> Iterator[str]:
    """Yield a line for each field of the model's generation_config.json with which transformers
    would write another text than this program does from the same options."""
    for path in source.tokenizer_files:
        if path.name == "generation_config.json":
            content = json.loads(path.read_text())
            for name, neutral in UNUSED_IN_GENERATION.items():
                if content.get(name) not in (None, neutral):
                    yield f"{path} {name} {content[name]}: not applied here"


def _end_tokens(source: ModelReader) -> Iterator[int]:
    """Yield the end tokens that the model's own files name. They come before the tokenizer's: a
    chat model ends its messages with another token than its documents."""
    found: list[Any] = [source.model.eos_token_id, source.extra.get("eos_token_id")]
    for path in source.tokenizer_files:
        if path.name == "generation_config.json":
            found.append(json.loads(path.read_text()).get("eos_token_id"))
    for entry in found:
        for token in entry if isinstance(entry, list) else [entry]:
            if isinstance(token, int):
                yield token


def sampling_of(options: SamplingConfig) -> Sampling:
    """Check the options of sampling. Raises ConfigError with all that is wrong."""
    from megatron_llama.model.generate import Sampling

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
