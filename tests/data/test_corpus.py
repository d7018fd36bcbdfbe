from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from megatron_llama.data.corpus import python_documentation, write_corpus


@pytest.mark.long
def test_corpus_is_large_english_text(tmp_path: Path) -> None:
    documents = write_corpus(tmp_path / "python.jsonl")
    texts = [json.loads(line)["text"] for line in (tmp_path / "python.jsonl").read_text().splitlines()]
    assert texts[:1000] == list(islice(python_documentation(), 1000))
    assert len(texts) == documents > 3000
    assert 1.5e6 < sum(map(len, texts)) < 5e6
    assert sum(text.count(" the ") for text in texts) > 10_000
