"""What all tests share: one thread, and the pool of workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.harness import Cluster

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests take turns with the pool of workers are spread among the others, where they would only wait for each other; from
    the last folder on, whose are the longest, because at the end there is nothing beside them."""
    pooled = {item.path for item in items if "cluster" in getattr(item, "fixturenames", ())}
    files = list(dict.fromkeys(item.path for item in items))
    kinds = [[file for file in reversed(files) if file in pooled], [file for file in files if file not in pooled]]
    place = {file: number / len(kind) for kind in kinds for number, file in enumerate(kind)}
    items.sort(key=lambda item: place[item.path])


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
