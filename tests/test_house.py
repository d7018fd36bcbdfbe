"""The rules of the house: rooms in their order, and what is allowed where. Each failure names the file and the line."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from megatron_llama import hooks
from megatron_llama.checkpoint.model_folders.formats import FORMATS
from megatron_llama.cli import COMMANDS
from megatron_llama.model.families.family import Family
from megatron_llama.registry import imported

from tests.launcher import Launcher

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatron_llama"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
ROOMS = (
    *("errors", "files", "registry", "hooks", "option", "engine", "integrations", "config", "schedule", "model", "pipeline", "launch", "metrics", "data"),
    *("checkpoint", "train", "planner", "converter", "tune", "prove"),
    *("cli", "__main__"),
)
"""In their order: the files of a room import the rooms before it, and their own."""
EXPORTED = ("errors", "config", "data", "engine", "train", "planner", "converter", "tune")
"""The rooms of which ``megatron_llama/__init__.py`` names something."""
WINGS = ("planner", "converter", "tune", "prove")
"""What a run of ``ml.train`` does without: rooms that hang on it by ``hooks.py``."""
TORCHLESS = (
    *("option", "engine.plan", "engine.options", "engine.offload_options", "config", "schedule", "model.plan", "model.families"),
    *("pipeline.plan", "train.setup.checks", "train.setup.description", "train.setup.resolve", "train.setup.memory", "train.setup.auto"),
)
"""Rooms and parts of rooms that are integers and options."""
HEAVY = ("torch", "numpy", "yaml", "tokenizers", "sentencepiece", "safetensors", "tqdm", "jinja2")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> Sequence[ast.AST]:
    """Of a file, from outside in."""
    return [*ast.walk(tree(path))]


def is_torchless(module: str) -> bool:
    inside = module.removeprefix("megatron_llama.")
    return any(inside == part or inside.startswith(f"{part}.") for part in TORCHLESS)


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def room(path: Path) -> str:
    """The folder at the root of the package, or the module there, to which a file belongs."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def called(call: ast.Call) -> str:
    """The last word of what is called."""
    return getattr(call.func, "id", "") or getattr(call.func, "attr", "")


def registered(call: ast.Call) -> list[str]:
    """The places that a ``Registry`` is made of, all of which are literals."""
    [places] = call.args
    assert isinstance(places, ast.Dict), ast.unparse(call)
    return [ast.literal_eval(place) for place in places.values]


