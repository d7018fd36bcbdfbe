"""Finds the tokenizer of a run, and fills in what the model takes from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_llama.config.blend import read_blend
from megatron_llama.config.schema import CheckpointConfig, Config
from megatron_llama.data.meta import read_meta
from megatron_llama.errors import ConfigError, DataError
from megatron_llama.tokenizer.base import Tokenizer
from megatron_llama.tokenizer.load import load_tokenizer

TOKENIZERS = ("tokenizer.json", "tokenizer.model")


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a run."""

    tokenizer: Tokenizer | None
    """None for a dataset that came without one."""
    size: int
    """The number of token ids; 0 if it is not known."""
    eod: int | None
    """The id that ends documents."""


def find_vocabulary(config: Config) -> Vocabulary:
    """Return the vocabulary of --tokenizer-model, or else of the dataset's PREFIX.meta.json, or
    else of the folder of the weights. Raises DataError."""
    meta = _meta(read_blend(config.data.data_path).prefixes)
    path = (
        config.data.tokenizer_model
        or meta.get("tokenizer")
        or _tokenizer_of_weights(config.checkpoint)
    )
    readable = path is not None and (config.data.tokenizer_model is not None or Path(path).exists())
    tokenizer = (
        load_tokenizer(path, config.data.tokenizer_type) if path is not None and readable else None
    )
    size = tokenizer.vocab_size if tokenizer else int(meta.get("vocab_size", 0))
    eod = meta.get("eod")
    if eod is None:
        eod = tokenizer.eos_id if tokenizer else config.model.eos_token_id
    return Vocabulary(tokenizer, size, eod)


def _meta(prefixes: Sequence[str]) -> dict[str, Any]:
    """Return the content of the first PREFIX.meta.json that is there. Raises DataError where the
    datasets of a blend have other tokens."""
    found = {prefix: meta for prefix in prefixes if (meta := read_meta(prefix)) is not None}
    first = next(iter(found), None)
    for prefix, meta in found.items():
        for name in ("vocab_size", "eod"):
            got = meta.get(name)
            wanted = found[first].get(name) if first is not None else None
            if got != wanted:
                do = "preprocess all datasets of a blend with one tokenizer"
                raise DataError(
                    f"{prefix}.meta.json {name}",
                    got=got,
                    expected=f"{wanted}, as of {first}",
                    do=do,
                )
    return {} if first is None else found[first]


def _tokenizer_of_weights(options: CheckpointConfig) -> str | None:
    """Return the folder of the tokenizer that belongs to the weights: their own folder, or the one
    that a run keeps beside its checkpoints."""
    loaded = options.save if options.load == "auto" else options.load
    folders = [Path(folder) for folder in (options.init_from_hf, loaded) if folder is not None]
    for folder in folders:
        for place in (folder, folder / "tokenizer", folder.parent / "tokenizer"):
            if any((place / name).is_file() for name in TOKENIZERS):
                return str(place)
    return None


def with_vocabulary(config: Config, vocabulary: Vocabulary) -> Config:
    """Return the configuration with the model fields that come from the tokenizer. Raises
    ConfigError if the model is too small for it."""
    model = config.model
    tokenizer = vocabulary.tokenizer
    if model.vocab_size == 0 and vocabulary.size == 0:
        absent = [
            f"{prefix}.idx"
            for prefix in read_blend(config.data.data_path).prefixes
            if not Path(f"{prefix}.idx").is_file()
        ]
        do = "give --tokenizer-model, a dataset with its meta.json, or --vocab-size"
        if absent:
            do = f"check --data-path, since there is no {absent[0]}; or {do}"
        raise ConfigError("--vocab-size", got="nothing", expected="the number of token ids", do=do)
    size = model.vocab_size or vocabulary.size
    if size < vocabulary.size:
        do = f"give --vocab-size {vocabulary.size} or leave it out, or use this model's tokenizer"
        raise ConfigError(
            "--vocab-size", got=size, expected=f"at least the tokenizer's {vocabulary.size}", do=do
        )
    bos = model.bos_token_id
    eos = model.eos_token_id
    if tokenizer is not None:
        bos = tokenizer.bos_id if bos is None else bos
        eos = tokenizer.eos_id if eos is None else eos
    return replace(
        config, model=replace(model, vocab_size=size, bos_token_id=bos, eos_token_id=eos)
    )
