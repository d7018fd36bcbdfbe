"""The package as Python sees it: what it exports, what its import costs, and its types in the eyes of a user's type checker."""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import megatron_llama as ml
import pytest

from tests.launch import ROOT

PACKAGE = ROOT / "megatron_llama"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_its_import_costs_nothing() -> None:
    heavy = "[name for name in ('torch', 'numpy', 'yaml', 'megatron_llama.api', 'megatron_llama.config') if name in sys.modules]"
    assert run(f"import sys, megatron_llama; print({heavy})") == "[]"
    assert run("import sys, megatron_llama as ml; ml.plan; print('torch' in sys.modules)") == "False", "planning needs no torch"
    seconds = run("import time; t = time.perf_counter(); import megatron_llama; print(time.perf_counter() - t)")
    assert float(seconds) < 0.25  # it takes 5 ms where nothing else runs; torch alone takes seconds


def test_three_lists_of_names_are_one() -> None:
    """What type checkers see, what ``import *`` takes, and what is found at run time."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {f"{node.module}.{alias.name}" for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == {f"megatron_llama.{module}.{name}" for name, module in ml._MODULES.items()}
    assert sorted(ml.__all__) == sorted([*ml._MODULES, "__version__"])
    assert set(ml.__all__) <= set(dir(ml))
    for name in ml.__all__:
        assert getattr(ml, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = ml.trian  # type: ignore[attr-defined]


def test_no_module_hides_an_exported_name() -> None:
    """The import of a module sets it as an attribute of its package."""
    modules = {path.stem if path.suffix == ".py" else path.name for path in PACKAGE.iterdir()}
    assert modules.isdisjoint(ml._MODULES)
    code = "import megatron_llama.training, megatron_llama.conversion, megatron_llama.api.train, megatron_llama as ml; print(callable(ml.train))"
    assert run(code) == "True"


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
    *("float | None", "torch._tensor.Tensor", "int", "megatron_llama.tokenizer.base.Tokenizer"),
    *("Literal['stop'] | Literal['length']", "int", "bool", "typing.Mapping[str, Any]", "pathlib.Path"),
    "megatron_llama.sharding.optimizer.AdamW",
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
def test_a_users_script_is_checked_against_the_installed_package(tmp_path: Path) -> None:
    """Installed as a wheel has it: without ``py.typed`` mypy would take everything for Any, with an error of its own."""
    site = tmp_path / "venv" / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["megatron_llama"]
    files = [*PACKAGE.rglob("*.py"), *(PACKAGE / name for name in declared)]
    for path in files:
        target = site / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (tmp_path / "good.py").write_text(SCRIPT)
    (tmp_path / "bad.py").write_text("import megatron_llama as ml\n" + "\n".join(WRONG) + "\n")
    # Errors in torch are not ours.
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\n[mypy-torch.*]\nfollow_imports = silent\n")
    command = [sys.executable, "-m", "mypy", "--python-executable", str(tmp_path / "venv" / "bin" / "python"), "good.py", "bad.py"]
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
