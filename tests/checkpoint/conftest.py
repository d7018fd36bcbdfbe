"""A run's checkpoints, to be damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from megatron_llama.checkpoint import native

from tests.checkpoint.cases import SINGLE, save_under, state_at
from tests.parallel.cases import Layout, trainer


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of a run: iterations 1 and 2."""
    folder, layout = tmp_path_factory.mktemp("good"), Layout()
    run = trainer(SINGLE, layout)
    run.step(0)
    native.save(folder, run.optimizer, run.mesh, state_at(1), layout.config())
    save_under(SINGLE, layout, folder)
    return folder


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    """The second one, in a folder of its own with the first."""
    return Path(shutil.copytree(good, tmp_path / "copy")) / "iter_0000002"
