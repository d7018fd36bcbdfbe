"""Every tool says what it does, however it is started: by its path from any folder, or as a module from the root of the clone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
INNER = {"overlap/measure.py"}
"""What a tool starts by itself, on each of its hosts."""
SCRIPTS = sorted(
    name
    for path in TOOLS.rglob("*.py")
    if 'if __name__ == "__main__":' in path.read_text()
    for name in [str(path.relative_to(TOOLS)).removesuffix("/__main__.py")]
    if name not in INNER
)


def test_every_tool_helps_in_both_ways(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(Path(__file__).with_name("run_help.py")), str(ROOT), *SCRIPTS]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 2 * len(SCRIPTS) > 0
    for way, (status, text) in found.items():
        assert status in (0, None), (way, status, text)
        assert "usage: " in text and "--" in text, (way, text)


def test_a_real_process_finds_its_own_checkout(tmp_path: Path) -> None:
    """As above, without the fork: what Python itself puts into sys.path."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(TOOLS / "preprocess_data.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and "usage: " in done.stdout, done.stderr


def test_scripts_of_the_shell_help() -> None:
    environ = {**os.environ, "VIRTUAL_ENV": "", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for name in ("bench_overlap.sh", "gpu_check.sh"):
        done = subprocess.run(["bash", str(TOOLS / name), "--help"], env=environ, capture_output=True, text=True)
        assert done.returncode == 0 and "usage: " in done.stdout, done.stderr
