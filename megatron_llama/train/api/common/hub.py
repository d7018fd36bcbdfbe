"""Names of the HuggingFace hub in the place of folders: ``org/name`` or ``org/name@revision``.

A name becomes the folder of its snapshot in the hub's own cache once, where options are read. Later
code knows only folders. A path that exists is never taken for a name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias

from megatron_llama.config.parse import Parsed, flag
from megatron_llama.errors import ConfigError

Content: TypeAlias = Literal["model", "shapes", "tokenizer"]
"""The part of a repository that is fetched: a whole model, a model without its weights, or its
tokenizer."""
OPTIONS: Mapping[str, Content] = MappingProxyType(
    {"init_from_hf": "model", "tokenizer_model": "tokenizer"}
)
"""The options that take a name, and the content that is read from their folders."""


@dataclass(frozen=True)
class HubName:
    """A repository of models, and a branch, tag or commit of it."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def hub_name(value: str | Path) -> HubName | None:
    """Read ``org/name`` or ``org/name@revision``. None for a path: one that exists, or whose parent
    folder does, or that has the suffix of a tokenizer's file."""
    match = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?", str(value), re.ASCII)
    if match is None or Path(value).exists() or Path(value).parent.exists():
        return None
    if match[1].endswith((".json", ".model")):
        return None
    return HubName(match[1], match[2])


def with_folders(parsed: Parsed, *, planned: bool = False, weights: bool = True) -> Parsed:
    """Replace all names by the folders of their snapshots, with a note for each.

    ``planned``: nothing is computed with them. Then a name that cannot be fetched stays, if a
    preset has the shapes, and is reported like any file that is not on this machine. Without
    ``weights`` only the files of a model's shapes are fetched. Raises ConfigError."""
    preset = any(getattr(section, "preset", None) for section in parsed.instances.values())
    instances = dict(parsed.instances)
    notes = list(parsed.notes)
    for section, instance in parsed.instances.items():
        changed = {}
        for option, content in OPTIONS.items():
            value = getattr(instance, option, None)
            if value is None or option not in {item.name for item in fields(instance)}:
                continue
            name = hub_name(value)
            if name is None:
                continue
            # The code that fetches is loaded only for a name.
            from megatron_llama.train.api.common.snapshots import fetch

            try:
                # A preset has all that a plan needs, so no weights are fetched for it.
                folder = fetch(
                    name,
                    content if weights or content == "tokenizer" else "shapes",
                    flag(option),
                    cached_only=planned and preset and content == "model",
                )
            except ConfigError:
                if planned and (preset or content == "tokenizer"):
                    continue
                raise
            changed[option] = str(folder)
            notes.append(f"{flag(option)} {name}: commit {folder.name}, in {folder}")
        if changed:
            instances[section] = replace(instance, **changed)
    return replace(parsed, instances=instances, notes=tuple(notes))


def local_folder(path: str | Path, content: Content, where: str) -> str | Path:
    """Return ``path``, or the folder of the snapshot that it names. Raises ConfigError."""
    name = hub_name(path)
    if name is None:
        return path
    from megatron_llama.train.api.common.snapshots import fetch

    return fetch(name, content, where)
