"""jinja's sandbox with bounds: a template that loops, or makes a text of texts of texts, ends with
an error instead of taking the machine down.

Repetitions (loops, calls, filters) count their steps and look at the clock. Makers of a text or a
list count its characters before they make it, since one operation of Python cannot be interrupted:
``'a' * 10**10`` is one. Walks through a value (comparisons, keys) count it too: lists that hold
each other have more entries than can be walked through.
"""

from __future__ import annotations

import re
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import BuiltinMethodType, MappingProxyType
from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_llama.config.limits import (
    TEMPLATE_CHARACTERS,
    TEMPLATE_CHARACTERS_OF_INPUT,
    TEMPLATE_INTEGER_BITS,
    TEMPLATE_SECONDS,
    TEMPLATE_SECONDS_OF_A_CHARACTER,
    TEMPLATE_STEPS,
)

_LOOP = "bounded loop"
_JOIN = "bounded join"
_WALK = "bounded walk"
"""Filters that no template can name. They replace loops and ``~``, and wrap keys and compared
values."""
_CLOCK_STEPS = 64
"""Steps between two looks at the clock."""
_OF_AN_ENTRY = 256
"""Characters for which an entry of a list counts, beside its own."""
_MEMORY_CHECKS = 4
"""The memory is read each time that texts of this fraction of the bound were made."""
_WIDTHS = re.compile(r"\d+")


class Budget:
    """The steps and characters that are left for one conversation."""

    def __init__(self) -> None:
        self._steps = 0
        self._characters = 0
        self._most = TEMPLATE_CHARACTERS
        self._seconds = TEMPLATE_SECONDS
        self._end = time.thread_time() + TEMPLATE_SECONDS
        self._resident: int | None = None

    def widen(self, conversation: object) -> None:
        """Allow the needs of a conversation of this size."""
        characters = self.size(conversation)
        self._most += TEMPLATE_CHARACTERS_OF_INPUT * characters
        more = TEMPLATE_SECONDS_OF_A_CHARACTER * characters
        self._seconds += more
        self._end += more

    def step(self) -> None:
        """Count one pass of a loop, or one call. Raises TemplateRuntimeError beyond the bounds."""
        self._steps += 1
        if self._steps > TEMPLATE_STEPS:
            raise TemplateRuntimeError(f"more than {TEMPLATE_STEPS:,} passes of loops and calls")
        if self._steps % _CLOCK_STEPS == 0:
            self._look_at_clock()

    def _look_at_clock(self) -> None:
        if time.thread_time() > self._end:
            raise TemplateRuntimeError(f"more than {self._seconds:.3g} s of the processor")

    def take(self, characters: int) -> None:
        """Count characters that are about to be made. Raises TemplateRuntimeError beyond the
        bounds."""
        self._characters += characters
        if self._characters <= self._most // _MEMORY_CHECKS:
            return
        # Most texts are dropped again: a template that gathers its text makes it anew with each
        # piece. Only the size of one text and the kept memory count. Few templates come here, so
        # the others need not pay for a look at the memory before they begin.
        resident = _resident_bytes()
        if self._resident is None:
            self._resident = resident
        if characters > self._most or resident - self._resident > self._most:
            raise TemplateRuntimeError(f"texts of more than {self._most:,} characters together")
        self._characters = 0
        self._look_at_clock()

    def size(self, value: Any) -> int:
        """Return about how many characters a value takes as text. Raises TemplateRuntimeError if it
        takes more than the budget has: lists that hold each other can stand for more entries than
        there are atoms."""
        if isinstance(value, str):
            return len(value)
        total = 0
        open_values = [value]
        while open_values:
            value = open_values.pop()
            if isinstance(value, str):
                total += len(value)
            elif isinstance(value, list | tuple | set | frozenset):
                total += _OF_AN_ENTRY * len(value)
                open_values += value
            elif isinstance(value, Mapping):
                total += _OF_AN_ENTRY * len(value)
                open_values += value.keys()
                open_values += value.values()
            if total > self._most:
                self.take(total)
        return total


