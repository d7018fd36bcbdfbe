"""A trained model in one process: its weights, its tokenizer, and the tokens that end its texts."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megatron_llama.checkpoint.carried import GENERATION, end_tokens
from megatron_llama.checkpoint.listed_files import ListedFilesCheck
from megatron_llama.checkpoint.model_folders.formats import ModelReader, open_model
from megatron_llama.checkpoint.model_folders.model_fields import OPTIMIZER_LEFT_OUT
from megatron_llama.checkpoint.model_folders.native.reader import NativeReader
from megatron_llama.checkpoint.model_folders.tokenizer_files import unknown_tokens
from megatron_llama.checkpoint.storage_paths import copy_files, is_remote, storage_path
from megatron_llama.config.json_file import read_json_object
from megatron_llama.config.schema import Config
from megatron_llama.data.tokenizer.base import Tokenizer, beyond_vocabulary
from megatron_llama.data.tokenizer.fingerprint import require_same_ids
from megatron_llama.data.tokenizer.load import has_tokenizer, load_tokenizer
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.mesh import Mesh
from megatron_llama.errors import DataError
from megatron_llama.model.hf import carried_config
from megatron_llama.model.llama import Stage, build_stages
from megatron_llama.model.load import load_stages, rank_specs
from megatron_llama.model.rope import longest_sequence, longest_sequence_name
from megatron_llama.train.setup.checks.model import require_language_model

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
"""Fields of generation_config.json that change the output of transformers and have no option here
that the user would set instead (only ``generate`` has --stop), with the values that change
nothing."""


@dataclass(frozen=True)
class Trained:
    """A model with its weights and its tokenizer, in one process."""

    stage: Stage
    tokenizer: Tokenizer
    stops: frozenset[int]
    """Tokens that end a text: those of generation_config.json and config.json, else the tokenizer's
    end token."""
    notes: tuple[str, ...] = ()
    """The weights that were read of several, and the fields of generation_config.json that are not
    applied."""
    copied: tempfile.TemporaryDirectory[str] | None = None
    """The files of a tokenizer from an object store, since templates and other files beside it are
    read on demand. Removed with the model."""

    def beyond(self, where: str, ids: Sequence[int]) -> str | None:
        """Return a sentence about tokens without a row in the model; None if all have one."""
        do = "leave it out, or train with --resize-embeddings, which gives the model a row for it"
        return beyond_vocabulary(where, ids, self.stage.config.vocab_size, self.tokenizer, do=do)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence."""
        model = self.stage.config
        return longest_sequence(model.rope_scaling, model.max_position_embeddings)

    @property
    def longest_prompt(self) -> str:
        """The largest number of tokens of a prompt, and the fields that set it, for messages."""
        model = self.stage.config
        name = longest_sequence_name(model.rope_scaling, model.max_position_embeddings)
        return f"at most {self.longest - 1}, the model's {name} less one"


def open_reader(
    path: str | Path,
    *,
    hf_config: str | Path | None = None,
    vocab_size: int = 0,
    tokens: int = 0,
    ignored: Collection[str] = (),
) -> ModelReader:
    """Open a model folder of any format, or a checkpoint in an object store, with the options of
    ``open_model``. Raises CheckpointError."""
    folder = storage_path(str(path))
    if is_remote(folder):
        return NativeReader(folder, hf_config, vocab_size)
    return open_model(
        folder, config=hf_config, vocab_size=vocab_size, tokens=tokens, ignored=ignored
    )


def load_stage(source: ModelReader, dtype: torch.dtype, device: torch.device | None) -> Stage:
    """Build the whole model on a device, by default this process's first, with the weights of
    ``source``."""
    config = Config(model=source.model)
    mesh = Mesh.single(device or devices.accelerator(0))
    [stage] = build_stages(config, mesh).values()
    # The reader of a native checkpoint compares it with its own list.
    with ListedFilesCheck(None if source.format == "native" else source.folder) as check:
        load_stages([stage], rank_specs(config, mesh), source, dtype=dtype, device=mesh.device)
        check.require()
    return stage


def load_trained(
    source: ModelReader,
    dtype: torch.dtype,
    device: torch.device | None = None,
    tokenizer_model: str | Path | None = None,
) -> Trained:
    """Read an open model folder, with the tokenizer ``tokenizer_model`` or, by default, its own.
    Raises ConfigError for a reward model, which writes no text, CheckpointError or DataError."""
    require_language_model(source.model, str(source.folder))
    own_folder = tokenizer_folder(source)
    folder, copied = own_folder, None
    if is_remote(own_folder):
        copied = tempfile.TemporaryDirectory()
        folder = Path(copied.name)
        if own_folder.is_dir():
            copy_files(own_folder, folder)
    tokenizer = load_tokenizer(tokenizer_model or folder)
    if tokenizer_model is not None and has_tokenizer(folder):
        require_same_ids(
            tokenizer,
            load_tokenizer(folder),
            where=f"--tokenizer-model {tokenizer_model}",
            owner=folder,
            do="leave it out, or give a tokenizer that only adds tokens behind",
        )
    rows = source.model.vocab_size
    if tokenizer.base_vocab_size > rows:
        raise DataError(
            tokenizer_model or own_folder,
            got=f"a tokenizer of {tokenizer.vocab_size} tokens",
            expected=f"that of the model, whose vocab_size is {rows}",
            do="give this model's tokenizer (--tokenizer-model)",
        )
    own = frozenset() if tokenizer.eos_id is None else frozenset({tokenizer.eos_id})
    stops = frozenset(_end_tokens(source)) or own
    stage = load_stage(source, dtype, device)
    own_notes = (note for note in source.notes if note != OPTIMIZER_LEFT_OUT)
    return Trained(stage, tokenizer, stops, (*own_notes, *generation_notes(source)), copied)


def tokenizer_folder(source: ModelReader) -> Path:
    """Return the folder of the model's tokenizer, if it has one."""
    return source.tokenizer_files[0].parent if source.tokenizer_files else source.folder


def generation_notes(source: ModelReader) -> Iterator[str]:
    """Yield a line for each field of the model's generation_config.json that makes transformers
    write another text than this program with the same options, and for each special token without a
    row in the model."""
    yield from unknown_tokens(source.model, source.extra, source.tokenizer_files)
    for path in source.tokenizer_files:
        if path.name == GENERATION:
            content = read_json_object(path)
            for name, neutral in UNUSED_IN_GENERATION.items():
                if content.get(name) not in (None, neutral):
                    yield f"{path} {name} {content[name]}: not applied here"


def _end_tokens(source: ModelReader) -> Iterator[int]:
    """Yield the end tokens that the model's own files name. They come before the tokenizer's: a
    chat model ends its messages with another token than its documents. Raises CheckpointError."""
    hf_config = carried_config(source.model, source.extra, dtype=source.dtype)
    yield from end_tokens(hf_config, f"{source.folder} config.json")
    for path in source.tokenizer_files:
        if path.name == GENERATION:
            yield from end_tokens(read_json_object(path), str(path))
