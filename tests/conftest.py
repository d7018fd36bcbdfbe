"""What all tests share: one thread, and the pool of workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.harness import Cluster

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Worker processes: ``cluster.run(world_size, function, *args)``."""
    with Cluster() as pool:
        yield pool
