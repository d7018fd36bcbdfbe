"""Finds the chat templates in a tokenizer's folder, and writes them there.

A tokenizer has one template, or several by name. As in transformers, files take the place of the
whole field ``chat_template`` of tokenizer_config.json: ``chat_template.jinja`` is the template
``default``, and ``additional_chat_templates/NAME.jinja`` the template NAME.
"""

from __future__ import annotations

import codecs
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_llama.config.model_files import read_model_file
from megatron_llama.data.tokenizer.files import read_json_object, to_json
from megatron_llama.data.tokenizer.settings import (
    CONFIG,
    TEMPLATE_FILE,
    TEMPLATE_FOLDER,
    template_files,
)
from megatron_llama.errors import DataError
from megatron_llama.files import replace_file

DEFAULT = "default"
"""Name of the template that is taken if no other is named."""
TOOL_USE = "tool_use"
"""Name of the template for conversations with tools."""


@dataclass(frozen=True)
class TemplateSource:
    """The text of a template, and its origin, for messages."""

    text: str
    where: str


def read_chat_templates(folder: Path) -> dict[str, TemplateSource]:
    """Return the templates of a tokenizer by name; none if it has none. Raises DataError for one
    that cannot be read, and if several have names and none is ``default``."""
    files = {Path(name): folder / name for name in template_files(folder)}
    sources = {
        DEFAULT if str(name) == TEMPLATE_FILE else name.stem: read_template(path, str(path))
        for name, path in files.items()
    }
    where = str(folder / TEMPLATE_FOLDER)
    if not sources:
        where = f"{folder / CONFIG}: chat_template"
        given = (
            read_json_object(folder / CONFIG).get("chat_template")
            if (folder / CONFIG).is_file()
            else None
        )
        if given is None:
            return {}
        sources = {name: TemplateSource(text, where) for name, text in _named(given, where).items()}
    if DEFAULT not in sources:
        raise DataError(
            where,
            got=f"templates named {', '.join(sorted(sources)) or 'nothing'}",
            expected=f"one named {DEFAULT}, which transformers takes for conversations without "
            "tools",
            do=f"add it as {folder / TEMPLATE_FILE}, or give --chat-template",
        )
    return sources


def _named(given: Any, where: str) -> dict[str, str]:
    """Return the templates in a field ``chat_template``: a text, a list of objects with ``name``
    and ``template``, or an object of texts by name."""
    if isinstance(given, str):
        return {DEFAULT: given}
    pairs: list[tuple[Any, Any]] = []
    if isinstance(given, dict):
        pairs = [*given.items()]
    elif isinstance(given, list) and all(isinstance(entry, dict) for entry in given):
        pairs = [(entry.get("name"), entry.get("template")) for entry in given]
    else:
        pairs = [(None, given)]
    for name, text in pairs:
        if not isinstance(name, str) or not isinstance(text, str) or Path(name).name != name:
            raise DataError(
                where,
                got=f"{str({name: text})[:60]}",
                expected="a text, or texts with names that can be those of files",
                do="restore the file, or give --chat-template",
            )
    return dict(pairs)


def read_template(path: Path, where: str, also: str = "") -> TemplateSource:
    """Read a file of jinja; ``also`` names other values for messages. Raises DataError."""
    expected = f"a jinja file in UTF-8{also}"
    if not path.exists():  # a name that was meant for a built-in one
        raise DataError(where, got="no such file", expected=expected, do="check the path")
    try:
        content = read_model_file(path, do="check the path", error=DataError)
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(where, got=error, expected=expected, do="check the path") from error
    if content.startswith(codecs.BOM_UTF8):
        # transformers takes the mark for the first character of every conversation.
        got = "a byte-order mark (U+FEFF) at its beginning"
        expected = "jinja alone: the mark would be the first character of every text"
        raise DataError(where, got=got, expected=expected, do="save the file without the mark")
    return TemplateSource(text.replace("\r\n", "\n").replace("\r", "\n"), where)


def write_chat_templates(folder: Path, templates: Mapping[str, str]) -> None:
    """Write templates as the files of a folder, unless the folder has the same ones."""
    try:
        present = {name: source.text for name, source in read_chat_templates(folder).items()}
    except DataError:  # unreadable templates are replaced
        present = {}
    if present == templates:
        return
    shutil.rmtree(folder / TEMPLATE_FOLDER, ignore_errors=True)
    for name, text in templates.items():
        place = TEMPLATE_FILE if name == DEFAULT else f"{TEMPLATE_FOLDER}/{name}.jinja"
        replace_file(folder / place, text.encode())


def replace_templates_in_config(folder: Path, templates: Mapping[str, str]) -> None:
    """Write templates into tokenizer_config.json too, if it has others: older programs read no
    other place."""
    config = read_json_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if config.get("chat_template") is not None:
        named = [{"name": name, "template": text} for name, text in templates.items()]
        field = templates[DEFAULT] if templates.keys() == {DEFAULT} else named
        replace_file(folder / CONFIG, to_json({**config, "chat_template": field}))
