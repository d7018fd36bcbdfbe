"""What all tests share: one thread, and the pool of workers."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from megatron_llama import cli

from tests.harness import Cluster, be_patient
from tests.refusals import rehearsing

torch.set_num_threads(1)
# torch looks at it once, at the first matrix product on a GPU, and tests in deterministic mode may come after others.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
be_patient()
# A shell ignores it for what it starts in the background, and so would all processes of tests that send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


MARKS = MappingProxyType({"long": ("--all", "--soak"), "soak": ("--soak",)})
"""Which options ask for the tests of a mark."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the tests that are marked long")
    parser.addoption("--soak", action="store_true", help="hours of what a usual run does for seconds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked ``long`` or ``soak``, unless an option asks for it or the test is named on the command line."""
    named = [argument for argument in config.args if "::" in argument]
    wanted = {mark for mark in MARKS if any(config.getoption(option) for option in MARKS[mark]) or mark in config.getoption("-m")}
    unwanted = MARKS.keys() - wanted
    left_out = [item for item in items if unwanted & {mark.name for mark in item.iter_markers()} and not _is_named(item, named)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def _is_named(item: pytest.Item, arguments: list[str]) -> bool:
    return any(item.nodeid.startswith(argument) for argument in arguments)


@pytest.fixture(scope="session", autouse=True)
def refusals_are_rehearsed() -> Iterator[None]:
    """What a run of this process refuses, it is made to refuse as a dry run, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "run", rehearsing(cli.run))
        yield


@pytest.fixture(scope="module", autouse=True)
def what_is_there_is_collected_once() -> None:
    """A command collects garbage when it ends. It would look at every test of the session, and at all that they have imported, each time:
    for longer than most commands take here."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> bool:
    """Whether ``--soak`` was given."""
    return bool(request.config.getoption("--soak"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Worker processes: ``cluster.run(world_size, function, *args)``."""
    with Cluster() as pool:
        yield pool


@pytest.fixture(scope="session")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight tokenizers as third parties ship them, each in a folder of its name: see ``tests/data/tokenizer/layouts.py``. Copy what you change."""
    from tests.data.tokenizer.layouts import write_layouts

    folder = tmp_path_factory.mktemp("layouts")
    write_layouts(folder)
    return folder