@cache
def imports(path: Path, *, inside_functions: bool = True) -> Sequence[tuple[ast.AST, str]]:
    """Everything that a file imports: ``package.module.name`` for ``from package.module import name``. An ``import_module`` of a literal, or
    of an f-string that begins with one, counts too, and so does what a ``Registry`` names."""
    found: list[tuple[ast.AST, str]] = []
    for node in nodes(path) if inside_functions else tree(path).body:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{where(path, node)}: relative import"
            found += [(node, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names]
        elif inside_functions and isinstance(node, ast.Call) and called(node) == "Registry":
            found += [(node, f"megatron_llama.{place.replace(':', '.')}") for place in registered(node)]
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            argument = node.args[0]
            first = argument.values[0] if isinstance(argument, ast.JoinedStr) else argument
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                found.append((node, first.value))
    return found


def test_at_the_root_there_are_rooms_and_nine_files() -> None:
    names = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    files = {"__init__.py", "__main__.py", "cli.py", "errors.py", "files.py", "hooks.py", "option.py", "registry.py", "py.typed"}
    assert {name for name in names if "." in name} == files
    assert {room(path) for path in FILES} - {"__init__"} == set(ROOMS)


def test_a_room_imports_the_rooms_before_it() -> None:
    order = {name: place for place, name in enumerate(ROOMS)}
    wrong = []
    for path in FILES:
        own = room(path)
        for node, name in imports(path):
            parts = name.split(".")
            if parts[0] != "megatron_llama" or len(parts) < 2 or parts[1] not in order:
                continue
            if not (parts[1] in EXPORTED if own == "__init__" else order[parts[1]] <= order[own]):
                wrong.append(f"{where(path, node)} imports {name}")
    assert wrong == []


def test_commands_are_where_their_rooms_say() -> None:
    """They are imported by their names: what the rooms' ``hooks.py`` say has to be in the package."""
    for command in COMMANDS.values():
        module = f"megatron_llama.{command.module}"
        sections, _, attribute = command.sections.partition(":")
        assert module in MODULES and f"megatron_llama.{sections}" in MODULES, command
        names = {node.name for node in tree(MODULES[module]).body if isinstance(node, ast.FunctionDef)}
        assert command.function in names, command
        assert hasattr(import_module(f"megatron_llama.{sections}"), attribute), command


def loaded(fresh: Launcher, code: str, root: Path = ROOT) -> list[str]:
    """The modules of the package, without its name, that a fresh process has loaded after ``code``. ``root`` is the folder of the package."""
    shown = "print(*(name for name in sys.modules if name.startswith('megatron_llama.')))"
    done = fresh.run([], code=f"import sys; assert 'megatron_llama' not in sys.modules; import megatron_llama as ml; {code}; {shown}", cwd=root).ok()
    return sorted(module.removeprefix("megatron_llama.") for module in done.out.split())


def test_what_hooks_name_is_there() -> None:
    """Each room that hangs something in is one that hooks know, and each text names a function or class that it has."""
    assert {room(path) for path in FILES if path.name == "hooks.py"} == {"hooks", *hooks.ROOMS}
    places = [hooks.layouts().chosen]
    places += [text for format in hooks.formats().values() for text in (vars(format)[field.name] for field in fields(format)) if text]
    for place in places:
        assert callable(imported(place)), place
    assert {"hf", "native", *hooks.formats()} == set(FORMATS)


def test_what_registries_name_is_there() -> None:
    """Each text names something that can be imported, and a look-up is the first to import it."""
    calls = [node for path in FILES for node in nodes(path) if isinstance(node, ast.Call) and called(node) == "Registry"]
    places = [place for call in calls for place in registered(call)]
    assert len(calls) > 5
    for place in places:
        assert callable(imported(place)) or isinstance(imported(place), Family), place


def test_each_command_has_a_place_of_its_own_in_the_help() -> None:
    places = [command.listed for command in COMMANDS.values()]
    assert places == sorted(set(places))


def imported_modules(module: str) -> set[str]:
    """The modules of the package that one of them imports when it is imported."""
    names = {name for _, name in imports(MODULES[module], inside_functions=False)}
    return {name if name in MODULES else name.rpartition(".")[0] for name in names} & MODULES.keys() - {module}


def test_no_import_cycle() -> None:
    graph = {module: imported_modules(module) for module in MODULES}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"import cycle: {' -> '.join((*trail, module))}"
        if module not in done:
            for other in graph[module]:
                visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_plans_and_config_never_import_torch() -> None:
    """Not even in a function: they are integers and options."""
    found = [
        f"{where(path, node)} imports {name}"
        for module, path in MODULES.items()
        if is_torchless(module)
        for node, name in imports(path)
        if name.split(".")[0] == "torch"
    ]
    assert found == []


def test_help_imports_nothing_heavy() -> None:
    """``--help`` takes a tenth of a second, and a dry run does not wait for torch."""
    names = [name for name, path in MODULES.items() if is_torchless(name) or room(path) in ("errors", "hooks", "cli", "__init__")]
    code = f"import sys, {', '.join(names)}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def is_of_triton(module: str) -> bool:
    """Whether it is imported only where Triton is."""
    return module.startswith("megatron_llama.model.nn.kernels.") and module != "megatron_llama.model.nn.kernels.choice"


SHARD = "ml.shard"
STEP = "; ".join([SHARD, *(f"import megatron_llama.{module}" for module in ("schedule", "model.llama", "model.load", "pipeline.build", "pipeline.runtime"))])
"""A step of a run: the engine, and what trains a model with it. What only some runs need is imported when an option chooses it."""
ENGINE_ROOMS = ("engine", "errors", "option", "registry")
TRAINER_ROOMS = tuple(room for room in ROOMS if room not in (*WINGS, "cli", "__main__"))
WALLS = {
    "shard": (SHARD, 16_000, ENGINE_ROOMS),
    "step": (STEP, 25_500, (*ENGINE_ROOMS, "config", "schedule", "model", "pipeline")),
    "train": ("ml.train", 40_000, TRAINER_ROOMS),
    "what is trained": ("ml.load, ml.generate, ml.save_hf", 40_000, TRAINER_ROOMS),
}
"""What a fresh process does: the most lines of the package that it loads, and the only rooms that they are in."""


def brought_by_one_import(modules: Sequence[str]) -> str:
    """The largest of some modules that only one other of them imports: what came in last is most likely among these."""
    graph = {module: imported_modules(f"megatron_llama.{module}") for module in modules}
    sole = []
    for module in modules:
        owners = [owner for owner in modules if f"megatron_llama.{module}" in graph[owner]]
        if len(owners) == 1:
            sole.append((len(MODULES[f"megatron_llama.{module}"].read_text().splitlines()), module, owners[0]))
    return ", ".join(f"{module} ({lines}, by {owner})" for lines, module, owner in sorted(sole, reverse=True)[:20])


def lines_of(modules: Iterable[str]) -> int:
    return sum(len(MODULES[f"megatron_llama.{module}"].read_text().splitlines()) for module in modules)


def beyond(wall: str, modules: Sequence[str]) -> list[str]:
    """Those of some modules that are across a wall."""
    return [module for module in modules if module.split(".")[0] not in WALLS[wall][2]]


@pytest.mark.parametrize("wall", WALLS)
def test_what_an_import_pulls_in_stays_within_its_walls(wall: str, fresh: Launcher) -> None:
    """The engine loads no configuration, no model and no world; a step loads no data, no checkpoints and no trainer; that one, none of the
    rooms that hang on it by ``hooks.py``. The order of rooms says what files may import; this, what is there when they have."""
    code, most, _ = WALLS[wall]
    found = loaded(fresh, code)
    assert beyond(wall, found) == []
    lines = lines_of(found)
    assert lines <= most, f"{wall}: {lines} lines; one import alone brings each of: {brought_by_one_import(found)}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("wall", "importer", "imported"),
    [
        ("shard", "engine/shard/passes.py", "config.schema"),
        ("step", "pipeline/runtime.py", "data.loader"),
        ("train", "train/run/loop.py", "planner.links"),
    ],
)
def test_one_import_across_a_wall_is_named(tmp_path: Path, wall: str, importer: str, imported: str, fresh: Launcher) -> None:
    shutil.copytree(PACKAGE, tmp_path / "megatron_llama", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "megatron_llama" / importer).open("a") as file:
        file.write(f"import megatron_llama.{imported}\n")
    assert imported in beyond(wall, loaded(fresh, WALLS[wall][0], tmp_path))


