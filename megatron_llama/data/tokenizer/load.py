"""Finds and loads a tokenizer of any kind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from megatron_llama.config.model_files import is_there
from megatron_llama.data.tokenizer.base import Tokenizer
from megatron_llama.data.tokenizer.files import CONFIG, read_json_object, read_tokenizer_file
from megatron_llama.errors import DataError

# Megatron's --tokenizer-type names and the files from which each may be read, preferred first.
MEGATRON_TYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "SentencePieceTokenizer": ("tokenizer.model",),
        "Llama2Tokenizer": ("tokenizer.model",),
        "HuggingFaceTokenizer": ("tokenizer.json", "tokenizer.model", "tekken.json"),
        "PretrainedFromHF": ("tokenizer.json", "tokenizer.model", "tekken.json"),
    }
)
ONLY_JSON = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers that read only a tokenizer.json."""
USUAL_NAMES = ("tokenizer.json", "tokenizer.model", "tekken.json")
"""Names of a tokenizer's file, in the order in which a folder is searched."""


def load_tokenizer(path: str | Path, tokenizer_type: str | None = None) -> Tokenizer:
    """Load the tokenizer at ``path``: a ``.model`` (sentencepiece's, or LLaMA 3's and 4's file of
    ranks), a ``tokenizer.json``, Mistral's ``tekken.json``, or a folder with one of them
    (``tokenizer.json`` first).

    ``tokenizer_type`` is one of Megatron's names, which restricts the kind of file. Raises
    DataError.
    """
    file = tokenizer_file(path, tokenizer_type)
    # Imported on use: workers that use sentencepiece need not load `tokenizers`, nor the other way
    # round.
    if usual_name(file) == "tokenizer.model":
        if _is_ranks(file):
            from megatron_llama.data.tokenizer.tiktoken import TiktokenTokenizer

            return TiktokenTokenizer(file)
        from megatron_llama.data.tokenizer.spm import SentencePieceTokenizer

        return SentencePieceTokenizer(file)
    if usual_name(file) == "tekken.json":
        from megatron_llama.data.tokenizer.tekken import TekkenTokenizer

        return TekkenTokenizer(file)
    from megatron_llama.data.tokenizer.hf import HFTokenizer

    return HFTokenizer(file)


def usual_name(file: Path) -> str | None:
    """Return the usual name of a tokenizer's file, which is that of its kind: ``tokenizer.model``
    for ``tokenizer.model.v3``, ``tekken.json`` for ``tekken_240911.json``. None for no such
    file."""
    if re.search(r"\.model(\.v\d+(m\d+)?)?$", file.name):
        return "tokenizer.model"
    if file.suffix == ".json":
        return "tekken.json" if "tekken" in file.name else "tokenizer.json"
    return None


def has_tokenizer(folder: Path) -> bool:
    """Whether ``load_tokenizer`` finds a tokenizer in a folder. Raises DataError if a list of
    checksums names one that is missing."""
    return any(is_there(folder / name, error=DataError) for name in USUAL_NAMES)


def require_expressible(tokenizer: Tokenizer) -> None:
    """Raise DataError if ``tokenizer.save_hf`` would, in less time than that takes."""
    from megatron_llama.data.tokenizer import export, proto
    from megatron_llama.data.tokenizer.spm import SentencePieceTokenizer

    if isinstance(tokenizer, SentencePieceTokenizer):
        name = str(tokenizer.path)
        export.require_expressible(
            proto.parse_model(read_tokenizer_file(tokenizer.path), name), name
        )


def require_named(folder: Path) -> None:
    """Raise DataError if a folder has no tokenizer.json, but the tokenizer_config.json of a
    tokenizer that needs one. A field tokenizer_file counts only if no other file is there:
    transformers writes into it where a tokenizer was once loaded from."""
    file = folder / "tokenizer.json"
    config = folder / CONFIG
    if is_there(file, error=DataError) or not is_there(config, error=DataError):
        return
    settings = read_json_object(config)
    own = settings.get("tokenizer_class")
    named = settings.get("tokenizer_file")
    by = f"tokenizer_class {own}" if own in ONLY_JSON else ""
    others = [name for name in USUAL_NAMES if name != file.name]
    beside = any(is_there(folder / name, error=DataError) for name in others)
    if isinstance(named, str) and Path(named).name == file.name and not beside:
        by = f"tokenizer_file {named}"
    if by:
        expected = f"it, by {config.name}: {by}"
        do = "copy it from where the model came from"
        raise DataError(file, got="no such file", expected=expected, do=do)


def _is_ranks(file: Path) -> bool:
    """Whether a ``.model`` file begins as LLaMA 3's does, with a base64 word and a number.
    Sentencepiece's begins with the byte 0x0A."""
    try:
        with file.open("rb") as opened:
            return re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", opened.read(4096)) is not None
    except OSError:
        return False  # the reader of sentencepiece's files reports it


def tokenizer_file(path: str | Path, tokenizer_type: str | None = None) -> Path:
    """Return the file that ``load_tokenizer`` reads. Raises DataError if there is none, or it is of
    another type."""
    path = Path(path)
    names: tuple[str, ...] = USUAL_NAMES
    if tokenizer_type is not None:
        if tokenizer_type not in MEGATRON_TYPES:
            expected = ", ".join(MEGATRON_TYPES)
            raise DataError(
                "tokenizer_type",
                got=tokenizer_type,
                expected=f"one of {expected}",
                do="change it or leave it out",
            )
        names = MEGATRON_TYPES[tokenizer_type]
    if path.is_dir():
        if "tokenizer.json" in names:
            require_named(path)
        file = next((path / name for name in names if is_there(path / name, error=DataError)), None)
        if file is None:
            raise DataError(
                path,
                got="a folder without them",
                expected=" or ".join(names),
                do="give the folder of a tokenizer",
            )
        return file
    if not path.is_file():
        expected = "a .model file, a tokenizer.json, a tekken.json or a folder with one"
        raise DataError(path, got="no such file", expected=expected, do="check the path")
    if usual_name(path) not in names:
        suffixes = dict.fromkeys(Path(name).suffix for name in names)
        by = f" for {tokenizer_type}" if tokenizer_type else ""
        raise DataError(
            path,
            got=f"a {path.suffix or 'nameless'} file",
            expected=f"{' or '.join(suffixes)}{by}",
            do="give the tokenizer file",
        )
    return path
