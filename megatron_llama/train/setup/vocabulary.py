"""The tokenizer of a run: its search, the refusal of datasets and weights of another one, and the
model's fields from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_llama.checkpoint.checkpoint_dir import TOKENIZER
from megatron_llama.checkpoint.storage_paths import is_remote, local_copy
from megatron_llama.config.blend import read_blend
from megatron_llama.config.schema import CheckpointConfig, Config
from megatron_llama.data.meta import read_meta
from megatron_llama.data.tokenizer.base import Tokenizer
from megatron_llama.data.tokenizer.fingerprint import Fingerprint, difference, require_same_ids
from megatron_llama.data.tokenizer.load import has_tokenizer, load_tokenizer
from megatron_llama.data.words import is_stream, is_url
from megatron_llama.errors import ConfigError, DataError, describe, listing
from megatron_llama.train.setup.checks.model import token_problems
from megatron_llama.train.setup.start import Start


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a run."""

    tokenizer: Tokenizer | None
    """The tokenizer; None if nothing names one."""
    size: int
    """The number of token ids; 0 if unknown."""
    eod: int | None
    """The id that ends documents."""
    warnings: tuple[str, ...] = ()
    """Comparisons that were impossible, and things that the run lacks."""


def find_vocabulary(config: Config, start: Start | None) -> Vocabulary:
    """Return the vocabulary of --tokenizer-model, or else of the tokenizer beside the weights of
    ``start`` or --init-from-hf, or else of the dataset's PREFIX.meta.json.

    Raises DataError for a dataset or for weights that were made with another tokenizer."""
    # The run's own tokenizer encodes a text.
    prefixes = [word for word in read_blend(config.data.data_path).prefixes if not is_stream(word)]
    metas = {prefix: meta for prefix in prefixes if (meta := read_meta(prefix)) is not None}
    _require_one_tokenizer(metas)
    first = next(iter(metas.values()), {})
    folder = _tokenizer_of_weights(config.checkpoint, start)
    # An object store is read only for the comparison: a tokenizer copies its files later.
    beside = folder if folder is not None and not is_remote(folder) else None
    path = config.data.tokenizer_model or beside or _present(first)
    tokenizer = load_tokenizer(path, config.data.tokenizer_type) if path is not None else None
    warnings: list[str] = []
    if tokenizer is None:
        # A plan for other machines has no dataset here, so its tokenizer is not checked.
        if any(is_url(prefix) or Path(f"{prefix}.idx").is_file() for prefix in prefixes):
            warnings += _without_tokenizer(config.checkpoint, metas)
    else:
        if folder is not None and path != beside:
            warnings += _compare_with_weights(tokenizer, str(path), folder)
        remedy = _remedy(config, str(path), metas)
        warnings += _compare_with_datasets(tokenizer, str(path), prefixes, metas, remedy)
        warnings += _other_end(config, tokenizer, str(path))
    eod = first.get("eod")
    if eod is None:
        eod = tokenizer.eos_id if tokenizer else config.model.eos_token_id
    size = tokenizer.vocab_size if tokenizer else int(first.get("vocab_size", 0))
    return Vocabulary(tokenizer, size, eod, tuple(warnings))


def _tokenizer_of_weights(options: CheckpointConfig, start: Start | None) -> Path | None:
    """Return the folder of the tokenizer that belongs to the weights: their own folder, or the one
    that a run keeps beside its checkpoints."""
    if start is not None:
        folder = start.path
    elif options.init_from_hf is not None:
        folder = Path(options.init_from_hf)
    else:
        return None
    for place in (folder, folder / TOKENIZER, folder.parent / TOKENIZER):
        if has_tokenizer(place):
            return place
    return None


def _present(meta: Mapping[str, Any]) -> Path | None:
    """Return the path of the tokenizer that a dataset names, or None if it is not there."""
    name = meta.get("tokenizer")
    return Path(name) if name is not None and Path(name).exists() else None


