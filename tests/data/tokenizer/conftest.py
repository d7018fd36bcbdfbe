from __future__ import annotations

from pathlib import Path

import pytest
from megatron_llama.data.tokenizer.spm import SentencePieceTokenizer, train_tokenizer


@pytest.fixture(scope="session")
def chunks(texts: list[str]) -> list[str]:
    """The same text in pieces of 200 characters, many of which begin or end with spaces and newlines."""
    whole = "".join(texts)
    return [whole[at : at + 200] for at in range(0, len(whole), 200)]


@pytest.fixture(scope="session")
def trained(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    return train_tokenizer(texts, 4000, tmp_path_factory.mktemp("trained") / "tokenizer.model")


@pytest.fixture(scope="session")
def folder(trained: SentencePieceTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained tokenizer as a HuggingFace folder."""
    path = tmp_path_factory.mktemp("hf")
    trained.save_hf(path)
    return path
