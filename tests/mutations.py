"""Drawn mutations: small changes of functions of the package, as a slip of the hand makes them.

``CATALOGUE`` is for ``tests/plant.py`` and ``tools/fault_matrix``. What is drawn depends on the source alone, so that two trees with one
package have the same, whatever their tests are. A mutation may change nothing that anyone could notice (the order of two calls, a bound
that is never met): the share that is found says less than which one is found no more after tests have changed.
"""

from __future__ import annotations

import ast
import copy
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1] / "megatron_llama"
COUNT, SEED = 80, 11
UNSEEN = ("integrations/lightning", "common/harness", "kernel", "benchmark")
"""Words in names of files that only a GPU runs, that need a package of another environment, or that measure."""
REACHED = "_a_test_reached_this"
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
TOLD = frozenset({"describe", "info", "warning", "warn", "print"})
"""Functions whose arguments are words for a reader."""


def changes_of(node: ast.AST) -> tuple[Callable[[], None], ...]:
    """Return what could be changed at a node of a syntax tree, each as a function that changes it in place."""

    def put(owner: Any, name: str, value: Any) -> Callable[[], None]:
        return lambda: setattr(owner, name, value)

    match node:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPPED:
            return (lambda: node.ops.__setitem__(0, SWAPPED[type(operator)]()),)  # type: ignore[call-overload]
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in SWAPPED:
            return (put(node, "op", SWAPPED[type(operator)]()),)
        case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Compare | ast.BoolOp):
            return (put(node, "test", ast.UnaryOp(ast.Not(), test)),)
        case ast.Constant(value=bool(value)):
            return (put(node, "value", not value),)
        case ast.Constant(value=int(value)):
            return (put(node, "value", value + 1),)
        case ast.Expr(value=ast.Call()):
            return (put(node, "value", ast.Constant(None)),)
    return ()


def is_told(node: ast.AST) -> bool:
    """Whether all below a node is words, or what types are called."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert | ast.arguments):
        return True
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Name | ast.Attribute) and (called.id if isinstance(called, ast.Name) else called.attr) in TOLD


def places(function: ast.AST) -> Iterator[tuple[list[ast.stmt], ast.stmt, Callable[[], None]]]:
    """Yield all changes of a function, with the innermost statement that has them and the list in which it stands."""

    def below(node: ast.AST, block: list[ast.stmt], statement: ast.stmt) -> Iterator[tuple[list[ast.stmt], ast.stmt, Callable[[], None]]]:
        if is_told(node):
            return
        for change in changes_of(node):
            yield block, statement, change
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.stmt):
                    yield from below(child, value, child)
                elif isinstance(child, ast.AST):
                    yield from below(child, block, statement)

    assert isinstance(function, ast.FunctionDef)
    for statement in function.body:
        yield from below(statement, function.body, statement)


def functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions and methods of a module by their qualified names."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{prefix}{node.name}.")
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__repr"):
            yield prefix + node.name, node


@cache
def parsed(file: str) -> ast.Module:
    return ast.parse((PACKAGE.parent / file).read_text())


def code_of(module: CodeType, name: str, line: int) -> CodeType:
    """Return the code of a function in that of a module."""
    for value in module.co_consts:
        if isinstance(value, CodeType):
            if value.co_qualname == name and value.co_firstlineno == line:
                return value
            if f"{name}.".startswith(f"{value.co_qualname}."):
                return code_of(value, name, line)
    raise LookupError(name)


@dataclass(frozen=True)
class Mutation:
    """One change of one function."""

    file: str
    """Relative to the repository."""
    function: str
    number: int
    """Which of the changes that the function could have."""

    @cached_property
    def name(self) -> str:
        """Where it is, and the line before and after."""
        function, _ = self._trees()
        _, statement, change = [*places(function)][self.number]
        before = ast.unparse(statement).splitlines()
        change()
        lines = zip(before, ast.unparse(statement).splitlines(), strict=False)
        old, new = next(((old.strip(), new.strip()) for old, new in lines if old != new), (before[0], "nothing"))
        return f"{self.file.removeprefix('megatron_llama/')}:{statement.lineno} {self.function}: {old} -> {new}"

    def _trees(self) -> tuple[ast.FunctionDef, ast.Module]:
        tree = copy.deepcopy(parsed(self.file))
        return dict(functions(tree.body))[self.function], tree

    def _compiled(self, reached: bool) -> CodeType:
        """Return the code of the changed function, or of one that calls ``REACHED`` there."""
        function, tree = self._trees()
        line = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        block, statement, change = [*places(function)][self.number]
        if reached:
            block.insert(block.index(statement), ast.copy_location(ast.parse(f"{REACHED}_{self.number}()").body[0], statement))
        else:
            change()
        ast.fix_missing_locations(tree)
        return code_of(compile(tree, str(PACKAGE.parent / self.file), "exec", dont_inherit=True), self.function, line)

    def _function(self) -> FunctionType:
        owner: Any = import_module(self.file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        for part in self.function.split("."):
            owner = inspect.getattr_static(owner, part)
        owner = getattr(owner, "fget", None) or getattr(owner, "func", None) or getattr(owner, "__func__", None) or owner
        function = inspect.unwrap(owner)
        assert isinstance(function, FunctionType), f"{self.name}: {function}"
        return function

    @contextmanager
    def patch(self) -> Iterator[None]:
        """The change is in the code that the function has, whoever has imported it."""
        function = self._function()
        whole = function.__code__
        function.__code__ = self._compiled(reached=False)
        try:
            yield
        finally:
            function.__code__ = whole

    def record(self, reached: Callable[[], None]) -> None:
        """Have the function call ``reached`` whenever it comes to the changed statement."""
        function = self._function()
        function.__globals__[f"{REACHED}_{self.number}"] = reached
        function.__code__ = self._compiled(reached=True)


def draw(count: int, seed: int) -> list[Mutation]:
    """Return mutations of functions of the package, at most one of each."""
    chance = random.Random(seed)
    every = [
        Mutation(str(file.relative_to(PACKAGE.parent)), name, number)
        for file in sorted(PACKAGE.rglob("*.py"))
        if not any(word in str(file.relative_to(PACKAGE)) for word in UNSEEN)
        for name, function in functions(parsed(str(file.relative_to(PACKAGE.parent))).body)
        if not any("triton" in ast.unparse(decorator) or "setter" in ast.unparse(decorator) for decorator in function.decorator_list)
        for number, _ in enumerate(places(function))
    ]
    chance.shuffle(every)
    drawn: dict[tuple[str, str], Mutation] = {}
    for mutation in every:
        drawn.setdefault((mutation.file, mutation.function), mutation)
        if len(drawn) == count:
            break
    return [*drawn.values()]


CATALOGUE = draw(COUNT, SEED)
