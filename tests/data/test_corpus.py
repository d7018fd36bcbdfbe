from __future__ import annotations

import json
import random
import shutil
import sysconfig
from itertools import islice
from pathlib import Path

import pytest
from megatron_llama.data.corpus import python_documentation, with_common_words, write_corpus, write_pairs, write_preferences


@pytest.mark.long
def test_corpus_is_large_english_text(tmp_path: Path) -> None:
    documents = write_corpus(tmp_path / "python.jsonl")
    texts = [json.loads(line)["text"] for line in (tmp_path / "python.jsonl").read_text().splitlines()]
    assert texts[:1000] == list(islice(python_documentation(), 1000))
    assert len(texts) == documents > 3000
    assert 1.5e6 < sum(map(len, texts)) < 5e6
    assert sum(text.count(" the ") for text in texts) > 10_000


def test_corrupted_text_has_other_words_in_every_third_place() -> None:
    text = "Return the value of the first item that is not None, or of the default."
    corrupted = with_common_words(text, ["the", "a", "file"], random.Random(3))
    words, others = text.split(), corrupted.split()
    changed = [place for place, (word, other) in enumerate(zip(words, others, strict=True)) if word != other]
    assert len(changed) == -(-len(words) // 3) and {others[place] for place in changed} <= {"the", "a", "file"}
    assert with_common_words("the", ["the", "a"], random.Random(0)) == "a"


def test_preferences_hold_out_what_sft_holds_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here of one package of the library."""
    shutil.copytree(Path(sysconfig.get_path("stdlib"), "asyncio"), tmp_path / "library" / "asyncio")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "library"))
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    counts = write_preferences(tmp_path / "train.jsonl", tmp_path / "held-out.jsonl")
    assert sum(counts) == pairs and counts[0] == round(0.95 * pairs)
    talks = [json.loads(line)["messages"] for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    preferences = [json.loads(line) for name in ("train", "held-out") for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    assert [[*each["prompt"], *each["chosen"]] for each in preferences] == talks
    assert all(each["chosen"] != each["rejected"] for each in preferences)