def test_no_globals_and_no_mutable_module_state() -> None:
    wrong = []
    for path in FILES:
        wrong += [f"{where(path, node)} global" for node in nodes(path) if isinstance(node, ast.Global)]
        for node in tree(path).body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            mutable = isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp)
            if isinstance(value, ast.Call):
                maker = value.func.value if isinstance(value.func, ast.Subscript) else value.func
                mutable = isinstance(maker, ast.Name) and maker.id in ("dict", "list", "set", "defaultdict", "deque", "Counter")
            if mutable:
                wrong.append(f"{where(path, node)} mutable module-level value; use a tuple, frozenset or MappingProxyType")
    assert wrong == []


def test_the_environment_is_read_in_four_files() -> None:
    allowed = {"cli.py", "launch/launcher.py", "launch/join.py", "data/tokenizer/library.py"}
    found = [
        where(path, node)
        for path in FILES
        if str(path.relative_to(PACKAGE)) not in allowed
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv")
    ]
    assert found == []


def test_files_are_renamed_in_one_file() -> None:
    """``files.py`` writes a file whole or not at all. The others rename folders (the first four), two files that belong together, or a file
    whose name is known at its end."""
    others = {"folders.py", "checkpoint_dir.py", "token_store.py", "preprocess.py", "indexed.py", "block_cache.py"}
    found = [
        where(path, node)
        for path in FILES
        if path != PACKAGE / "files.py" and path.name not in others
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        # Path.replace has one argument, that of texts two.
        if node.func.attr == "rename" or ast.unparse(node.func) == "os.replace" or (node.func.attr == "replace" and len(node.args) == 1 and not node.keywords)
    ]
    assert found == []


OPTION = re.compile(r"cuda[-_]graph")
"""In Megatron's names of options."""


