"""Chat templates beside a tokenizer: what cannot be meant is refused before anything is rendered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from megatron_llama.data.tokenizer.chat_templates import read_chat_templates
from megatron_llama.errors import DataError

from tests.refused import refused

MODULE = "data.tokenizer.chat_templates"


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (3, "_named"),
        (["{{ messages }}"], "_named"),
        ([{"name": "default"}], "_named"),
        ({"../default": "{{ messages }}"}, "_named"),
        ({"tool_use": "{{ messages }}"}, "read_chat_templates"),
        ([], "read_chat_templates"),
    ],
    ids=["number", "texts without names", "name without text", "name of another folder", "no default", "nothing"],
)
def test_settings_without_a_template(given: object, key: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
    with pytest.raises(DataError) as raised:
        read_chat_templates(tmp_path)
    said = refused(raised.value)
    assert (said.key, said.where) == (f"{MODULE}.{key}", f"{tmp_path}/tokenizer_config.json: chat_template")


@pytest.mark.parametrize(("content", "number"), [(b"\xff", ":2"), ("\ufeff{{ messages }}".encode(), ":3")], ids=["no text", "byte-order mark"])
def test_a_file_without_a_template(content: bytes, number: str, tmp_path: Path) -> None:
    path = tmp_path / "chat_template.jinja"
    path.write_bytes(content)
    with pytest.raises(DataError) as raised:
        read_chat_templates(tmp_path)
    assert (refused(raised.value).key, refused(raised.value).where) == (f"{MODULE}.read_template{number}", str(path))
