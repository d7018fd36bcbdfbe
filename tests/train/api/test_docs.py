"""docs/api.md: all that is exported, and every example as it stands there. That it is current is tested in ``tests/test_house.py``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import megatron_llama as ml
import pytest
from tools.api_docs import SECTIONS, examples

from tests.launcher import ROOT, Launcher, free_port

DOCUMENT = ROOT / "docs" / "api.md"


def test_it_has_every_name() -> None:
    assert sorted(name for _, _, names in SECTIONS for name in names) == sorted(set(ml.__all__) - {"__version__"})


@pytest.mark.long
def test_every_example_runs(fresh: Launcher, data: Path, tmp_path: Path) -> None:
    """One after the other, in one folder: what the first ones write the others read. Those that torchrun starts say so in their first line."""
    folder = tmp_path / "data"
    folder.mkdir()
    for file in data.parent.glob("docs*"):
        (shutil.copytree if file.is_dir() else shutil.copy)(file, folder / file.name)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launched = 0
    readme = [code for code in examples((ROOT / "README.md").read_text()) if "ml.train(" in code]
    assert readme
    for number, code in enumerate([*examples(DOCUMENT.read_text()), *readme]):
        first = code.partition("\n")[0]
        if not first.startswith("# torchrun"):
            alone = fresh.run([], code=code, cwd=tmp_path)
            assert alone.codes == (0,), f"{code}\n{alone}"
            continue
        path = tmp_path / f"example{number}.py"
        path.write_text(code)
        words = ["-m", "torch.distributed.run", "--nproc-per-node", first.split()[3], "--master-port", str(free_port()), str(path)]
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
        launched += 1
    assert number >= 8 and launched >= 1
