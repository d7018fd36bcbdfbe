"""The files beside a tokenizer's file: special tokens by name, and tokens that were added to
it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from megatron_llama.config.fields import read_fields, shown
from megatron_llama.config.model_files import is_there
from megatron_llama.data.tokenizer.files import CONFIG as CONFIG
from megatron_llama.data.tokenizer.files import read_json_object, read_tokenizer_file
from megatron_llama.errors import DataError

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

_RESTORE = "restore the tokenizer's folder, or save it again with transformers"
FILES_BESIDE = (
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "generation_config.json",
)
"""Files beside a tokenizer that belong to it, as its chat templates do. The last one lists the
tokens that end an answer."""


def files_beside(file: Path) -> dict[str, bytes]:
    """Return the content of each such file that is there, by its path in the folder."""
    folder = file.parent
    names = [*FILES_BESIDE, *template_files(folder)]
    present = [name for name in names if is_there(folder / name, error=DataError)]
    return {name: read_tokenizer_file(folder / name) for name in present}


def template_files(folder: Path) -> list[str]:
    """Return the paths of the files with templates in a folder, relative to it."""
    paths = [folder / TEMPLATE_FILE, *sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))]
    present = [path for path in paths if is_there(path, error=DataError)]
    return [str(path.relative_to(folder)) for path in present]


def read_settings(file: Path) -> dict[str, Any]:
    """Return the fields of the tokenizer_config.json beside a tokenizer's file; none without such a
    file. As in transformers, if it does not list its added tokens, special_tokens_map.json takes
    precedence and added_tokens.json has these tokens. Raises DataError."""
    settings = _read(file, CONFIG)
    _require_kinds(settings, file.with_name(CONFIG))
    if "added_tokens_decoder" in settings:
        return settings
    more = _read(file, "special_tokens_map.json")
    _require_kinds(more, file.with_name("special_tokens_map.json"))
    settings |= more
    special = set(special_tokens(settings).values())
    return settings | {
        "added_tokens_decoder": {
            str(id): {
                "content": text,
                "special": text in special,
                "normalized": text not in special,
            }
            for text, id in _added_ids(file).items()
        }
    }


def _added_ids(file: Path) -> dict[str, int]:
    """Return the ids in the added_tokens.json beside a tokenizer's file."""
    ids = _read(file, "added_tokens.json")
    for text, id in ids.items():
        if not isinstance(id, int) or isinstance(id, bool):
            raise DataError(
                f"{file.with_name('added_tokens.json')}: {text}",
                got=repr(id),
                expected="the id of the token",
                do=_RESTORE,
            )
    return ids


def _require_kinds(settings: Mapping[str, Any], where: Path) -> None:
    """Raise DataError for a field of another type than transformers writes."""
    with read_fields(settings, where, do=_RESTORE, error=DataError) as fields:
        for name in SPECIAL_NAMES:
            token = fields.value(name, None)
            text = token.get("content") if isinstance(token, Mapping) else token
            if token and not isinstance(text, str):
                fields.problem(name, shown(token), "a token: a text, or an object with its content")
        for name in ("add_bos_token", "add_eos_token", "legacy"):
            if settings.get(name) is not None:
                fields.switch(name)
        if not _is_template(fields.value("chat_template", None)):
            expected = "a text, or texts with names"
            fields.problem("chat_template", shown(settings["chat_template"]), expected)
    listed = settings.get("added_tokens_decoder", {})
    if not isinstance(listed, Mapping) or not all(
        re.fullmatch("[0-9]{1,10}", id)
        and isinstance(entry, Mapping)
        and isinstance(entry.get("content"), str)
        for id, entry in listed.items()
    ):
        raise DataError(
            f"{where}: added_tokens_decoder",
            got=f"{listed!r:.80}",
            expected="an object of ids, each with an object that has the token's content",
            do=_RESTORE,
        )
    for field in ("extra_special_tokens", "additional_special_tokens"):
        if not isinstance(settings.get(field), list | Mapping | None):
            raise DataError(
                f"{where}: {field}",
                got=f"{settings[field]!r:.80}",
                expected="an array or an object of tokens",
                do=_RESTORE,
            )


