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
    parser.addoption("--soak", action="store_true", help="hours of what a usual run does for seconds")


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> bool:
    """Whether ``--soak`` was given."""
    return bool(request.config.getoption("--soak"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Worker processes: ``cluster.run(world_size, function, *args)``."""
    with Cluster() as pool:
        yield pool
