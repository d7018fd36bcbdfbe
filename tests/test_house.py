"""The rules that keep the project readable. Each failure names the file, the line and the rule."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatron_llama"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE, MAX_FUNCTION = 500, 80

LAYERS = (
    (
        *("errors", "config", "aliases", "options", "manual", "validate", "presets", "hf_config", "params", "lora", "layout", "schedule"),
        *("blends", "batch_sizes", "recorder", "history", "whereabouts", "activations", "memory", "auto", "traffic", "uses", "residency"),
        *("run_problems", "offload", "zenflow", "timeline", "host_memory"),
    ),
    ("planner",),
    ("device", "rendezvous"),
    ("mesh",),
    ("comm",),
    ("nn",),
    ("model",),
    ("optim",),
    ("pipeline",),
    ("tokenizer", "metrics"),
    ("data", "checkpoint"),
    ("feed", "bad_steps", "vocabulary", "generation", "recording", "sft"),
    ("progress", "profiling", "samples"),
    ("setup",),
    ("train",),
    ("trace", "calibrate"),
    ("commands",),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
PLAIN = set(LAYERS[0])
"""Modules that may import the standard library only (yaml inside functions)."""


def unit(path: Path) -> str:
    """The module or folder of the package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path, *, inside_functions: bool = True) -> Iterator[tuple[int, str]]:
    nodes = ast.walk(tree(path)) if inside_functions else iter(tree(path).body)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                yield node.lineno, f"{node.module}.{name.name}"
        elif isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name


def test_every_module_has_a_layer() -> None:
    assert [str(p) for p in FILES if unit(p) not in LEVEL and unit(p) != "__init__"] == []


def test_imports_go_down() -> None:
    wrong = []
    for path in FILES:
        own = unit(path)
        if own == "__init__":
            continue
        for line, name in imports(path):
            parts = name.split(".")
            other = parts[1] if parts[0] == "megatron_llama" and len(parts) > 1 else None
            if other is None or other == own or other not in LEVEL:
                continue
            level, theirs = LEVEL[own], LEVEL[other]
            if theirs > level or (theirs == level and level > 0):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}: layer {level} from layer {theirs}")
    assert wrong == []


def test_no_import_cycle() -> None:
    graph: dict[str, set[str]] = {}
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in FILES}
    for module, path in modules.items():
        names = {name for _, name in imports(path, inside_functions=False)}
        graph[module] = {n if n in modules else n.rpartition(".")[0] for n in names} & modules.keys() - {module}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"import cycle: {' -> '.join((*trail, module))}"
        if module not in done:
            for other in graph[module]:
                visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_plans_and_options_need_no_torch() -> None:
    code = "import sys; import megatron_llama." + ", megatron_llama.".join(sorted(PLAIN)) + "; import megatron_llama.cli"
    heavy = ["torch", "numpy", "yaml", "tokenizers", "sentencepiece", "safetensors", "tqdm"]
    check = f"{code}; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize("path", [*FILES, *sorted((ROOT / "tools").rglob("*.py")), *sorted((ROOT / "tests").rglob("*.py"))], ids=str)
def test_sizes(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_FILE, f"{path}: {lines} lines, at most {MAX_FILE}; split it by noun"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            size = node.end_lineno - node.lineno + 1
            assert size <= MAX_FUNCTION, f"{path}:{node.lineno} {node.name}: {size} lines, at most {MAX_FUNCTION}"


def test_no_globals_and_no_mutable_module_state() -> None:
    wrong = []
    for path in FILES:
        module = tree(path)
        wrong += [f"{path}:{n.lineno} global" for n in ast.walk(module) if isinstance(n, ast.Global)]
        for node in module.body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            mutable = isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp)
            makers = ("dict", "list", "set", "defaultdict")
            made = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in makers
            if mutable or made:
                wrong.append(f"{path}:{node.lineno} mutable module-level value; use a tuple, frozenset or MappingProxyType")
    assert wrong == []


def test_environment_is_used_in_three_modules() -> None:
    allowed = {"mesh.py", "cli.py", "library.py"}
    reads = [
        f"{path}:{node.lineno}"
        for path in FILES
        if path.name not in allowed
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
    ]
    assert reads == []


def test_only_the_device_module_names_an_accelerator() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path in FILES
        if path.name != "device.py"
        for node in ast.walk(tree(path))
        if (isinstance(node, ast.Constant) and isinstance(node.value, str) and "cuda" in node.value and not _is_docstring(path, node))
        or (isinstance(node, ast.Attribute) and node.attr == "cuda")
    ]
    assert found == []


def _is_docstring(path: Path, constant: ast.Constant) -> bool:
    return any(isinstance(node, ast.Expr) and node.value.lineno == constant.lineno for node in ast.walk(tree(path)))


def test_strategies_are_named_in_one_place() -> None:
    names = {"no_shard", "optim", "optim_grads", "optim_grads_params"}
    found = [
        f"{path}:{node.lineno}"
        for path in FILES
        if path.name not in ("layout.py", "config.py", "aliases.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        if isinstance(side, ast.Constant) and side.value in names
    ]
    assert found == []


def test_public_things_are_documented() -> None:
    missing = []
    for path in FILES:
        module = tree(path)
        if not ast.get_docstring(module):
            missing.append(f"{path}: module")
        for node in ast.walk(module):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_") or ast.get_docstring(node):
                continue
            # Methods of private classes and autograd's forward/backward are explained by their class.
            if node.name not in ("forward", "backward") and not _private_owner(module, node):
                missing.append(f"{path}:{node.lineno} {node.name}")
    assert missing == []


def _private_owner(module: ast.Module, node: ast.AST) -> bool:
    owners = [n for n in ast.walk(module) if isinstance(n, ast.ClassDef | ast.FunctionDef) and n is not node and node in ast.walk(n)]
    return any(owner.name.startswith("_") or isinstance(owner, ast.FunctionDef) for owner in owners)


def test_nothing_is_left_over() -> None:
    words = ("TO" + "DO", "FIX" + "ME", "X" + "XX", "NotImplemented" + "Error", "pytest." + "skip", "mark." + "skip", "mark." + "xfail")
    folders = ("megatron_llama", "tools", "tests", "examples")
    files = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".sh")]
    found = [f"{path}: {word}" for path in files for word in words if word in path.read_text()]
    assert found == []
