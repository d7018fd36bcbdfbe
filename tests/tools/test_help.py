"""Every tool says what it does, however it is started: by its path from any folder, or as a module from the root of the clone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
INNER = {"overlap/measure.py", "overlap/context.py", "overlap/tensor.py"}
"""What a tool starts by itself, on each of its hosts."""
SCRIPTS = sorted(
    name
    for path in TOOLS.rglob("*.py")
    if 'if __name__ == "__main__":' in path.read_text()
    for name in [str(path.relative_to(TOOLS)).removesuffix("/__main__.py")]
    if name not in INNER
)


def typeable(text: str) -> bool:
    """Help begins with a command that exists, as it is typed in the root of the clone, and says what it does."""
    usage, _, rest = text.partition("\n")
    if usage.startswith("usage: python -m megatron_llama preprocess "):
        return True  # what tools/preprocess_data.py is another name of
    found = re.match(r"usage: (?:python|bash|torchrun --nproc-per-node N) ((?:tools|checkpoints_conversion)/[\w/]+\.(?:py|sh))\b", usage)
    module = re.match(r"usage: python -m tools\.([\w.]+) ", usage)
    files = [] if found is None else [ROOT / found[1]]
    if module is not None:
        place = TOOLS.joinpath(*module[1].split("."))
        files = [place / "__main__.py", place.with_suffix(".py")]
    exists = any(file.is_file() for file in files)
    return exists and len(rest.split()) > 10


@pytest.mark.long
def test_every_tool_helps_in_both_ways(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(Path(__file__).with_name("run_help.py")), str(ROOT), *SCRIPTS]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 2 * len(SCRIPTS) > 0
    for way, (status, text) in found.items():
        assert status in (0, None), (way, status, text)
        assert "--" in text and typeable(text), (way, text)


def test_a_real_process_finds_its_own_checkout(tmp_path: Path) -> None:
    """As above, without the fork: what Python itself puts into sys.path."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(TOOLS / "preprocess_data.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and "usage: " in done.stdout, done.stderr


SHELL = [str(path.relative_to(ROOT)) for folder in ("tools", "checkpoints_conversion") for path in (ROOT / folder).glob("*.sh")]


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(SHELL) - {"checkpoints_conversion/common.sh"}))
def test_scripts_of_the_shell_help(name: str, tmp_path: Path) -> None:
    """From any folder; all but one without torch, and whatever they would install or write."""
    python = f"{Path(sys.executable).parent}:" if name == "tools/bench_overlap.sh" else ""
    environ = {**os.environ, "VIRTUAL_ENV": "", "PATH": f"{python}/usr/bin:/bin", "PYTHON": "/nowhere"}
    done = subprocess.run(["bash", str(ROOT / name), "--help"], env=environ, capture_output=True, text=True, cwd=tmp_path)
    text = done.stdout.removeprefix(f"python: {Path(sys.executable).parent}/python3\n")
    assert done.returncode == 0 and typeable(text) and name in text.splitlines()[0], (done.stdout, done.stderr)
    assert list(tmp_path.iterdir()) == []


def test_an_environment_is_made_for_extras_that_exist(tmp_path: Path) -> None:
    done = subprocess.run(["bash", str(TOOLS / "venv.sh"), "tests"], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: tools/venv.sh: got tests, expected an extra of pyproject.toml; give hf or test\n")


@pytest.mark.long
@pytest.mark.parametrize("name", ["bench_preprocess.py", "compare_trl.py"])
def test_a_wrong_option_is_one_message(name: str) -> None:
    done = subprocess.run([sys.executable, str(TOOLS / name), "--stepz", "3"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: These options cannot be used:\n  - --stepz: got an unknown flag")
