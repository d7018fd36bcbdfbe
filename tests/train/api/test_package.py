"""The package as Python sees it: what it exports, and what its import costs. Its types are tested where it is installed, in tests/tools."""

from __future__ import annotations

import ast
import subprocess
import sys

import megatron_llama as ml
import pytest

from tests.launcher import ROOT, Launcher

PACKAGE = ROOT / "megatron_llama"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_its_import_costs_nothing() -> None:
    heavy = "[name for name in ('torch', 'numpy', 'yaml', 'megatron_llama.train.api', 'megatron_llama.config') if name in sys.modules]"
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


@pytest.mark.long
def test_no_module_hides_an_exported_name(fresh: Launcher) -> None:
    """The import of a module sets it as an attribute of its package, where a function may be called like a room."""
    assert (PACKAGE / "train").is_dir(), "nothing is called like a function"
    imports = "import megatron_llama.train.run.loop, megatron_llama.checkpoint.model_folders, megatron_llama.train.api.train, megatron_llama as ml"
    code = f"{imports}; from megatron_llama.train.run import result; from megatron_llama import train; "
    code += "print(callable(ml.train), train is ml.train, result.TrainResult is ml.TrainResult)"
    assert fresh.run([], code=code).ok().out == "True True True\n"
    code = "import megatron_llama as ml; train = ml.train; import megatron_llama.train.run.loop; print(train is ml.train)"
    assert fresh.run([], code=code).ok().out == "True\n"