def test_only_the_device_module_names_an_accelerator() -> None:
    found = []
    for path in FILES:
        if path == PACKAGE / "engine" / "comm" / "device.py":
            continue
        docs = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
        for node in nodes(path):
            named = isinstance(node, ast.Constant) and isinstance(node.value, str) and "cuda" in OPTION.sub("", node.value) and id(node) not in docs
            if named or (isinstance(node, ast.Attribute) and node.attr == "cuda"):
                found.append(where(path, node))
    assert found == []


@pytest.mark.long
def test_threads_are_started_by_the_device_module() -> None:
    """A thread begins on device 0, whatever the device of its rank: ``start_thread`` and ``thread_pool`` in ``engine/comm/device.py`` choose
    the rank's. Three files touch no device, and need not load that module: the watch and what follows the launcher, whose threads have to
    work while a device hangs, and ``preprocess``, whose processes have no torch."""
    deviceless = {"launch/watch.py", "launch/orphan.py", "data/workers.py"}
    starters = ("Thread", "Timer", "ThreadPoolExecutor", "ThreadPool", "start_new_thread")
    found = []
    for path in FILES:
        name = str(path.relative_to(PACKAGE))
        if name == "engine/comm/device.py":
            continue
        imported = {imported for _, imported in imports(path)}
        if name in deviceless:
            assert not any("device" in each for each in imported), name
            continue
        found += [
            where(path, node)
            for node in nodes(path)
            if isinstance(node, ast.Call) and called(node) in starters
        ]
        found += [
            where(path, node) for node in nodes(path) if isinstance(node, ast.ClassDef) and set(starters) & set(_bases(node))
        ]
    assert found == []


def test_strategies_are_compared_in_one_file() -> None:
    names = {"no_shard", "optim", "optim_grads", "optim_grads_params"}
    found = [
        where(path, node)
        for path in FILES
        if path != PACKAGE / "engine" / "plan" / "buckets.py"
        for node in nodes(path)
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        if isinstance(side, ast.Constant) and side.value in names
    ]
    assert found == []


def _classes() -> dict[str, list[ast.ClassDef]]:
    found: dict[str, list[ast.ClassDef]] = {}
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def _bases(owner: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in owner.bases]


def _methods(owner: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in owner.body if isinstance(node, ast.FunctionDef)}


def _lineage(owner: ast.ClassDef, classes: dict[str, list[ast.ClassDef]]) -> Iterator[ast.ClassDef]:
    """A class and its base classes in the package."""
    yield owner
    for name in _bases(owner):
        for base in classes.get(name, ()):
            if base is not owner:
                yield from _lineage(base, classes)


def _documented_elsewhere(module: str, owner: ast.ClassDef, name: str, classes: dict[str, list[ast.ClassDef]]) -> bool:
    """Whether a method implements one that has a docstring: of a base class, or of a protocol whose public methods the class all has. What
    base classes of other libraries have is documented there."""
    lineage = list(_lineage(owner, classes))
    own = {method for each in lineage for method in _methods(each)}
    protocols = [each for group in classes.values() for each in group if "Protocol" in _bases(each)]
    implemented = [
        each
        for each in protocols
        # A property of a protocol may be a plain attribute of the class.
        if {name for one in _lineage(each, classes) for name, node in _methods(one).items() if name[0] != "_" and not node.decorator_list}
        <= own
    ]
    for each in (*lineage[1:], *(base for protocol in implemented for base in _lineage(protocol, classes))):
        if each is not owner and name in _methods(each) and ast.get_docstring(_methods(each)[name]):
            return True
    if not any(base not in classes and base != "Protocol" for each in lineage for base in _bases(each)):
        return False
    theirs = [base for base in getattr(import_module(module), owner.name).__mro__ if not base.__module__.startswith("megatron_llama")]
    return any(name in vars(base) for base in theirs)


def test_public_things_are_documented() -> None:
    classes = _classes()
    missing = []

    def check(module: str, path: Path, owner: ast.AST) -> None:
        for node in ast.iter_child_nodes(owner):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if any(ast.unparse(each) == "overload" for each in node.decorator_list):
                continue  # the implementation has the docstring
            if not ast.get_docstring(node):
                method = isinstance(owner, ast.ClassDef) and isinstance(node, ast.FunctionDef)
                if not (method and _documented_elsewhere(module, owner, node.name, classes)):  # type: ignore[arg-type]
                    missing.append(f"{where(path, node)} {node.name}")
            if isinstance(node, ast.ClassDef):
                check(module, path, node)

    for module, path in MODULES.items():
        if not ast.get_docstring(tree(path)):
            missing.append(f"{where(path, tree(path))} module")
        check(module, path, tree(path))
    assert missing == []


