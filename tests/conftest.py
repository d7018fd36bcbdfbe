"""What all tests share: one thread, and the pool of workers."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

from tests.harness import Cluster, be_patient

torch.set_num_threads(1)
be_patient()
# A shell ignores it for what it starts in the background, and so would all processes of tests that send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the tests that are marked long")
    parser.addoption("--soak", action="store_true", help="hours of what a usual run does for seconds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked ``long``, unless ``--all`` or ``--soak`` is given or the test is named on the command line."""
    named = [argument for argument in config.args if "::" in argument]
    if config.getoption("--all") or config.getoption("--soak") or "long" in config.getoption("-m"):
        return
    left_out = [item for item in items if item.get_closest_marker("long") and not _is_named(item, named)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def _is_named(item: pytest.Item, arguments: list[str]) -> bool:
    return any(item.nodeid.startswith(argument) for argument in arguments)


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> bool:
    """Whether ``--soak`` was given."""
    return bool(request.config.getoption("--soak"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Worker processes: ``cluster.run(world_size, function, *args)``."""
    with Cluster() as pool:
        yield pool
