"""Processes that have imported what a file of tests compares with: six seconds for each rank of each test otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.ranks import Ranks
from tests.launcher import Launcher


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Ranks of the script that the file names."""
    script = request.module.SCRIPT
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_HUB_OFFLINE", "1")
        with Launcher(tmp_path_factory.mktemp("ranks"), (script,)) as launcher:
            yield Ranks(launcher, script)
