"""The guide's commands are run as they are written, page after page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "guide").glob("[0-9]*.md"))


def commands(page: Path) -> str:
    """All of its ``bash`` blocks; what needs a cluster or a package index is marked ``text``."""
    return "\n".join(re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], str]:
    """Runs a page, after those before it, once each; gives what it printed."""
    work, printed = tmp_path_factory.mktemp("guide"), dict[Path, str]()
    (work / "runs" / "guide").mkdir(parents=True)
    for name in ("examples", "tools"):
        (work / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def run(page: Path) -> str:
        for one in PAGES[: PAGES.index(page) + 1]:
            if one not in printed:
                script = ["bash", "-euo", "pipefail", "-c", commands(one)]
                done = subprocess.run(script, cwd=work, env=environ, capture_output=True, text=True, timeout=300, check=False)
                assert done.returncode == 0, f"{one.name}\n{done.stdout}\n{done.stderr}"
                printed[one] = done.stdout
        return printed[page]

    return run


SAID = {
    "01-install": r"torch .*\n[\s\S]*preprocess",
    "02-data": r"vocabulary 1,024[\s\S]*documents",
    "03-pretrain": r"iteration       40/      40",
    "04-watch": r'"iteration": 40[\s\S]*\n40 \d\.\d',
    "05-resume": r"iter_0000040[\s\S]*verified: [\s\S]*saved \S+/iter_0000050",
    "06-scale-out": r"processes       64 = tp 4 x cp 1 x pp 2 x dp 8",
    "07-convert": r"verdict: equal",
    "08-fine-tune": r"pairs[\s\S]*validation loss at iteration 20[\s\S]*saved \S+lora/iter_0000010",
    "09-evaluate": r"lm loss PPL[\s\S]*The with statement",
    "10-publish": r"bfloat16 .*The with",
}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page(page: Path, play: Callable[[Path], str]) -> None:
    assert re.search(SAID[page.stem], play(page)), play(page)
