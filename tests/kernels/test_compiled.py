"""The kernels become machine code for GPUs that are not here, and keep what they work on in registers."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.kernels
ROOT = Path(__file__).parent.parent.parent
SOURCES = (
    *sorted((ROOT / "megatron_llama" / "model" / "nn" / "kernels").glob("*.py")),
    ROOT / "megatron_llama" / "model" / "nn" / "fp8" / "kernels.py",
    *sorted((ROOT / "megatron_llama" / "engine").glob("**/*_kernel.py")),
)


def kernels() -> set[str]:
    """``module.function`` of everything that Triton compiles and somebody launches: what a kernel calls is compiled with it."""
    found = set()
    for path in SOURCES:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        launched = {ast.unparse(node.value) for node in nodes if isinstance(node, ast.Subscript)}
        for node in nodes:
            if isinstance(node, ast.FunctionDef) and any(ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list):
                found |= {f"{path.stem}.{node.name}"} & {f"{path.stem}.{name}" for name in launched}
    return found


def test_all_kernels_compile_without_spilling_or_fp64() -> None:
    """For Hopper, and without an instruction that reads what nothing wrote, as a fault of the assembler has made. One thread of one kernel
    computes in fp64: the one that counts steps."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiled", "90"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name.split()[0] for name in found} == kernels()
    assert [name for name, used in found.items() if used["stack"] > 0 or used["reg"] > 128] == []
    assert [name for name, used in found.items() if used["unwritten"]] == []
    # Weighted rows are rounded before they are added, as by torch's operators.
    assert [name for name, used in found.items() if used["fused"] and name.startswith("rows._sum ")] == []
    assert {name.split()[0] for name, used in found.items() if used["f64"]} == {"adamw_kernel._count_step"}
