"""The calls of the package that make an order on the device. Each is left out once: a detector that
then finds nothing would not find it missing either."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from tools.stream_check.events import Site
from tools.stream_check.order import place

ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = ROOT / "megatron_llama"
_DEVICE = _PACKAGE / "engine" / "comm" / "device.py"
_METHODS = frozenset(
    {"wait_event", "wait_stream", "record_event", "record", "record_stream", "synchronize"}
)
"""Of streams, events and tensors."""
_WORKS = frozenset({"work", "_work", "message"})
"""Names of what the backend returns for a message."""


_USERS = "shard"
"""The folder that asks the engine to wait for the weights of a user's module."""
_LAYERS = "nn"
"""The folder whose layers wait for messages of their own."""
_ELSEWHERE = frozenset({"host", "planner"})
"""Folders that no run on a device enters."""


@dataclass(frozen=True)
class Call:
    """A call that records an event, or that waits for a stream, an event or a message."""

    file: str
    """Relative to the repository."""
    first: int
    last: int
    """The lines that it takes."""
    text: str

    @property
    def site(self) -> Site:
        """Where it begins."""
        return Site(self.file, self.first)

    def __str__(self) -> str:
        return f"{place(self.site)} {self.text}"

    def has(self, site: Site) -> bool:
        """Whether what was done at ``site`` was done by this call."""
        return site.file == self.file and self.first <= site.line <= self.last


_CLOCK = "the host waits to read a clock or to fail here, and no memory depends on it"
_MEASURING = frozenset({"devices.synchronize", "devices.timed_event"})
"""Functions of ``device.py`` that exist for measurements."""


_CHECKING = "engine/shard/backward.py"
"""The file whose waits for parameters only check."""
_CHECK = "an access has waited already: this raises where the slot holds another unit meanwhile"


_CHUNKS = "model/nn/head.py"
_UNRECORDED = "no layout here has so many logits that the head computes in chunks"


def reason(call: Call) -> str:
    """Return why no race is expected without the call; "" if one is."""
    called = call.text.partition("(")[0]
    if call.file.endswith(_CHECKING) and called.endswith(".wait_unsharded"):
        return _CHECK
    if call.file.endswith(_CHUNKS):
        return _UNRECORDED
    return _CLOCK if called in _MEASURING else ""


@cache
def calls() -> tuple[Call, ...]:
    """Return all such calls of the package, in the order of files and lines.

    A call in ``device.py`` counts where that module's function is called. In ``engine/shard/`` a
    call that lets the engine wait counts as well, and in ``model/nn/`` one that waits for a
    message; those below them are planted too. What only hosts run (folders ``host``) makes no order
    on a device, and no run enters ``planner``. Raises ValueError for two on one line: the recording
    could not tell them apart."""
    functions = frozenset(_functions_of_device())
    found = []
    for path in sorted(_PACKAGE.rglob("*.py")):
        if path == _DEVICE or _ELSEWHERE & set(path.parts):
            continue
        file = str(path.relative_to(ROOT))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        ordered = _messages_in_order(tree)
        here = [
            Call(file, node.lineno, node.end_lineno or node.lineno, ast.unparse(node))
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and (
                _makes_order(node, functions)
                or (_USERS in path.parts and _lets_wait(node))
                or (_LAYERS in path.parts and _waits_for_message(node, ordered))
            )
        ]
        here.sort(key=lambda call: call.first)
        for one, other in pairwise(here):
            if other.first <= one.last:
                raise ValueError(f"{one} and {other} share a line; write them apart")
        found += here
    return tuple(found)


def _functions_of_device() -> Iterator[str]:
    for node in ast.parse(_DEVICE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and any(
            isinstance(inner, ast.Call) and _makes_order(inner, frozenset())
            for inner in ast.walk(node)
        ):
            yield node.name


def _lets_wait(call: ast.Call) -> bool:
    """Whether the engine is asked to wait: ``wait_unsharded(...)``, ``all_gather(...).wait()``."""
    if not isinstance(call.func, ast.Attribute):
        return False
    name = call.func.attr
    return name == "wait_unsharded" or (name == "wait" and isinstance(call.func.value, ast.Call))


def _messages_in_order(tree: ast.AST) -> frozenset[int]:
    """Return the lines of waits for messages with ``async_op=False``, which have their order from
    the stream that computes."""
    lines = set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                words = {word.arg: ast.unparse(word.value) for word in node.value.keywords}
                if words.get("async_op") == "False":
                    names |= {n.id for n in ast.walk(node.targets[0]) if isinstance(n, ast.Name)}
        lines |= {
            node.lineno
            for node in ast.walk(function)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) in names
        }
    return frozenset(lines)


def _waits_for_message(call: ast.Call, ordered: frozenset[int]) -> bool:
    """Whether a layer waits for a message that it has started before: ``gathering.wait()``. One
    that is waited for where it is issued has its order from the stream."""
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "wait"
        and not isinstance(call.func.value, ast.Call)
        and call.lineno not in ordered
    )


def _makes_order(call: ast.Call, functions: frozenset[str]) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    owner = ast.unparse(call.func.value)
    name = call.func.attr
    if owner == "devices":
        return name in functions
    return name in _METHODS or (name == "wait" and owner.rpartition(".")[2] in _WORKS)