def test_nothing_is_left_over() -> None:
    words = ("TO" + "DO", "FIX" + "ME", "X" + "XX", "NotImplemented" + "Error", "pytest." + "skip", "mark." + "skip", "mark." + "xfail")
    folders = ("megatron_llama", "tools", "tests", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh")]
    found = [f"{path.relative_to(ROOT)}: {word}" for path in files for word in words if word in path.read_text()]
    assert found == []


def test_the_checkout_under_test_is_this_one() -> None:
    spec = find_spec("megatron_llama")
    assert spec is not None and spec.origin is not None and Path(spec.origin).is_relative_to(PACKAGE)


def test_the_document_of_the_api_is_current(fresh: Launcher) -> None:
    """It is written from docstrings, of which any change may be one of what is exported."""
    found = fresh.run([], code="from tools.api_docs import api_markdown; print(api_markdown(), end='')").ok().out
    assert (ROOT / "docs" / "api.md").read_text() == found, "run python -m tools.api_docs docs/api.md"


def test_every_page_of_the_documentation_is_on_the_site() -> None:
    """Each at a place of its own in the navigation, which is the order in which somebody new needs them."""
    found: list[str] = []

    def walk(entry: object) -> None:
        if isinstance(entry, str):
            found.append(entry)
        for inner in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
            walk(inner)

    walk(yaml.safe_load((ROOT / "tools" / "docs_site" / "mkdocs.yml").read_text())["nav"])
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    folders = [ROOT / "examples", *(path for path in (ROOT / "examples").iterdir() if path.is_dir() and path.name != "__pycache__")]
    shown = [f"{path.relative_to(ROOT)}{'/index' if path.name == 'examples' else ''}.md" for path in folders]
    assert sorted(found) == sorted(["index.md", *pages, *shown])


def test_each_line_of_the_page_of_inputs_names_a_test() -> None:
    page = (ROOT / "docs" / "inputs.md").read_text()
    named = re.findall(r"\| `([\w/]+\.py)::(test_\w+)` \|$", page, re.MULTILINE)
    lines = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith(("| kind |", "| report |"))]
    assert len(named) == len(lines) > 60
    for file, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), f"docs/inputs.md: no {name} in {file}"


def test_the_step_is_read_in_an_evening() -> None:
    """The files that docs/architecture.md lists, from the table of parameters to the updated shard."""
    section = re.search(r"^## The reading spine\n(.*?)^## ", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None
    rows = [line.split("|")[1] for line in section[1].splitlines() if line.startswith("| `")]
    spine = [PACKAGE / name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    # Each step of the way has a file here; a list without one of them would be short by leaving something out.
    assert {"params.py", "buckets.py", "prefetch.py", "builders.py", "loop.py", "runtime.py", "llama.py", "linear.py"} <= {path.name for path in spine}
    assert {"parameters.py", "gradients.py", "optimizer.py", "update_rule.py"} <= {path.name for path in spine}
    lines = sum(len(path.read_text().splitlines()) for path in spine)
    assert lines <= 5_500, f"the reading spine has {lines} lines"


def test_the_package_is_as_large_as_the_readme_says(fresh: Launcher) -> None:
    """Within a twentieth: the figures are an order of magnitude, and no page to change with every line."""
    said = re.search(r"loads ([\d,]+)\s+lines, `megatron_llama.train` ([\d,]+);\s+the whole package has ([\d,]+)", (ROOT / "README.md").read_text())
    assert said is not None
    shard, train = (lines_of(loaded(fresh, code)) for code in (SHARD, "ml.train"))
    whole = sum(len(path.read_text().splitlines()) for path in FILES)
    for figure, true in zip(said.groups(), (shard, train, whole), strict=True):
        assert abs(int(figure.replace(",", "")) - true) <= true / 20, f"README.md says {figure}, and it is {true:,}"
