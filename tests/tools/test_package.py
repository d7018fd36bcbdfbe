"""The wheel, as a user has it: built by one command, installed where only its declared dependencies are, and used from another folder.
And nothing tells a user to install a name that is not ours."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
import tomllib
import zipfile
from email import message_from_string
from importlib.metadata import distribution
from pathlib import Path

import megatron_llama
import pytest
from megatron_llama.train.commands.quickstart import in_transformers

from tests.launcher import ROOT, TIMEOUT
from tests.tools.test_constraints import brought

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINES = re.compile(r"\b(?:pip3?|pipx|uv|poetry|conda|mamba)\b[^\n;&|]*?\b(?:install|add)\b([^\n;&|]*)")
NAME = re.compile(r"(?<![\w./-])megatron[-_.]llama(?![\w./-]*\.(?:whl|tar\.gz)|/)", re.IGNORECASE)
"""The name as an index would look for it: no file, and no path."""


def told(text: str) -> list[str]:
    """Where a text says to install a package of our name, which an index would be asked for."""
    text = re.sub(r"\\\n\s*|(?<=install)\s+|(?<=add)\s+", " ", text)  # a command goes on in the next line, where prose is wrapped
    return [command[0] for command in LINES.finditer(text) if NAME.search(command[1])]


def test_nobody_is_told_to_install_a_name_that_is_not_ours() -> None:
    """Until it is registered anybody could put anything there."""
    folders = ("megatron_llama", "tools", "examples", "docs", "checkpoints_conversion", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")] + [*ROOT.glob("*.*")]
    files = [path for path in files if path.is_file() and path.suffix != ".pyc" and path != Path(__file__)]
    texts = {path: path.read_text(errors="replace") for path in files}
    assert {"README.md", "pyproject.toml"} <= {path.name for path in texts} and len(texts) > 500
    assert {str(path.relative_to(ROOT)): found for path, text in texts.items() if (found := told(text))} == {}


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ("pip install megatron-llama", True),
        ("python -m pip install --upgrade megatron_llama==0.1.0", True),
        ("uv add Megatron-LLaMA", True),
        ("it needs `pip install\n'megatron-llama[hf]'`", True),
        ("pip install --quiet \\\n    megatron-llama", True),
        ("pip install dist/megatron_llama-0.1.0-py3-none-any.whl", False),
        ("pip install ./megatron-llama", False),
        ("pip install git+https://host/somebody/megatron-llama", False),
        ("pip install '.[hf]' && pip uninstall -y megatron-llama", False),
    ],
)
def test_what_counts_as_telling(text: str, is_told: bool) -> None:
    assert bool(told(text)) == is_told


def test_every_extra_is_documented() -> None:
    rows = (ROOT / "docs" / "dependencies.md").read_text().partition("| extra |")[2].partition("\n\n")[0].splitlines()[2:]
    assert sorted(name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])) == sorted(PROJECT["optional-dependencies"])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    environ = {**os.environ, "PYTHON": sys.executable}
    environ.pop("PYTHONPATH", None)
    done = subprocess.run(["bash", "tools/package.sh", str(folder)], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(map(str, folder.iterdir())) and len(done.stdout.splitlines()) == 2
    return folder


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel and what it declares to need, which is linked from the tests' environment: no
    extra, no test package, no checkout."""
    venv = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    [wheel] = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    # Not ours, which may name a checkout: pip would take the wheel for installed.
    subprocess.run(pip, check=True, cwd=venv, env=bare(venv), timeout=TIMEOUT)
    site = venv / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    needed: dict[str, str] = {}
    brought("megatron-llama", frozenset(), needed)
    assert "torch" in needed and "transformers" not in needed
    for name in needed:
        installed = distribution(name)
        for top in {path.parts[0] for path in installed.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(str(installed.locate_file(top)))
    return python


def run(python: Path, folder: Path, *words: str) -> str:
    """What a command prints that is started in a folder, with nothing of the tests' environment."""
    done = subprocess.run([str(python), *words], cwd=folder, env=bare(folder), capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def bare(folder: Path) -> dict[str, str]:
    """The environment of a container that has only Python."""
    return {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TMPDIR": str(folder.parent), "LANG": "C.UTF-8"}


@pytest.mark.long
def test_it_has_the_tree(built: Path) -> None:
    """Every file of the package, and no other: what was not committed is in the tree as well. The wheel is made from the sdist, without git."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "megatron_llama"], cwd=ROOT, capture_output=True, text=True)
    tree = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()} - {"megatron_llama/config/.gitattributes"}
    [wheel] = built.glob("*.whl")
    [sdist] = built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        notes = {Path(name).name: archive.read(name).decode() for name in names if ".dist-info/" in name}
    assert {name for name in names if ".dist-info/" not in name} == tree and "megatron_llama/py.typed" in tree
    metadata = message_from_string(notes["METADATA"])
    assert metadata["Version"] == megatron_llama.__version__ and metadata["License-Expression"] == "Apache-2.0"
    assert sorted(metadata.get_all("Provides-Extra") or ()) == sorted(PROJECT["optional-dependencies"])
    assert "megatron-llama = megatron_llama.cli:main" in notes["entry_points.txt"] and "Apache License" in notes["LICENSE"]
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert tree | {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO"} <= inside


@pytest.mark.soak
def test_it_runs_the_quickstart_from_an_empty_folder(python: Path, tmp_path: Path) -> None:
    """In small, ended by SIGTERM in the middle and started again. What it says to type next can be typed."""
    work = tmp_path / "empty"
    work.mkdir()
    assert run(python, work, "-c", "import megatron_llama; print(megatron_llama.__file__)").startswith(str(python.parents[1]))
    assert run(python, work, "-m", "megatron_llama", "--version") == f"{megatron_llama.__version__}\n"
    command = [str(python), "-m", "megatron_llama", "quickstart", "--output", "a run", "--train-iters"]
    first = subprocess.Popen([*command, "200"], cwd=work, env=bare(work), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = work / "a run" / "checkpoints" / "log.jsonl"
    deadline = time.monotonic() + TIMEOUT
    while not (log.exists() and "validation_loss" in log.read_text()):
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    said = first.communicate(timeout=TIMEOUT)[0]
    assert first.returncode == 143 and "== 1 of 6, 0:" in said and "== 4 of 6" not in said, said
    reached = int((log.parent / "latest_checkpointed_iteration.txt").read_text())
    last = reached + 2
    said = run(python, work, *command[1:], str(last))
    assert (
        "== 1 of 6" not in said and f" iteration {last}/{last} |" in said and f"resumes from a run/checkpoints/iter_{reached:07}\n" in said
    ), said
    before, after = map(float, re.findall(r"validation loss: +(\S+) before training, (\S+) after", said)[0])
    assert before > after and "transformers is not installed" in said
    assert in_transformers(work / "a run" / "hf").startswith("transformers loads it (5,048,576 parameters) and continues: ")
    assert "<svg" in (work / "a run" / "report.html").read_text() and "a run/report.html (open it in a browser)" in said
    assert {path.name for path in work.iterdir()} == {"a run"}
    following = said.partition("\nNext:\n")[2].splitlines()
    assert following[0] == f"  source {python.parent}/activate && export OMP_NUM_THREADS=1"
    typed = "\n".join(line for line in following if "torchrun" not in line)
    done = subprocess.run(["bash", "-euc", typed], cwd=work, env=bare(work), capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0 and "valid for 4 processes" in done.stdout and "If the argument is" in done.stdout, (
        done.stdout + done.stderr
    )


SCRIPT = """
from pathlib import Path

import megatron_llama as ml
from torch import Tensor


class Stops(ml.Callback):
    def on_step(self, run: ml.Run, step: ml.Step) -> None:
        loss: Tensor = step.loss
        if run.rank == 0 and float(loss) < 2.0:
            run.stop()


result = ml.train({"lr": 1e-3}, [Stops()], save="runs/x")
reveal_type(result.loss)
reveal_type(ml.load("runs/x")["model.norm.weight"])
reveal_type(ml.load("runs/x", "stage").config.hidden_size)
reveal_type(ml.load("runs/x", "trained").tokenizer)
reveal_type(ml.generate("runs/x", "a prompt")[0].finish_reason)
reveal_type(ml.convert("runs/x", Path("y"), to="meta").bytes)
reveal_type(ml.verify("a", "b").equal)
reveal_type(ml.plan(gpus=8).layouts[0].options)
reveal_type(ml.save_hf(ml.load("runs/x"), "z", config="w").folder)
reveal_type(ml.AdamW(lr=1e-3))
"""
REVEALED = [
    *("float | None", "torch._tensor.Tensor", "int", "megatron_llama.data.tokenizer.base.Tokenizer"),
    *("Literal['stop'] | Literal['length']", "int", "bool", "typing.Mapping[str, Any]", "pathlib.Path"),
    "megatron_llama.engine.shard.optimizer.AdamW",
]
WRONG = {
    "ml.train(5)": "arg-type",
    "ml.train({}, [print])": "list-item",
    'ml.convert("a", "b", to="onnx")': "arg-type",
    'ml.convert("a", "b")': "call-arg",
    'ml.load("a", "modle")': "call-overload",
    'ml.load("a", "stage", tokenizer_model="b")': "call-overload",
    'ml.verify("a", "b").same': "attr-defined",
    "ml.shard()": "call-arg",
    "ml.plan(gpus='8')": "arg-type",
}


@pytest.mark.long
def test_a_users_script_is_checked_against_it(python: Path, tmp_path: Path) -> None:
    """By mypy --strict. Without ``py.typed`` it would take everything for Any, with an error of its own."""
    (tmp_path / "good.py").write_text(SCRIPT)
    (tmp_path / "bad.py").write_text("import megatron_llama as ml\n" + "\n".join(WRONG) + "\n")
    # Errors in torch are not ours.
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\n[mypy-torch.*]\nfollow_imports = silent\n")
    command = [sys.executable, "-m", "mypy", "--python-executable", str(python), "good.py", "bad.py"]
    cache = ["--cache-dir", str(ROOT / ".mypy_cache" / "users")]
    done = subprocess.run([*command, *cache], cwd=tmp_path, capture_output=True, text=True, env={"PATH": ""})
    lines = done.stdout.splitlines()
    revealed = [line.partition("Revealed type is ")[2].strip('"').replace("builtins.", "") for line in lines if "Revealed type" in line]
    assert revealed == REVEALED, done.stdout
    assert not [line for line in lines if line.startswith("good.py") and ": error" in line], done.stdout
    found = {
        int(line.split(":")[1]): line.rpartition("[")[2].rstrip("]") for line in lines if line.startswith("bad.py") and ": error" in line
    }
    assert found == dict(enumerate(WRONG.values(), 2)), done.stdout
