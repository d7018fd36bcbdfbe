"""References of the parity tests, trained once per session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest

from tests.harness import Cluster
from tests.parallel.cases import Layout, Reference, reference


@pytest.fixture(scope="session")
def references(cluster: Cluster) -> Callable[[Layout], Reference]:
    """The reference of a layout."""
    trained = cache(partial(reference, cluster))
    return lambda layout: trained(layout.reference)
