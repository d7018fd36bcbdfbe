"""The sites of the package that make the sentences of errors, each with a key and its words.

A key is the place: the dotted name of the function without ``megatron_llama.``, and ``:2`` for the
second sentence in it. A sentence is made where a call names ``got``, ``expected`` and ``do``, where
a list of problems gets its title, and where an error gets a whole message. What only passes on the
words of its callers makes none.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tools.errors_docs.expressions import PACKAGE, Module, Words, named, said
from tools.errors_docs.templates import Hole, Template, either, has_words, joined, pattern, shown

PARTS = ("where", "got", "expected", "do")
MAKES = re.compile(r"\bexpected=|\b(listing|refuse)\(|Error\(\s*f?\"|\b_?(problem|error)\(")
"""What a file has somewhere that makes sentences. Most files are not looked at further."""
USER_ERRORS = frozenset(
    {
        *("UserError", "ConfigError", "DataError", "CheckpointError", "LeaseError"),
        *("ClusterError", "OffloadError", "TrainingError", "ScheduleError"),
    }
)
PASSING_ON = frozenset(
    {
        *("errors.UserError.__init__", "config.fields.Fields.problem"),
        *("config.parse._Reader.problem", "checkpoint.index._IndexReader._error"),
        "converter.torch_dist.flat_buckets.FlatBuckets._error",
        *(
            "engine.shard.optimizer_states._Loading._problem",
            "train.doctor.findings.Finding.problem",
        ),
        *("tune.sft.problems.UnusableError.at", "tune.sft.problems.UnusableError.followed"),
        "data.tokenizer.library.foreign_reader",
    }
)
"""Functions that make sentences of the words that their callers give. The callers have the keys."""
PASSING_METHODS = frozenset(
    (module, method) for module, _, method in (place.rsplit(".", 2) for place in PASSING_ON)
)
"""Module and name of those that are methods."""
FIELDS = Module(PACKAGE / "config" / "fields.py")
"""Has the ``problem`` of the readers that define none."""


@dataclass(frozen=True, eq=False)
class Site:
    """A place that makes a sentence."""

    key: str
    file: Path
    lines: range
    parts: Mapping[str, Template]
    """Those of ``PARTS``, or ``title`` alone."""

    @property
    def sentence(self) -> Template:
        """Return the whole."""
        if "title" in self.parts:
            return self.parts["title"]
        where, got, expected, do = (self.parts[name] for name in PARTS)
        return joined(where, (": got ",), got, (", expected ",), expected, ("; ",), do)

    @property
    def text(self) -> str:
        """The sentence as the page shows it, on one line."""
        return shown(self.sentence).strip().replace("\n", " ↵ ")

    @property
    def pattern(self) -> str:
        """A regular expression of the sentences of this site, with a group for each part."""
        groups = {name: f"(?P<{name}>{pattern(part)})" for name, part in self.parts.items()}
        if "title" in groups:
            return groups["title"]
        return "{where}: got {got}, expected {expected}; {do}".format(**groups)


@cache
def all_sites() -> tuple[Site, ...]:
    """Return the sites of the package, by place."""
    return tuple(site for path in sorted(PACKAGE.rglob("*.py")) for site in sites_of(path))


@cache
def sites_of(path: Path, root: Path = PACKAGE) -> tuple[Site, ...]:
    """Return the sites of a file of the package at ``root``, in its order."""
    if not MAKES.search(path.read_text(encoding="utf-8")):
        return ()
    reading = _Reading(Module(path, root))
    reading.block(reading.module.tree.body, {})
    numbers: Counter[str] = Counter()
    sites = []
    for call, place, parts in sorted(reading.calls, key=lambda item: _position(item[0])):
        numbers[place] += 1
        key = place if numbers[place] == 1 else f"{place}:{numbers[place]}"
        lines = range(call.lineno, (call.end_lineno or call.lineno) + 1)
        sites.append(Site(key, path, lines, parts))
    return tuple(sites)


def _position(call: ast.Call) -> tuple[int, int]:
    return call.lineno, call.col_offset


@dataclass
class _Reading:
    """Goes through the statements of a file in their order, with what local names say there."""

    module: Module
    calls: list[tuple[ast.Call, str, Mapping[str, Template]]] = field(default_factory=list)
    scopes: list[str] = field(default_factory=list)

    def block(self, statements: Sequence[ast.stmt], words: dict[str, Template]) -> bool:
        """Follow statements, which change ``words``. Return whether they leave the block."""
        leaves = False
        for statement in statements:
            leaves = self._statement(statement, words) or leaves
        return leaves

    def _statement(self, statement: ast.stmt, words: dict[str, Template]) -> bool:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self._definition(statement, words)
            case ast.If(test, body, orelse):
                self._expressions(test, words)
                return self._branches([body, orelse], words)
            case ast.For(target, iterable, body, orelse):
                self._expressions(iterable, words)
                self._bind(target, None, words)
                self._branches([body, orelse], words)
            case ast.While(test, body, orelse):
                self._expressions(test, words)
                self._branches([body, orelse], words)
            case ast.With(items, body):
                for item in items:
                    self._expressions(item.context_expr, words)
                    if item.optional_vars is not None:
                        self._bind(item.optional_vars, None, words)
                return self.block(body, words)
            case ast.Try(body, handlers, orelse, final):
                names = [handler.name for handler in handlers if handler.name]
                words.update((name, (Hole(name),)) for name in names)
                left = self._branches(
                    [[*body, *orelse], *(handler.body for handler in handlers)], words
                )
                return self.block(final, words) or left
            case ast.Match(subject, cases):
                self._expressions(subject, words)
                for case in cases:
                    for node in ast.walk(case.pattern):
                        name = getattr(node, "name", None)
                        if isinstance(name, str):
                            words[name] = (Hole(name),)
                self._branches([*(case.body for case in cases), []], words)
            case _:
                self._expressions(statement, words)
                if isinstance(statement, ast.Assign):
                    for target in statement.targets:
                        self._bind(target, statement.value, words)
                elif isinstance(statement, ast.AnnAssign) and statement.value:
                    self._bind(statement.target, statement.value, words)
                elif isinstance(statement, ast.AugAssign):
                    self._append(statement, words)
                return isinstance(statement, ast.Return | ast.Raise | ast.Continue | ast.Break)
        return False

    def _definition(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef,
        words: dict[str, Template],
    ) -> None:
        inner = dict(words)
        if not isinstance(node, ast.ClassDef):
            arguments = node.args
            extra = [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
            for argument in [
                *arguments.posonlyargs,
                *arguments.args,
                *arguments.kwonlyargs,
                *extra,
            ]:
                inner[argument.arg] = (Hole(argument.arg.strip("_")),)
        self.scopes.append(node.name)
        self.block(node.body, inner)
        self.scopes.pop()

    def _branches(self, branches: Sequence[Sequence[ast.stmt]], words: dict[str, Template]) -> bool:
        """Follow each branch from the same words, which become those of the branches that go on."""
        ends = []
        for branch in branches:
            own = dict(words)
            if not self.block(branch, own):
                ends.append(own)
        names = {name for own in ends for name in own}
        for name in names:
            words[name] = either(name, [own[name] for own in ends if name in own])
        return not ends

    def _bind(self, target: ast.expr, value: ast.expr | None, words: dict[str, Template]) -> None:
        match target, value:
            case ast.Name(), _ if not self.scopes:
                pass  # a constant of the module, which is looked up where it is used
            case ast.Name(name), ast.Constant(None):
                words.pop(name, None)  # it is not said as long as nothing else is known of it
            case ast.Name(name), None:
                words[name] = (Hole(name.strip("_")),)
            case ast.Name(name), _:
                template = said(value, self.module, words)
                own = (Hole(name.strip("_")),)  # the name says more than what computes the value
                words[name] = template if has_words(template) else own
            case ((ast.Tuple(targets) | ast.List(targets)), (ast.Tuple(values) | ast.List(values))):
                for part, inner in zip(targets, values, strict=False):
                    self._bind(part, inner, words)
            case ((ast.Tuple(targets) | ast.List(targets)), _):
                for part in targets:
                    self._bind(part, None, words)
            case ast.Starred(inner), _:
                self._bind(inner, None, words)

    def _append(self, statement: ast.AugAssign, words: dict[str, Template]) -> None:
        if isinstance(statement.target, ast.Name) and statement.target.id in words:
            name = statement.target.id
            is_text = isinstance(statement.op, ast.Add) and has_words(words[name])
            more = said(statement.value, self.module, words)
            words[name] = joined(words[name], more) if is_text else (Hole(name),)

    def _expressions(self, node: ast.AST, words: dict[str, Template]) -> None:
        """Note the sentences that a statement or an expression makes."""
        inner_nodes = list(ast.walk(node))
        for inner in inner_nodes:
            if isinstance(inner, ast.NamedExpr):
                self._bind(inner.target, inner.value, words)
        local = dict(words)
        for inner in inner_nodes:
            if isinstance(inner, ast.comprehension):
                self._bind(inner.target, None, local)
        for inner in inner_nodes:
            if isinstance(inner, ast.Call):
                parts = self._parts(inner, local)
                if parts is not None:
                    place = ".".join([self.module.name, *self.scopes])
                    self.calls.append((inner, place, parts))

    def _parts(self, call: ast.Call, words: Words) -> Mapping[str, Template] | None:
        """Return the words of the parts of a sentence, or None if a call makes none."""
        helper = self._helper(call)
        nodes = _nodes(call)
        if helper is None and nodes is None:
            return None
        if ".".join([self.module.name, *self.scopes]) in PASSING_ON:
            return None
        if helper is not None:
            return self._helped(call, *helper, words)
        assert nodes is not None
        parts = {name: self._said(node, name, words) for name, node in nodes.items()}
        if named(call.func) == "UnusableError":
            known = joined((Hole("place"), ": field '"), parts["where"], ("'",))
            parts["where"] = known if nodes["where"] is not None else (Hole("place"),)
        # A title or message without words of its own is one that was made elsewhere.
        return parts if "title" not in parts or has_words(parts["title"]) else None

    def _said(self, node: ast.expr | None, name: str, words: Words) -> Template:
        return (Hole(name),) if node is None else said(node, self.module, words)

    def _helper(self, call: ast.Call) -> tuple[Module, ast.FunctionDef] | None:
        """Return the method of ``PASSING_ON`` that a call names, with its module."""
        match call.func:
            case ast.Attribute(_, name):
                pass
            case _:
                return None
        for module in (self.module, FIELDS):
            if (module.name, name) in PASSING_METHODS:
                for node in ast.walk(module.tree):
                    if isinstance(node, ast.FunctionDef) and node.name == name:
                        return module, node
        return None

    def _helped(
        self, call: ast.Call, module: Module, method: ast.FunctionDef, words: Words
    ) -> Mapping[str, Template]:
        """Return the parts of the sentence that a method makes of the words in a call."""
        arguments = [*method.args.args[1:], *method.args.kwonlyargs]
        names = [argument.arg for argument in arguments]
        given = {**dict(zip(names, call.args, strict=False)), **_keywords(call)}
        inner = {name: self._said(given.get(name), name, words) for name in names}
        reading = _Reading(module)
        reading.scopes.append(method.name)
        reading.block(method.body, inner)
        [(_, _, parts)] = reading.calls
        return parts


def _nodes(call: ast.Call) -> dict[str, ast.expr | None] | None:
    """Return what a call gives for each part of a sentence; None if it makes no sentence."""
    function = named(call.func)
    given = _keywords(call)
    if given.keys() >= {"got", "expected", "do"}:
        first = call.args[0] if call.args else None
        where = given.get("field") if function == "UnusableError" else first
        return {"where": where, **{name: given[name] for name in PARTS[1:]}}
    if function in ("unless", "Finding") and given.keys() >= {"expected", "do"}:
        where, got = call.args[-2:]
        return {"where": where, "got": got, "expected": given["expected"], "do": given["do"]}
    if function == "foreign_reader":
        return {"where": call.args[0], "got": None, **{name: given[name] for name in PARTS[2:]}}
    is_title = function == "listing" or (function == "refuse" and len(call.args) == 2)
    if is_title or (function in USER_ERRORS and _is_text(call.args)):
        return {"title": call.args[0]}
    return None


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def _is_text(arguments: Sequence[ast.expr]) -> bool:
    return len(arguments) == 1 and isinstance(
        arguments[0], ast.JoinedStr | ast.Constant | ast.BinOp
    )
