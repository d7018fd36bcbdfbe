"""What lies beside a tokenizer's file: its special tokens by name, and tokens that were added to
it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from megatron_llama.errors import DataError
from megatron_llama.tokenizer.files import read_json_object

CONFIG = "tokenizer_config.json"
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

FILES_BESIDE = (
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "generation_config.json",
)
"""Files beside a tokenizer that belong to it, as its chat templates do; the last one lists the
tokens that end an answer."""


def files_beside(file: Path) -> dict[str, bytes]:
    """Return the content of each of them that is there, by its path in the folder."""
    folder = file.parent
    names = [*FILES_BESIDE, *template_files(folder)]
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def template_files(folder: Path) -> list[str]:
    """Return the paths of the files with templates in a folder, relative to it."""
    found = [folder / TEMPLATE_FILE, *sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))]
    return [str(path.relative_to(folder)) for path in found if path.is_file()]


def read_settings(file: Path) -> dict[str, Any]:
    """Return the fields of the tokenizer_config.json beside a tokenizer's file; none if there is
    no such file. As in transformers, special_tokens_map.json wins where the configuration does not
    list its added tokens, and they come from added_tokens.json. Raises DataError."""
    settings = _read(file, CONFIG)
    if "added_tokens_decoder" in settings:
        return settings
    settings |= _read(file, "special_tokens_map.json")
    special = set(special_tokens(settings).values())
    return settings | {
        "added_tokens_decoder": {
            str(id): {
                "content": text,
                "special": text in special,
                "normalized": text not in special,
            }
            for text, id in _read(file, "added_tokens.json").items()
        }
    }


def _read(file: Path, name: str) -> dict[str, Any]:
    beside = file.with_name(name)
    return read_json_object(beside) if beside.is_file() else {}


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return ``bos_token`` and the like with the tokens that they name."""
    given = {name: settings[name] for name in SPECIAL_NAMES if settings.get(name) is not None}
    return {
        name: str(token["content"] if isinstance(token, Mapping) else token)
        for name, token in given.items()
    }


def tokens_behind(settings: Mapping[str, Any], count: int, where: Path) -> list[AddedToken]:
    """Return the tokens that were added behind a vocabulary of ``count``, in the order of their
    ids. Raises DataError if the ids have a gap."""
    added = {
        int(id): token for id, token in settings["added_tokens_decoder"].items() if int(id) >= count
    }
    if sorted(added) != [*range(count, count + len(added))]:
        raise DataError(
            where.with_name(CONFIG),
            got=f"added tokens with the ids {sorted(added)}",
            expected=f"all ids from {count} on",
            do="restore the tokenizer's folder, or save it again with transformers",
        )
    return [
        AddedToken(
            token["content"],
            **{
                name: bool(token.get(name, False))
                for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
            },
        )
        for _, token in sorted(added.items())
    ]
