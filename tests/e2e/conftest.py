"""One dataset of real text, made by the product itself, and runs that several tests compare with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest
from megatron_llama.data.corpus import python_documentation

from tests.e2e.product import EVALUATED, LAYOUTS, VOCAB_SIZE, Product
from tests.launch import Launcher

DOCUMENTS = 600
"""Paragraphs of Python's language reference: short, so that one sample holds several."""


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with Launcher(tmp_path_factory.mktemp("output")) as started:
        yield started


@pytest.fixture(scope="session")
def product(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Product:
    folder = tmp_path_factory.mktemp("data")
    paragraphs = (part for topic in python_documentation() for part in topic.split("\n\n") if len(part) > 80)
    texts = tuple(islice(paragraphs, DOCUMENTS))
    (folder / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = ["preprocess", "--input", folder / "docs.jsonl", "--output-prefix", folder / "docs", "--append-eod", "--workers", 1]
    launcher.run([*command, "--train-tokenizer", "--vocab-size", VOCAB_SIZE]).ok()
    return Product(launcher, folder / "docs", texts)


@pytest.fixture(scope="session")
def straight(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run of six steps that nobody interrupted, by name of its layout."""
    done: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in done:
            done[name] = tmp_path_factory.mktemp("straight")
            product.train(LAYOUTS[name], save=done[name], **EVALUATED)
        return done[name]

    return folder
