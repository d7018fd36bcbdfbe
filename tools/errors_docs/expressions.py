"""What an expression says in a sentence, as far as the code alone tells."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from tools.errors_docs.templates import Hole, Template, either, joined

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_llama"
Words = Mapping[str, Template]
"""What the local names of a function say."""
NO_WORDS: Words = MappingProxyType({})
SAME_WORDS = frozenset(
    {
        *("str", "int", "float", "Path", "list", "tuple", "sorted", "set", "iter"),
        *("shown", "_shown", "_show", "_cut"),
    }
)
"""Functions whose result reads as their argument does."""
SAME_NAME = SAME_WORDS | {"repr", "sized"}
"""Functions whose result has the name of their argument, but not its words."""
HOLE_CHARACTERS = 40


class UnknownError(Exception):
    """The code alone does not tell the value of an expression."""


@dataclass(frozen=True)
class Module:
    """A file of the package."""

    path: Path
    root: Path = PACKAGE

    @property
    def name(self) -> str:
        """Its dotted place without the package's own name."""
        parts = self.path.relative_to(self.root).with_suffix("").parts
        return ".".join(parts).removesuffix(".__init__")

    @property
    def tree(self) -> ast.Module:
        return _parsed(self.path)

    def constant(self, name: str) -> object:
        """Return the value of a constant of this module, or of one that it imports."""
        for statement in self.tree.body:
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == name and statement.module:
                        return _imported(statement.module).constant(alias.name)
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            if isinstance(statement, ast.AnnAssign):
                targets = [statement.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                assert isinstance(statement, ast.Assign | ast.AnnAssign)
                return value_of(statement.value, self)
        raise UnknownError(name)


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imported(name: str) -> Module:
    place = PACKAGE.joinpath(*name.split(".")[1:])
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if name.startswith("megatron_llama.") and path.exists():
            return Module(path)
    raise UnknownError(name)


def value_of(node: ast.AST | None, module: Module, words: Words = NO_WORDS) -> object:
    """Return the value of an expression of constants. Names in ``words`` are none."""
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name) if name not in words:
            return module.constant(name)
        case ast.Tuple(items) | ast.List(items) | ast.Set(items):
            values: list[object] = []
            for item in items:
                if isinstance(item, ast.Starred):
                    values += _items(value_of(item.value, module, words))
                else:
                    values.append(value_of(item, module, words))
            return tuple(values)
        case ast.Dict(keys):
            return tuple(value_of(key, module, words) for key in keys)
        case ast.BinOp(left, operator, right):
            return _computed(
                value_of(left, module, words), operator, value_of(right, module, words)
            )
        case ast.JoinedStr(parts):
            return "".join(str(value_of(part, module, words)) for part in parts)
        case ast.FormattedValue(value, conversion, spec):
            found = value_of(value, module, words)
            found = repr(found) if conversion == ord("r") else found
            return format(found, str(value_of(spec, module, words)) if spec else "")
        case ast.Call(ast.Attribute(separator, "join"), [items]):
            glue = value_of(separator, module, words)
            return str(glue).join(map(str, _items(value_of(items, module, words))))
        case ast.Call(ast.Name("frozenset" | "tuple" | "MappingProxyType"), [inner]):
            return value_of(inner, module, words)
        case _:
            raise UnknownError(node)


def _items(value: object) -> Iterable[object]:
    if not isinstance(value, tuple):
        raise UnknownError(value)
    return value


def _computed(left: object, operator: ast.operator, right: object) -> object:
    if isinstance(left, str) and isinstance(right, str) and isinstance(operator, ast.Add):
        return left + right
    if isinstance(left, int) and isinstance(right, int):
        match operator:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Pow():
                return left**right
            case ast.LShift():
                return left << right
    raise UnknownError(operator)


