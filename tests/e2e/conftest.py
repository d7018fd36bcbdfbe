"""One dataset of real text, made by the product itself, and runs that several tests compare with."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import pytest
import torch
from megatron_llama.cli import main
from megatron_llama.config.schema import ParallelConfig
from megatron_llama.data.corpus import python_documentation
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.watch import Watch
from megatron_llama.train.api import train

from tests.e2e.product import EVALUATED, LAYOUTS, VOCAB_SIZE, Product, Refuse
from tests.launcher import Launcher, torchrun

DOCUMENTS = 600
"""Paragraphs of Python's language reference: short, so that one sample holds several."""


def _once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that of several workers of pytest the first one that asks makes, for all: its path is then the same for all."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    made = root / name
    whole = made.with_name(f"{made.name}.whole")
    with open(made.with_name(f"{made.name}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not whole.exists():
            shutil.rmtree(made, ignore_errors=True)
            make(made)
            whole.touch()
    return made


@pytest.fixture(scope="session")
def product(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Product:
    paragraphs = (part for topic in python_documentation() for part in topic.split("\n\n") if len(part) > 80)
    texts = tuple(islice(paragraphs, DOCUMENTS))

    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        command = ["preprocess", "--input", folder / "docs.jsonl", "--output-prefix", folder / "docs", "--append-eod", "--workers", 1]
        launcher.run([*command, "--train-tokenizer", "--vocab-size", VOCAB_SIZE]).ok()

    return Product(launcher, _once(tmp_path_factory, "data", make) / "docs", texts)


@pytest.fixture(scope="session")
def straight(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run of six steps that nobody interrupted, by name of its layout. Nothing writes there afterwards."""

    def folder(name: str) -> Path:
        def make(made: Path) -> None:
            product.train(LAYOUTS[name], save=made, **EVALUATED)

        return _once(tmp_path_factory, f"straight {name}", make)

    return folder


@pytest.fixture(scope="session")
def exported(product: Product, straight: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The HuggingFace folder of the run of one process. Nothing writes there afterwards."""

    def make(made: Path) -> None:
        product.run("export", "--load", straight("one"), "--output", made).ok()

    return _once(tmp_path_factory, "exported", make)


@pytest.fixture(scope="session")
def base(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows a little English, as a HuggingFace folder, for instruction and preference tuning."""
    return _once(tmp_path_factory, "base", lambda made: product.train(export_hf=made, train_iters=10, max_position_embeddings=160))


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """Starts a command in this process, as the first of its ranks, and gives what is said about it: rank 0 refuses for all of them."""

    def met(parallel: ParallelConfig, place: Place, watch: Watch) -> tuple[Axis, torch.device]:
        return Mesh.single().world, torch.device("cpu")

    def said(argv: Sequence[object], *, code: int, processes: int = 1) -> str:
        if processes > 1:
            monkeypatch.setattr(train, "join", met)
            for name, value in torchrun(processes, 1)(0).items():
                monkeypatch.setenv(name, value)
        assert main([str(word) for word in argv]) == code
        printed = capsys.readouterr()
        assert " iteration " not in printed.out, "it trained"
        return printed.err

    return said