def _is_template(value: object) -> bool:
    """Whether a value is a chat_template as transformers writes it: one template, or several with
    their names."""
    if isinstance(value, list):
        return all(
            isinstance(entry, Mapping)
            and isinstance(entry.get("name"), str)
            and isinstance(entry.get("template"), str)
            for entry in value
        )
    if isinstance(
        value, Mapping
    ):  # read as names with templates, though transformers writes a list
        return all(isinstance(text, str) for text in value.values())
    return isinstance(value, str | None)


def _read(file: Path, name: str) -> dict[str, Any]:
    beside = file.with_name(name)
    return read_json_object(beside) if is_there(beside, error=DataError) else {}


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return ``bos_token`` and the like with the tokens that they name."""
    given = {name: settings[name] for name in SPECIAL_NAMES if settings.get(name) is not None}
    return {
        name: str(token["content"] if isinstance(token, Mapping) else token)
        for name, token in given.items()
    }


def denies(settings: Mapping[str, Any], name: str) -> bool:
    """Whether the settings deny such a special token: they have its name with ``null`` or an empty
    text."""
    return name in settings and not settings[name]


def tokens_to_add(
    settings: Mapping[str, Any], present: Sequence[AddedToken], where: Path
) -> list[AddedToken]:
    """Return the tokens that ``AutoTokenizer`` adds to a tokenizer with the added tokens
    ``present``, in its order: those of ``added_tokens_decoder`` by id, then special tokens with a
    name, then the other special ones. A token that is present with other properties gets these.
    ``where`` is the file of the tokenizer."""
    listed = [
        _added_token(entry, "added_tokens_decoder", where)
        for _, entry in sorted(_listed(settings).items())
    ]
    unchanged = {repr(token) for token in present}
    added = [token for token in listed if repr(token) not in unchanged]
    known = {token.content for token in (*present, *listed)}
    named = _named(settings)
    for name, entry in (*named.items(), *_others(settings)):
        token = _added_token(entry, name, where)
        if token.content not in known:
            added.append(token)
            known.add(token.content)
    texts = {_added_token(entry, name, where).content for name, entry in named.items()}
    for token in added:
        token.special |= token.content in texts
    return added


def require_listed_ids(settings: Mapping[str, Any], ids: Mapping[str, int], where: Path) -> None:
    """Raise DataError if ``added_tokens_decoder`` has another id for one of these tokens, which
    were added."""
    listed = {
        id: str(entry["content"])
        for id, entry in sorted(_listed(settings).items())
        if entry["content"] in ids
    }
    given = [ids[text] for text in listed.values()]
    if given != [*listed]:
        raise DataError(
            where.with_name(CONFIG),
            got=f"added tokens with the ids {[*listed]}",
            expected=f"all ids from {given[0]} on",
            do="restore the tokenizer's folder, or save it again with transformers",
        )


def _listed(settings: Mapping[str, Any]) -> dict[int, Any]:
    return {int(id): entry for id, entry in settings["added_tokens_decoder"].items()}


def _named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens with a name: the usual ones first, then those of one model
    (``image_token``)."""
    more = settings.get("extra_special_tokens")
    own = [
        name
        for name, entry in settings.items()
        if name.endswith("_token") and isinstance(entry, str | Mapping)
    ]
    names = dict.fromkeys((*SPECIAL_NAMES, *own))
    named = {name: settings[name] for name in names if settings.get(name)}
    return named | (dict(more) if isinstance(more, Mapping) else {})


def _others(settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the special tokens without a name, each with the field that has it."""
    for field in ("extra_special_tokens", "additional_special_tokens"):
        if settings.get(field):
            entries = settings[field]
            return [] if isinstance(entries, Mapping) else [(field, entry) for entry in entries]
    return []


def _added_token(entry: object, field: str, where: Path) -> AddedToken:
    """Return the token of an entry: its text alone, or with its properties."""
    if isinstance(entry, str):
        return AddedToken(entry, special=True, normalized=False)
    if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str):
        raise DataError(
            f"{where.with_name(CONFIG)}: {field}",
            got=repr(entry),
            expected="a token: a text, or an object with its content",
            do=_RESTORE,
        )
    properties = ("single_word", "lstrip", "rstrip", "normalized", "special")
    place = f"{where.with_name(CONFIG)}: {field} {shown(entry['content'])}"
    with read_fields(entry, place, do=_RESTORE, error=DataError) as fields:
        given = {name: fields.switch(name) for name in properties if name in entry}
    return AddedToken(entry["content"], **given)
