from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from megatron_llama.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron_llama.data.tokenizer.spm import SentencePieceTokenizer, train_tokenizer

VOCAB_SIZE = 2000


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Python's language reference: 0.46 MB of English, code and tables."""
    return [topics[name] for name in sorted(topics)]


@pytest.fixture(scope="session")
def tokenizer(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    return train_tokenizer(texts, VOCAB_SIZE, tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")


@pytest.fixture(scope="session")
def documents(texts: list[str], tokenizer: SentencePieceTokenizer) -> list[np.ndarray]:
    """Token ids of each text, closed by the end token."""
    return [np.array([*tokenizer.encode(text), 2], np.uint16) for text in texts]


@pytest.fixture(scope="session")
def dataset(documents: list[np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    prefix: Path = tmp_path_factory.mktemp("dataset") / "corpus"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for document in documents:
            writer.add(document)
    return IndexedDataset(prefix)
