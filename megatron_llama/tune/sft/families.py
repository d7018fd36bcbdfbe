"""The family of models of a chat template, by its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

from megatron_llama.tune.sft.built_in_templates import BUILT_IN, FAMILIES
from megatron_llama.tune.sft.problems import UnusableError
from megatron_llama.tune.sft.template import ChatTemplate, Rendered

NAMES = ("llama3", *FAMILIES)
_SYSTEM = MappingProxyType({"role": "system", "content": "Be brief."})
_ASKED = MappingProxyType({"role": "user", "content": "What is 2 + 3?"})
_SAID = MappingProxyType({"role": "assistant", "content": " It is 5. "})
_THOUGHT = MappingProxyType(
    {"role": "assistant", "reasoning_content": "Add them.", "content": "It is 5."}
)
_TAGGED = MappingProxyType({"role": "assistant", "content": "<think>\nAdd.\n</think>\n\nIt is 5."})
_CALLED = MappingProxyType(
    {
        "role": "assistant",
        "reasoning_content": "Call it.",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
    }
)
_FOUND = MappingProxyType({"role": "tool", "name": "add", "content": "5"})
_TOOLS = ({"type": "function", "function": {"name": "add", "description": "Adds numbers."}},)
_PROBES: Sequence[tuple[Sequence[Mapping[str, Any]], Sequence[Any] | None]] = (
    ((_ASKED, _SAID), None),
    ((_SYSTEM, _ASKED, _SAID), None),
    ((_ASKED, _THOUGHT), None),
    ((_ASKED, _TAGGED), None),
    ((_SYSTEM, _ASKED, _CALLED), _TOOLS),
    ((_ASKED, _CALLED, _FOUND, _FOUND, _THOUGHT), _TOOLS),
)
_TURNS = (_ASKED, _SAID, _ASKED, _SAID)


def family_of(
    own: ChatTemplate, tokens: Mapping[str, str], now: datetime | None = None
) -> str | None:
    """Return the name of the built-in template that renders last answers, and all text but answers,
    like the template ``own``; None if there is none."""
    for name in NAMES:
        template = ChatTemplate(BUILT_IN[name], name, tokens, now)
        probes = ((_render(own, *probe), _render(template, *probe)) for probe in _PROBES)
        same = all(_text(ours) == _text(theirs) for ours, theirs in probes)
        if same and _frames(_render(own, _TURNS), _render(template, _TURNS)):
            return name
    return None


def _render(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
) -> Rendered | None:
    try:
        return template.render(messages, tools)
    except UnusableError:
        return None


def _text(rendered: Rendered | None) -> str | None:
    return None if rendered is None else rendered.text


def _frames(own: Rendered | None, marked: Rendered | None) -> bool:
    """Whether two texts are the same around the first answers, which may differ."""
    if own is None or marked is None or not marked.answers:
        return False
    start, stop = marked.answers[0]
    return own.text.startswith(marked.text[:start]) and own.text.endswith(marked.text[stop:])
