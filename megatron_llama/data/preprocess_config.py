"""Options of the ``preprocess`` command. Standard library only, so that its help appears at
once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PreprocessConfig:
    """Which text becomes which indexed dataset, and with which tokenizer."""

    input: tuple[str, ...] = ()
    """Files or folders (walked in sorted order). `.jsonl`, `.json`: one JSON object per line;
    `.parquet`: one document per row; any other file: one plain-text document. `.gz` and `.zst`
    behind these are decompressed."""
    output_prefix: str = ""
    """Writes PREFIX.bin, PREFIX.idx and PREFIX.meta.json, and a copy of the tokenizer,
    PREFIX-tokenizer/. With several json_keys the names are PREFIX_KEY_document.*."""
    json_keys: tuple[str, ...] = ("text",)
    """Fields of each JSON object to tokenize, each into a dataset of its own."""
    append_eod: bool = False
    """End each document with the tokenizer's end token."""
    workers: int = 0
    """Worker processes. 0: one per core. The output is the same for any number."""
    tokenizer_type: (
        Literal[
            "SentencePieceTokenizer", "Llama2Tokenizer", "HuggingFaceTokenizer", "PretrainedFromHF"
        ]
        | None
    ) = None
    """Megatron's name for the kind of tokenizer, checked against the file. Default: what the file
    is."""
    tokenizer_model: str | None = None
    """A `.model` of sentencepiece or LLaMA, HF `tokenizer.json`, Mistral's `tekken.json`, or a
    folder with one of them."""
    train_tokenizer: bool = False
    """First train a sentencepiece BPE on the input (above 256 MB on evenly spaced documents),
    written to PREFIX-tokenizer/."""
    vocab_size: int = 32000
    """Pieces of the tokenizer that --train-tokenizer makes."""
    skip_bad_documents: int = 0
    """Leave out up to so many documents that cannot be used (no JSON, no such field, no UTF-8),
    print how many there were and where the first ten are. With more, and at a file that cannot be
    read to its end, nothing is written."""
    overwrite: bool = False
    """Replace a dataset that is there already."""
    megatron_names: bool = False
    """Name the outputs as Megatron's tool does, PREFIX_KEY_document.*, with a single key too."""
