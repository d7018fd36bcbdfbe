"""Chat templates: HuggingFace's jinja, in a sandbox, with the places of text in ``{% generation
%}``.

Templates come with models from anywhere, so they cannot read attributes that begin with an
underscore, or change their inputs. They see the same as in ``transformers``, and so give the same
text. Only arguments of calls that are JSON text become objects for a template that would encode
them once more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.utils import Namespace

from megatron_llama.config.limits import TEMPLATE_INDENT, TEMPLATE_SOURCE_CHARACTERS
from megatron_llama.data.tokenizer.chat_templates import (
    DEFAULT,
    TOOL_USE,
    TemplateSource,
    read_chat_templates,
    read_template,
)
from megatron_llama.errors import DataError, describe
from megatron_llama.tune.sft.bounded_jinja import BoundedEnvironment
from megatron_llama.tune.sft.built_in_templates import BUILT_IN
from megatron_llama.tune.sft.fields import REASONING
from megatron_llama.tune.sft.formats import MARKS
from megatron_llama.tune.sft.json_text import json_object, parsed
from megatron_llama.tune.sft.problems import UnusableError

_START, _END = MARKS


_ARGUMENTS = '{"a": "b"}'
_PROBE_TOOLS = ({"type": "function", "function": {"name": "f", "description": "F."}},)
_PROBE_RESULT = (
    {"role": "tool", "name": "f", "tool_call_id": "abcdefghi", "content": "c"},
    {"role": "assistant", "content": "d"},
)


def _probe(arguments: Any) -> tuple[dict[str, Any], ...]:
    """Return a conversation with a call, which most templates can render."""
    function = {"name": "f", "arguments": arguments}
    call = {"type": "function", "id": "abcdefghi", "function": function}
    question = {"role": "user", "content": "?"}
    return question, {"role": "assistant", "content": "", "tool_calls": [call]}


@dataclass(frozen=True)
class Rendered:
    """A conversation as text."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """Characters [start, stop) that ``{% generation %}`` encloses."""

    def answer_texts(self) -> list[str]:
        """Return the texts in ``{% generation %}``."""
        return [self.text[start:stop] for start, stop in self.answers]


class ChatTemplate:
    """One template. ``name``: its source, for messages; ``tokens``: ``bos_token`` and the like.
    Raises DataError if it is no jinja."""

    def __init__(
        self,
        source: str,
        name: str,
        tokens: Mapping[str, str],
        now: datetime | None = None,
        *,
        tool_use: ChatTemplate | None = None,
    ) -> None:
        """``now``: the time that the template sees; None: the clock's. ``tool_use``: another
        template for conversations with tools."""
        self.source = source
        self.name = name
        self.tool_use = tool_use
        if len(source) > TEMPLATE_SOURCE_CHARACTERS:
            raise DataError(
                name,
                got=f"{len(source):,} characters",
                expected=f"a template of {TEMPLATE_SOURCE_CHARACTERS:,} at most",
                do="give another --chat-template",
            )
        environment = self._environment = BoundedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.bound("tojson", _tojson)
        environment.globals.update(
            raise_exception=_raise,
            strftime_now=partial(_formatted, now),
            namespace=_Names,
            dict=_Dict(),
            **tokens,
        )
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            do = "mend the template or give another --chat-template"
            raise DataError(
                describe(
                    f"{name}:{error.lineno}", got=error.message, expected="a jinja template", do=do
                )
            ) from error
        except Exception as error:  # of Python's own compiler, or what a constant computes
            got = f"{type(error).__name__}: {error}"
            do = "mend the template or give another --chat-template"
            raise DataError(name, got=got, expected="a jinja template", do=do) from error
        self.marks_answers = any(data.data == _START for data in tree.find_all(nodes.TemplateData))
        """Whether it marks answers by ``{% generation %}``."""
        self.tells_time = any("strftime_now" in text for text in self.sources)
        """Whether a text may depend on the day on which it is rendered."""
        self._fields = frozenset(_fields_of(tree))
        self._variables = find_undeclared_variables(tree)

    @property
    def sources(self) -> tuple[str, ...]:
        """The text of the template, and that of the template for tools if there is another."""
        return (self.source, *(() if self.tool_use is None else self.tool_use.sources))

    def of(self, tools: Sequence[Any] | None) -> ChatTemplate:
        """Return the template for a conversation. As in transformers, a list of tools, even an
        empty one, takes the template for tools."""
        return self if tools is None or self.tool_use is None else self.tool_use

    def names_field(self, name: str) -> bool:
        """Whether the template reads a field of this name, for example of a message."""
        return name in self._fields

    def names_variable(self, name: str) -> bool:
        """Whether the template reads a variable of this name."""
        return name in self._variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        prompt: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> Rendered:
        """Render messages by this template, whatever the tools, with ``variables`` that it may
        read; with ``prompt`` also the beginning of an answer. Raises UnusableError with the
        template's error."""
        shown = [*map(_shown, messages)]
        if any(map(_has_text_arguments, shown)) and self._encodes_arguments:
            shown = [*map(_with_objects, shown)]
        return self._render(shown, tools, prompt, variables)

    @cached_property
    def _encodes_arguments(self) -> bool:
        """Whether the template writes the arguments of calls as JSON itself, and so needs objects:
        JSON text, as in OpenAI's format, would be encoded twice. Other templates need text."""
        for more in ((), _PROBE_RESULT):
            with suppress(UnusableError):
                text = self._render([*_probe(_ARGUMENTS), *more], _PROBE_TOOLS).text
                return json.dumps(_ARGUMENTS) in text
        for more in ((), _PROBE_RESULT):
            with suppress(UnusableError):
                self._render([*_probe(json.loads(_ARGUMENTS)), *more], _PROBE_TOOLS)
                return True
        return False

    def _render(
        self,
        shown: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        prompt: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> Rendered:
        try:
            self._environment.begin([shown, tools, dict(variables)])
            marked = self._template.render(
                messages=shown,
                **{"documents": None, **variables},
                tools=None if tools is None else list(tools),
                add_generation_prompt=prompt,
            )
        except Exception as error:  # a template can fail in every way that Python can
            expected = "a template that renders this conversation"
            do = "mend the example, or give another --chat-template"
            got = (
                f"{type(error).__name__}: {error}"
                if not isinstance(error, jinja2.TemplateError)
                else error.message
            )
            raise UnusableError(
                "template error", got=f"{got} (from {self.name})", expected=expected, do=do
            ) from error
        rendered = _without_marks(marked)
        if any(mark in rendered.text for mark in MARKS):
            raise UnusableError(
                "template error",
                got=f"one {{% generation %}} inside another (from {self.name})",
                expected="one around each answer",
                do="mend the template, or give another --chat-template",
            )
        return rendered


def _shown(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message for templates, as in transformers: without fields that are null, and with
    its reasoning under ``reasoning_content`` and ``thinking`` too."""
    given = {name: value for name, value in message.items() if value is not None}
    reasoning = next((given[name] for name in REASONING if name in given), None)
    if reasoning is None:
        return given
    return {"thinking": reasoning, **given, REASONING[0]: reasoning}


def _has_text_arguments(message: Mapping[str, Any]) -> bool:
    return any(isinstance(function.get("arguments"), str) for function in _functions(message))


def _functions(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the functions that a message calls, with their arguments."""
    for call in message.get("tool_calls") or ():
        yield call["function"] if isinstance(call.get("function"), Mapping) else call


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have arguments as objects. Raises UnusableError for other
    text."""
    if not _has_text_arguments(message):
        return dict(message)
    calls = []
    for call, function in zip(message["tool_calls"], _functions(message), strict=True):
        given = function.get("arguments")
        if isinstance(given, str):
            try:
                decoded = {**function, "arguments": json_object(parsed(given))}
            except UnusableError as problem:
                raise UnusableError(
                    "broken tool calls",
                    got=f"the arguments {given[:40]!r}",
                    expected="the JSON of an object, which the template writes itself",
                    do="mend the example",
                ) from problem
            call = decoded if function is call else {**call, "function": decoded}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _without_marks(marked: str) -> Rendered:
    if _START not in marked:
        return Rendered(marked, ())
    before, *pieces = marked.split(_START)
    text = before
    answers = []
    for piece in pieces:
        answer, _, rest = piece.partition(_END)
        if answer:
            answers.append((len(text), len(text) + len(answer)))
        text += answer + rest
    return Rendered(text, tuple(answers))


class _Generation(Extension):
    """The tag ``{% generation %} ... {% endgeneration %}``, which puts its text between marks."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        ends = [nodes.Output([nodes.TemplateData(mark)]) for mark in (_START, _END)]
        return nodes.Scope([ends[0], *body, ends[1]]).set_lineno(line)


def _fields_of(tree: nodes.Template) -> Iterator[str]:
    """Yield the names of fields that a template spells: attributes, and texts that may be keys."""
    for attribute in tree.find_all(nodes.Getattr):
        if not (isinstance(attribute.node, nodes.Name) and attribute.node.name == "loop"):
            yield attribute.attr
    for constant in tree.find_all(nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    if (len(indent) if isinstance(indent, str) else indent or 0) > TEMPLATE_INDENT:
        raise jinja2.TemplateError(f"an indentation of more than {TEMPLATE_INDENT} characters")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _formatted(now: datetime | None, form: str) -> str:
    return (now or datetime.now()).strftime(form)


class _Dict:
    """The ``dict`` of templates, which hides the methods of the class itself."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Names(Namespace):
    """jinja's namespace without names that reach into Python."""

    def __init__(self, *args: Any, **values: Any) -> None:
        for name in dict(*args, **values):
            _refuse_private(name)
        super().__init__(*args, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no {name!r}")


def find_template(
    wanted: str | None, folder: Path | None, tokens: Mapping[str, str], now: datetime | None = None
) -> ChatTemplate:
    """Find the template ``wanted``, a file or the name of a built-in one; None: that of the
    tokenizer in ``folder``, else ``plain``. ``now`` is as for ChatTemplate. Raises DataError."""
    if wanted is None:
        own = None if folder is None else own_template(folder, tokens, now)
        plain = "built-in template plain, since the tokenizer has none"
        return own or ChatTemplate(BUILT_IN["plain"], plain, tokens, now)
    if wanted in BUILT_IN:
        return ChatTemplate(BUILT_IN[wanted], f"built-in template {wanted}", tokens, now)
    also = f", or one of {', '.join(BUILT_IN)}"
    source = read_template(Path(wanted), f"--chat-template {wanted}", also)
    return ChatTemplate(source.text, wanted, tokens, now)


def own_template(
    folder: Path, tokens: Mapping[str, str], now: datetime | None = None
) -> ChatTemplate | None:
    """Return the template of the tokenizer in a folder, with one for tools if there is one; None if
    it has no template. Raises DataError."""
    named = read_chat_templates(folder)

    def template(source: TemplateSource, tool_use: ChatTemplate | None = None) -> ChatTemplate:
        return ChatTemplate(source.text, source.where, tokens, now, tool_use=tool_use)

    if not named:
        return None
    return template(named[DEFAULT], template(named[TOOL_USE]) if TOOL_USE in named else None)
