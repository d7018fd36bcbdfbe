"""What tests of ``shard`` share: workers that have HuggingFace's models, and torch's own training to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests import harness
from tests.engine.shard.training import Run, Trained, ddp
from tests.harness import Cluster

# Three seconds for each worker that would import them, and there are up to four.
harness.PRELOAD.append("tests.engine.shard.training")


@pytest.fixture(scope="session")
def references(cluster: Cluster) -> Callable[[Run], Sequence[Trained]]:
    """What the ranks of a run account for with DDP, trained once."""
    known: dict[Run, Sequence[Trained]] = {}

    def look_up(run: Run) -> Sequence[Trained]:
        if run not in known:
            known[run] = cluster.run(run.dp, ddp, run)
        return known[run]

    return look_up
