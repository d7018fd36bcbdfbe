"""Real text with its tokenizer, as a user of Python has it: data/docs.bin, data/docs.idx."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import megatron_llama as ml
import pytest
from megatron_llama.data.corpus import python_documentation
from megatron_llama.data.preprocess import preprocess
from megatron_llama.data.preprocess_config import PreprocessConfig

VOCAB_SIZE = 400


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of a dataset: 200 paragraphs of Python's language reference."""
    folder = tmp_path_factory.mktemp("data")
    paragraphs = (part for topic in python_documentation() for part in topic.split("\n\n") if len(part) > 80)
    lines = (json.dumps({"text": text}) + "\n" for text in islice(paragraphs, 200))
    (folder / "docs.jsonl").write_text("".join(lines))
    prefix = folder / "docs"
    preprocess(
        PreprocessConfig(
            input=(str(folder / "docs.jsonl"),),
            output_prefix=str(prefix),
            train_tokenizer=True,
            vocab_size=VOCAB_SIZE,
            append_eod=True,
            workers=1,
        )
    )
    return prefix


@pytest.fixture(scope="session")
def options(data: Path) -> dict[str, object]:
    """A small run."""
    return {
        "data_path": data, "split": "90,10,0", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "seq_length": 32, "micro_batch_size": 1, "global_batch_size": 4, "train_iters": 6, "lr": 1e-3, "log_interval": 2,
    }


@pytest.fixture(scope="session")
def losses(options: dict[str, object]) -> Mapping[int, float]:
    """Those of this run, if nothing interrupts it."""
    return ml.train(options).losses
