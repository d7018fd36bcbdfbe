"""Chat templates: HuggingFace's jinja, in a sandbox, with the places of what ``{% generation %}``
encloses.

Templates come with models from anywhere, so they run without access to attributes that begin with
an underscore and without the means to change what they are given. What they see is what
``transformers`` shows them: the same text comes out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from megatron_llama.errors import DataError, describe
from megatron_llama.sft.formats import MARKS
from megatron_llama.sft.problems import UnusableError
from megatron_llama.tokenizer.files import read_json_object

_START, _END = MARKS

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        # For tokenizers that have nothing but a begin and an end token. It needs no others: headers
        # are text.
        "plain": (
            "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}"
            "{% if message['role'] == 'assistant' %}"
            "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n' }}"
            "{% else %}{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
        ),
        "chatml": (
            "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
            "{% if message['role'] == 'assistant' %}"
            "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
            "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
        ),
        "llama2": (
            "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
            "{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}"
            "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
            "{% for message in rest %}{% if message['role'] == 'user' %}"
            "{{ bos_token + '[INST] ' + (system if loop.first else '') + "
            "message['content'].strip() + ' [/INST]' }}"
            "{% elif message['role'] == 'assistant' %}"
            "{% generation %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% "
            "endgeneration %}"
            "{% else %}{{ raise_exception('Llama 2 knows no role ' + message['role']) "
            "}}{% endif %}{% endfor %}"
        ),
        "llama3": (
            "{{ bos_token }}{% for message in messages %}"
            "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
            "{% if message['role'] == 'assistant' %}"
            "{% generation %}{{ message['content'].strip() + '<|eot_id|>' }}{% endgeneration %}"
            "{% else %}{{ message['content'].strip() + '<|eot_id|>' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ "
            "'<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
        ),
    }
)
"""Templates with the places of answers, by name."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """Characters [start, stop) that ``{% generation %}`` encloses."""


class ChatTemplate:
    """One template. ``name`` says where it is from, for messages; ``tokens`` are ``bos_token`` and
    the like. Raises DataError if it is no jinja."""

    def __init__(
        self, source: str, name: str, tokens: Mapping[str, str], now: datetime | None = None
    ) -> None:
        """``now``: the time that the template sees; None: the clock's."""
        self.source = source
        self.name = name
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(
            raise_exception=_raise,
            strftime_now=partial(_formatted, now),
            namespace=_Names,
            dict=_dict,
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
        self.marks_answers = any(data.data == _START for data in tree.find_all(nodes.TemplateData))
        """Whether it marks answers by ``{% generation %}``."""
        self.tells_time = "strftime_now" in source
        """Whether a text may depend on the day on which it is rendered."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        prompt: bool = False,
    ) -> Rendered:
        """Render messages; with ``prompt`` also the beginning of an answer. Raises UnusableError
        with what the template says of these messages."""
        given = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        try:
            marked = self._template.render(
                messages=given,
                tools=None if tools is None else list(tools),
                documents=None,
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
        return _without_marks(marked)


def _without_marks(marked: str) -> Rendered:
    if _START not in marked:
        return Rendered(marked, ())
    before, *parts = marked.split(_START)
    text = before
    answers = []
    for part in parts:
        answer, _, rest = part.partition(_END)
        if answer:
            answers.append((len(text), len(text) + len(answer)))
        text += answer + rest
    return Rendered(text, tuple(answers))


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}``: what is between them, between marks."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        ends = [nodes.Output([nodes.TemplateData(mark)]) for mark in (_START, _END)]
        return nodes.Scope([ends[0], *body, ends[1]]).set_lineno(line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Tables may have values that JSON has no word for: Python would write NaN or Infinity.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        allow_nan=False,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _formatted(now: datetime | None, form: str) -> str:
    return (now or datetime.now()).strftime(form)


def _dict(*args: Any, **values: Any) -> dict[Any, Any]:
    """A function, because the methods of the class ``dict`` itself must not be within reach."""
    return dict(*args, **values)


class _Names(Namespace):
    """jinja's namespace, closed for names that reach into Python."""

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
    if wanted is not None:
        if wanted in BUILT_IN:
            return ChatTemplate(BUILT_IN[wanted], f"built-in template {wanted}", tokens, now)
        return ChatTemplate(_read(Path(wanted)), wanted, tokens, now)
    own = None if folder is None else _own_template(folder)
    source, name = own or (
        BUILT_IN["plain"],
        "built-in template plain, since the tokenizer has none",
    )
    return ChatTemplate(source, name, tokens, now)


def _own_template(folder: Path) -> tuple[str, str] | None:
    """Source and name. As in transformers, a file of its own wins over the configuration."""
    file = folder / "chat_template.jinja"
    config = folder / "tokenizer_config.json"
    if file.is_file():
        return _read(file), str(file)
    given = read_json_object(config).get("chat_template") if config.is_file() else None
    if isinstance(given, list):
        given = next(
            (
                entry.get("template")
                for entry in given
                if isinstance(entry, dict) and entry.get("name") == "default"
            ),
            None,
        )
    return None if given is None else (str(given), f"{config}: chat_template")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        expected = f"a jinja file, or one of {', '.join(BUILT_IN)}"
        raise DataError(
            describe(f"--chat-template {path}", got=error, expected=expected, do="check the path")
        ) from error