def _without_tokenizer(
    options: CheckpointConfig, metas: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    """Yield the things that a run without a tokenizer lacks."""
    missing = [
        f"{meta['tokenizer']}, which {prefix}.meta.json names, is not there"
        for prefix, meta in metas.items()
        if meta.get("tokenizer") is not None
    ]
    if missing or options.save is not None or options.export_hf is not None:
        yield (
            f"no tokenizer is known ({'; '.join(missing) or 'the dataset names none'}): "
            "checkpoints and exports come without one; give --tokenizer-model"
        )


def _require_one_tokenizer(metas: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise DataError if a dataset of a blend has other tokens than the first."""
    do = "preprocess all datasets of a blend with one tokenizer"
    first = next(iter(metas), "")
    for prefix, meta in metas.items():
        for name in ("vocab_size", "eod"):
            got = meta.get(name)
            wanted = metas[first].get(name)
            if got != wanted:
                expected = f"{wanted}, as of {first}"
                raise DataError(f"{prefix}.meta.json {name}", got=got, expected=expected, do=do)
        here, there = (Fingerprint.read(entry.get("fingerprint")) for entry in (meta, metas[first]))
        if here is None or there is None or here == there:
            continue
        mine, theirs = _present(meta), _present(metas[first])
        deviation = "another fingerprint"
        if mine is not None and theirs is not None:
            deviation = difference(load_tokenizer(mine), load_tokenizer(theirs))
        if deviation:
            where = f"{prefix}.meta.json tokenizer"
            raise DataError(where, got=deviation, expected=f"the tokenizer of {first}", do=do)


def _compare_with_weights(tokenizer: Tokenizer, path: str, folder: Path) -> Iterator[str]:
    """Compare the tokenizer of the run with the one beside the weights. Yields a warning if they
    differ but common ids mean the same. Raises DataError for other ids."""
    with local_copy(folder) as here:
        try:
            own = load_tokenizer(here)
        except DataError as error:
            yield f"whether {path} is the tokenizer of the weights cannot be checked: {error}"
            return
        do = (
            "take the tokenizer with which the weights were trained; if that is the new one, put "
            f"it in the place of {folder}"
        )
        require_same_ids(tokenizer, own, where=f"tokenizer {path}", owner=folder, do=do)
    sizes = (tokenizer.vocab_size, own.vocab_size)
    ends = (tokenizer.eos_id, own.eos_id)
    if sizes[0] != sizes[1] or ends[0] != ends[1]:
        yield (
            f"the tokenizer {path} has {sizes[0]} tokens and the end token {ends[0]}; {folder}, "
            f"which belongs to the weights, has {sizes[1]} and {ends[1]}"
        )


def _remedy(config: Config, path: str, metas: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the remedy for datasets of another tokenizer than ``path``."""
    again = "preprocess the text again with the tokenizer of the run"
    own = next(filter(None, map(_present, metas.values())), None)
    if config.data.tokenizer_model is None or own is None or str(own) == path:
        return again
    return f"{again}, or give --tokenizer-model {own}"


def _compare_with_datasets(
    tokenizer: Tokenizer,
    path: str,
    prefixes: Sequence[str],
    metas: Mapping[str, Mapping[str, Any]],
    remedy: str,
) -> Iterator[str]:
    """Yield a warning for each dataset that does not tell enough about its tokenizer. Raises
    DataError with each dataset of another tokenizer. More tokens after those of the dataset are no
    difference."""
    problems = []
    for prefix in prefixes:
        meta = metas.get(prefix, {})
        size = int(meta.get("vocab_size") or 0)
        eod = meta.get("eod")
        kept = Fingerprint.read(meta.get("fingerprint"))
        named = _present(meta)
        own = load_tokenizer(named) if named is not None else None
        if own is not None and kept is not None and kept != Fingerprint.of(own, size):
            own = None  # the file was replaced after the dataset was made
        deviation = ""
        if size > tokenizer.vocab_size:
            deviation = f"{size} tokens there, {tokenizer.vocab_size} here"
        elif eod is not None and eod != tokenizer.eos_id:
            deviation = f"the id that ends documents is {eod} there, {tokenizer.eos_id} here"
        elif kept is not None and kept == Fingerprint.of(tokenizer, size):
            continue
        elif own is not None:
            deviation = difference(tokenizer, own)
        elif kept is not None:
            deviation = "its meta.json has another fingerprint"
        else:
            known = f"its {size} tokens and its end token may be" if size else "nothing is known"
            yield (
                f"--data-path {prefix}: whether it was made with the tokenizer {path} cannot be "
                f"checked ({known}): preprocess it again to be sure"
            )
        if deviation:
            got = f"a dataset of another tokenizer ({deviation})"
            expected = f"one of the tokenizer {path}"
            problems.append(
                describe(f"--data-path {prefix}", got=got, expected=expected, do=remedy)
            )
    if problems:
        raise DataError(
            problems[0]
            if len(problems) == 1
            else listing("These datasets do not fit the tokenizer of the run:", problems)
        )


def _other_end(config: Config, tokenizer: Tokenizer, path: str) -> Iterator[str]:
    """Yield a warning if the model ends texts with another token than the tokenizer."""
    eos = config.model.eos_token_id
    if eos is not None and eos != tokenizer.eos_id:
        yield (
            f"eos_token_id of the model is {eos}, the end token of {path} is {tokenizer.eos_id}: "
            "an exported config.json says the model's; change it with --eos-token-id"
        )


def with_vocabulary(config: Config, vocabulary: Vocabulary) -> Config:
    """Return the configuration with the model fields that come from the tokenizer. Raises
    ConfigError if the model is too small for it, DataError if the dataset is not there."""
    model = config.model
    tokenizer = vocabulary.tokenizer
    if model.vocab_size == 0 and vocabulary.size == 0:
        prefixes = read_blend(config.data.data_path).prefixes
        absent = [
            path
            for prefix in prefixes
            if not is_url(prefix)
            and not is_stream(prefix)
            and not Path(path := f"{prefix}.idx").is_file()
        ]
        if absent:
            do = "give --data-path the common prefix of the .bin and .idx files, without suffix"
            expected = "PREFIX.bin and PREFIX.idx"
            raise DataError(
                f"--data-path: {absent[0]}", got="no such file", expected=expected, do=do
            )
        do = "give --tokenizer-model, a dataset with its meta.json, or --vocab-size"
        raise ConfigError("--vocab-size", got="nothing", expected="the number of token ids", do=do)
    size = model.vocab_size or vocabulary.size
    weights = config.checkpoint
    if weights.resize_embeddings:
        size = max(size, vocabulary.size)
    trained = weights.load is not None or weights.init_from_hf is not None
    # Tokens that were added after a trained model's vocabulary are refused where one is used.
    needed = tokenizer.base_vocab_size if tokenizer is not None and trained else vocabulary.size
    if size < needed and not trained:
        do = f"give --vocab-size {vocabulary.size} or leave it out, or use this model's tokenizer"
        raise ConfigError(
            "--vocab-size", got=size, expected=f"at least the tokenizer's {vocabulary.size}", do=do
        )
    if size < needed:
        raise ConfigError(
            "the tokenizer",
            got=f"{vocabulary.size} tokens",
            expected=f"those of the model, whose vocab_size is {size}",
            do="use this model's tokenizer, or give --resize-embeddings to add rows",
        )
    if vocabulary.eod is not None and vocabulary.eod >= size:
        known = tokenizer.token(vocabulary.eod) if tokenizer is not None else None
        raise ConfigError(
            "the end of documents",
            got=f"the token {known!r} (id {vocabulary.eod})",
            expected=f"a token of the model, whose vocab_size is {size}",
            do="use this model's tokenizer, or give --resize-embeddings to add rows",
        )
    bos = model.bos_token_id
    eos = model.eos_token_id
    if tokenizer is not None:
        # A trained model may well have no begin token.
        bos = tokenizer.bos_id if bos is None and not trained else bos
        eos = tokenizer.eos_id if eos is None else eos
    model = replace(model, vocab_size=size, bos_token_id=bos, eos_token_id=eos)
    problems = list(token_problems(model))
    if problems:
        raise ConfigError(listing("These tokens are none of the model's:", problems))
    return replace(config, model=model)