def said(node: ast.expr | None, module: Module, words: Words) -> Template:
    """Return what an expression says where the local names say ``words``."""
    try:
        return joined((str(value_of(node, module, words)),))
    except UnknownError:
        pass
    match node:
        case ast.Name(name) if name in words:
            return words[name]
        case ast.JoinedStr(parts):
            return joined(*(said(part, module, words) for part in parts))
        case ast.FormattedValue(value, -1):
            return said(value, module, words)
        case ast.BinOp(left, ast.Add(), right) if not _is_number(right):
            return joined(said(left, module, words), said(right, module, words))
        case ast.BinOp(left, ast.Div(), right):
            return joined(said(left, module, words), ("/",), said(right, module, words))
        case ast.Call(ast.Attribute(_, "with_name"), [name]):
            return joined((Hole("folder"), "/"), said(name, module, words))
        case ast.IfExp(_, body, orelse):
            said_at_times = [each for each in (body, orelse) if not _is_none(each)]
            return either(named(node), [said(each, module, words) for each in said_at_times])
        case ast.BoolOp(ast.Or(), values):
            templates = [said(value, module, words) for value in values]
            # Words are true: what stands behind them is never said.
            ends = [place for place, each in enumerate(templates, 1) if _is_sure(each)]
            return either(named(node), templates[: min(ends, default=len(values))])
        case ast.NamedExpr(_, value):
            return said(value, module, words)
        case ast.Call(ast.Name(function), [inner, *_]) if function in SAME_WORDS:
            return said(inner, module, words)
        case ast.Call(ast.Attribute(form, "format"), [inner]):
            before, _, after = str(value_of(form, module, words)).partition("{}")
            return joined((before,), said(inner, module, words), (after,))
        case ast.Call(ast.Name("flag"), [inner]):
            option = said(inner, module, words)
            if len(option) == 1 and isinstance(option[0], str):
                return (f"--{option[0]}".replace("_", "-"),)
            return joined(("--",), option)
        case _:
            return (Hole(named(node)),)


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_sure(template: Template) -> bool:
    return any(isinstance(piece, str) for piece in template)


def named(node: ast.AST | None) -> str:
    """Return the name of the placeholder for a value: short, and as a reader would call it."""
    match node:
        case ast.Name(name) | ast.Attribute(_, name) if name not in ("__name__", "__class__"):
            return name.strip("_")
        case ast.Attribute(ast.Call(ast.Name("type"), [inner]), _):
            return f"type of {named(inner)}"
        case ast.Call(ast.Attribute(_, "join"), [items]):
            return f"{named(items)}, ..."
        case ast.Call(ast.Name("map"), [_, items, *_]):
            return named(items)
        case (
            ast.GeneratorExp(generators=[generator, *_]) | ast.ListComp(generators=[generator, *_])
        ):
            return named(generator.iter)
        case ast.Call(ast.Name("getattr"), [_, attribute, *_]):
            return named(attribute)
        case ast.Call(ast.Attribute(_, "get"), [key, *_]):
            return named(key)
        case ast.Call(ast.Name("next"), [items, *_]):
            return f"one of {named(items)}"
        case ast.Constant(str(text)):
            return text
        case ast.Call(ast.Name("len" | "sum"), [items]):
            return f"number of {named(items)}"
        case ast.Call(ast.Name("min" | "max" as most), [items]):
            return f"{most} of {named(items)}"
        case ast.Call(ast.Name("counted"), [count, ast.Constant(thing), *_]):
            return f"{named(count)} {thing!s}s"
        case ast.Call(ast.Name(function), [inner, *_]) if function in SAME_NAME:
            return named(inner)
        case ast.Call(ast.Attribute(ast.Name("self" | "cls"), function)):
            return function.strip("_").replace("_", " ")
        case ast.Call(ast.Attribute(inner, function)):
            is_text = function in ("strip", "removeprefix", "removesuffix", "replace", "lower")
            return named(inner) if is_text else function.strip("_").replace("_", " ")
        case ast.Call(ast.Name(function)):
            return function.strip("_").replace("_", " ")
        case ast.Subscript(inner, ast.Slice()):
            return named(inner)
        case ast.Subscript(_, ast.Constant(str(key))):
            return key
        case ast.Subscript(ast.Subscript() as inner):
            return named(inner)
        case ast.Subscript(inner):
            return f"one of {named(inner)}"
        case ast.BoolOp(_, [inner, *_]) | ast.IfExp(_, inner, _) | ast.FormattedValue(inner):
            return named(inner)
        case ast.BinOp() | ast.Compare():
            text = ast.unparse(node)
            return text if len(text) <= HOLE_CHARACTERS else "a number"
        case _:
            return "..."