def _resident_bytes() -> int:
    """Return the memory of this process now; without ``/proc``, the most that it has ever had."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox in which chat templates run."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._output, **options)
        self._local = threading.local()
        # lipsum makes any number of paragraphs of random words.
        del self.globals["lipsum"]
        for name, function in [*self.filters.items()]:
            self.filters[name] = self._bounded_filter(name, function)
        self.filters[_LOOP] = self._loop
        self.filters[_JOIN] = self._join
        self.filters[_WALK] = self._walked
        for name in _COMPARING & self.tests.keys():
            self.tests[name] = self._bounded_test(cast(Callable[..., bool], self.tests[name]))

    def bound(self, name: str, function: Callable[..., Any]) -> None:
        """Add a filter whose results are counted."""
        self.filters[name] = self._bounded_filter(name, function)

    def begin(self, conversation: object) -> None:
        """Begin to render a conversation in this thread."""
        self._local.budget = Budget()
        self._local.budget.widen(conversation)

    @property
    def _budget(self) -> Budget:
        """The budget of this thread. jinja computes constants when it compiles a template, which
        counts too."""
        if not hasattr(self._local, "budget"):
            self._local.budget = Budget()
        budget: Budget = self._local.budget
        return budget

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _LOOP, [], [], None, None).set_lineno(loop.lineno)
        _bound_joins(tree)
        for comparison in tree.find_all(nodes.Compare):
            _bound_comparison(comparison)
        for pair in tree.find_all(nodes.Pair):
            pair.key = _walk(pair.key)
        return tree

    def concat(self, parts: Iterable[str]) -> str:
        """Join the output of a template, a macro or a block."""
        # A part was counted where it was made, and a constant is no copy: only the whole is new.
        kept = list(parts)
        self._budget.take(sum(map(len, kept)))
        return "".join(kept)

    def _output(self, value: Any) -> Any:
        if not isinstance(value, str):
            self._budget.take(self._budget.size(value))
        return value

    def _join(self, parts: Sequence[Any]) -> str:
        budget = self._budget
        budget.step()
        budget.take(sum(map(budget.size, parts)))
        return "".join(map(str, parts))

    def _walked(self, value: Any) -> Any:
        if not isinstance(value, str):
            self._budget.size(value)
        return value

    def _bounded_test(self, function: Callable[..., bool]) -> Callable[..., bool]:
        @wraps(function)
        def bounded(*values: Any) -> bool:
            return function(*map(self._walked, values))

        return bounded

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an entry of a value."""
        # Only tuples can be keys and hold each other.
        return super().getitem(
            obj, self._walked(argument) if isinstance(argument, tuple) else argument
        )

    def _loop(self, iterable: Any) -> Any:
        # The loop itself refuses Undefined and the like.
        return _Counted(iterable, self._budget) if isinstance(iterable, Iterable) else iterable

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = self._budget
        budget.step()
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            budget.take(len(left) + len(right))
            return left + right
        if isinstance(left, int) and isinstance(right, int):
            bits = {
                "*": left.bit_length() + right.bit_length(),
                "**": left.bit_length() * max(right, 0),
            }
            if bits.get(operator, 0) > TEMPLATE_INTEGER_BITS:
                raise TemplateRuntimeError(f"a number of more than {TEMPLATE_INTEGER_BITS} bits")
        elif operator == "*":
            thing, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(times, int) and isinstance(thing, str | list | tuple):
                budget.take(_length(thing) * max(times, 0))
        elif operator == "+" and isinstance(left, str | list | tuple):
            budget.take(_length(left) + _length(right))
        elif operator == "%" and isinstance(left, str):
            budget.take(_formatted(budget, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = __self._budget
        budget.step()
        if isinstance(__obj, LoopContext) and args:  # a recursive loop begins another one
            args = (__self._loop(args[0]), *args[1:])
        owner = getattr(__obj, "__self__", None)
        # format is no method of the text any more: the sandbox has replaced it by its own.
        wrapped = getattr(getattr(__obj, "__wrapped__", None), "__self__", None)
        if isinstance(wrapped, str):
            budget.take(_formatted(budget, wrapped, (args, kwargs)))
        elif isinstance(__obj, BuiltinMethodType) and isinstance(owner, str | bytes | int):
            budget.take(_method_size(budget, __obj.__name__, owner, [*args, *kwargs.values()]))
        elif not isinstance(__obj, Macro | LoopContext):  # index, count, get, dict: these walk
            for value in (*args, *kwargs.values()):
                __self._walked(value)
        return super().call(__context, __obj, *args, **kwargs)

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that counts its result before it makes it."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            budget = self._budget
            budget.step()
            value, *others = args[first:] or (None,)
            others += kwargs.values()
            if name in _REPEATING:
                budget.take(_REPEATING[name](budget, value, others))
            elif name in _WHOLE and not isinstance(value, str):
                budget.take(budget.size(value))
            return function(*args, **kwargs)

        return bounded


class _Counted:
    """An iterable whose entries are steps."""

    def __init__(self, iterable: Iterable[Any], budget: Budget) -> None:
        self._iterable = iterable
        self._budget = budget

    def __len__(self) -> int:
        # jinja also asks values without a length, and expects a TypeError.
        return len(self._iterable)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for entry in self._iterable:
            self._budget.step()
            yield entry


def _bound_joins(node: nodes.Node) -> None:
    """Replace each ``~`` below a node by a filter."""

    def replaced(child: Any) -> Any:
        if isinstance(child, nodes.Node):
            _bound_joins(child)
        if not isinstance(child, nodes.Concat) or child.environment is None:
            return child
        listed = nodes.List(child.nodes)
        joined = nodes.Filter(listed, _JOIN, [], [], None, None)
        return joined.set_lineno(child.lineno, override=True).set_environment(child.environment)

    for name, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, name, [replaced(entry) for entry in value])
        else:
            setattr(node, name, replaced(value))


def _walk(node: nodes.Expr) -> nodes.Expr:
    """Return an expression whose value is counted, unless it is a constant."""
    if isinstance(node, nodes.Const):
        return node
    walk = nodes.Filter(node, _WALK, [], [], None, None)
    walk.set_lineno(node.lineno)
    return walk


def _bound_comparison(comparison: nodes.Compare) -> None:
    """Count the compared values, unless all but one operand are constants: they end the walk
    through the other one."""
    operands = [comparison.expr, *(operand.expr for operand in comparison.ops)]
    if sum(not _is_constant(operand) for operand in operands) < 2:
        return
    comparison.expr = _walk(comparison.expr)
    for operand in comparison.ops:
        operand.expr = _walk(operand.expr)


def _is_constant(node: nodes.Expr) -> bool:
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(map(_is_constant, node.items))
    return isinstance(node, nodes.Const)


def _length(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return _OF_AN_ENTRY * len(value) if isinstance(value, list | tuple) else 0


def _largest(values: Iterable[Any]) -> int:
    return max((value for value in values if isinstance(value, int)), default=0)


def _formatted(budget: Budget, form: str, values: Any) -> int:
    """Return about the most characters that a format may make of values."""
    widest = max((int(width[:12]) for width in _WIDTHS.findall(form)), default=0)
    # In %*d and {:{}} the width is one of the values.
    if "*" in form or (":" in form and "{" in form):
        widest = max(widest, _largest(_numbers(values)))
    places = form.count("{") + form.count("%")
    return len(form) + places * (budget.size(values) + widest)


def _numbers(values: Any) -> Iterator[int]:
    for value in values if isinstance(values, list | tuple) else [values]:
        if isinstance(value, int):
            yield value
        elif isinstance(value, list | tuple):
            yield from _numbers(value)
        elif isinstance(value, Mapping):
            yield from _numbers(list(value.values()))


def _replaced(budget: Budget, text: Any, others: Sequence[Any]) -> int:
    if len(others) < 2:
        return 0
    whole = str(text)
    old = str(others[0])
    places = whole.count(old) if old else len(whole) + 1
    return len(whole) + places * len(str(others[1]))


def _joined(budget: Budget, values: Any, others: Sequence[Any]) -> int:
    between = max((len(value) for value in others if isinstance(value, str)), default=0)
    count = len(values) if isinstance(values, list | tuple | set | Mapping) else 0
    return budget.size(values) + count * between


def _widened(budget: Budget, text: Any, others: Sequence[Any]) -> int:
    return budget.size(text) + _largest(others)


def _indented(budget: Budget, text: Any, others: Sequence[Any]) -> int:
    width = max([_largest(others), *(len(value) for value in others if isinstance(value, str))])
    return budget.size(text) + (str(text).count("\n") + 1) * width


def _wrapped(budget: Budget, text: Any, others: Sequence[Any]) -> int:
    between = max((len(value) for value in others if isinstance(value, str)), default=1)
    return budget.size(text) * (1 + between)


def _filled(budget: Budget, values: Any, others: Sequence[Any]) -> int:
    return _OF_AN_ENTRY * _largest(others)


def _percent(budget: Budget, form: Any, others: Sequence[Any]) -> int:
    return _formatted(budget, str(form), tuple(others))


_REPEATING: Mapping[str, Callable[[Budget, Any, Sequence[Any]], int]] = MappingProxyType(
    {
        "replace": _replaced,
        "join": _joined,
        "center": _widened,
        "indent": _indented,
        "wordwrap": _wrapped,
        "batch": _filled,
        "slice": _filled,
        "format": _percent,
    }
)
"""Filters whose results can be larger than their inputs, with about the number of characters."""
_COMPARING = frozenset(
    {"eq", "equalto", "==", "ne", "!=", "in", "lt", "lessthan", "<", "le", "<=", "gt"}
    | {"greaterthan", ">", "ge", ">="}
)
"""Tests that walk through their values."""
_WHOLE = frozenset(
    {"string", "tojson", "pprint", "e", "escape", "forceescape", "trim", "upper", "lower", "title"}
    | {"capitalize", "striptags", "urlencode", "urlize", "xmlattr", "truncate", "wordcount"}
    | {"replace", "list", "sort", "unique", "dictsort", "groupby", "sum", "min", "max"}
)
"""Filters that write or walk all of a value."""


def _method_size(budget: Budget, name: str, owner: Any, others: Sequence[Any]) -> int:
    """Return the number of characters that a method of a text or a number may make."""
    if name == "replace":
        return _replaced(budget, owner, others)
    if name == "join" and others:
        values = others[0]
        count = len(values) if isinstance(values, list | tuple | set | Mapping) else 0
        return budget.size(values) + count * len(owner)
    if name in ("center", "ljust", "rjust", "zfill", "to_bytes"):
        return _largest(others)
    if name == "expandtabs":
        return len(owner) * (1 + _largest(others))
    if name == "translate" and others and isinstance(owner, str):
        return len(owner) * (1 + budget.size(others[0]))
    return len(owner) if isinstance(owner, str | bytes) else 0
