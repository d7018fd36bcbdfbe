"""References of the parity tests, trained once per session."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.harness import Cluster
from tests.parallel.cases import Layout, Reference, reference


@pytest.fixture(scope="session")
def references(cluster: Cluster) -> Callable[[Layout], Reference]:
    """The reference of a layout."""
    known: dict[Layout, Reference] = {}

    def look_up(layout: Layout) -> Reference:
        if layout.reference not in known:
            known[layout.reference] = reference(cluster, layout)
        return known[layout.reference]

    return look_up
