"""Which tokenizer a run belongs to, and what the model takes from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from megatron_llama.config import CheckpointConfig, Config
from megatron_llama.data.meta import read_meta
from megatron_llama.errors import ConfigError, describe
from megatron_llama.tokenizer.base import Tokenizer
from megatron_llama.tokenizer.load import load_tokenizer

TOKENIZERS = ("tokenizer.json", "tokenizer.model")


@dataclass(frozen=True)
class Vocabulary:
    """What is known of the tokens of a run; the tokenizer is absent for a dataset that came without one."""

    tokenizer: Tokenizer | None
    size: int
    eod: int | None
    """Id that ends documents."""


def find_vocabulary(config: Config) -> Vocabulary:
    """From --tokenizer-model, else the dataset's PREFIX.meta.json, else the HuggingFace folder of the weights. Raises DataError."""
    meta = (read_meta(config.data.data_path) if config.data.data_path else None) or {}
    path = config.data.tokenizer_model or meta.get("tokenizer") or _tokenizer_of_weights(config.checkpoint)
    readable = path is not None and (config.data.tokenizer_model is not None or Path(path).exists())
    tokenizer = load_tokenizer(path, config.data.tokenizer_type) if path is not None and readable else None
    size = tokenizer.vocab_size if tokenizer else int(meta.get("vocab_size", 0))
    eod = meta.get("eod")
    if eod is None:
        eod = tokenizer.eos_id if tokenizer else config.model.eos_token_id
    return Vocabulary(tokenizer, size, eod)


def _tokenizer_of_weights(options: CheckpointConfig) -> str | None:
    folders = [folder for folder in (options.init_from_hf, options.load) if folder is not None]
    return next((folder for folder in folders for name in TOKENIZERS if (Path(folder) / name).is_file()), None)


def with_vocabulary(config: Config, vocabulary: Vocabulary) -> Config:
    """Fill the model fields that come from the tokenizer. Raises ConfigError if the model is too small for it."""
    model, tokenizer = config.model, vocabulary.tokenizer
    if model.vocab_size == 0 and vocabulary.size == 0:
        do = "give --tokenizer-model, a dataset with its meta.json, or --vocab-size"
        raise ConfigError(describe("--vocab-size", got="nothing", expected="the number of token ids", do=do))
    size = model.vocab_size or vocabulary.size
    if size < vocabulary.size:
        do = f"give --vocab-size {vocabulary.size} or leave it out, or use this model's tokenizer"
        raise ConfigError(describe("--vocab-size", got=size, expected=f"at least the tokenizer's {vocabulary.size}", do=do))
    bos, eos = model.bos_token_id, model.eos_token_id
    if tokenizer is not None:
        bos, eos = tokenizer.bos_id if bos is None else bos, tokenizer.eos_id if eos is None else eos
    return replace(config, model=replace(model, vocab_size=size, bos_token_id=bos, eos_token_id=eos))
