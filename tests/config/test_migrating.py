"""docs/migrating.md names options that exist."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_llama.config.help import config_sections
from megatron_llama.config.megatron_names import MEGATRON
from megatron_llama.config.parse import options_of
from megatron_llama.sft.sft_config import SFTConfig

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"


def test_every_option_on_the_right_exists() -> None:
    known = options_of((SFTConfig, *config_sections())).keys() | MEGATRON.keys()
    rows = re.findall(r"^\| (.*) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    named = [name.replace("-", "_") for _, here in rows for name in re.findall(r"`--([\w-]+)`", here)]
    assert len(rows) > 60 and len(set(named)) > 50
    assert sorted(set(named) - known) == []


def test_what_is_the_same_is_the_same() -> None:
    """Where a row says `the same`, its flags are ours."""
    known = options_of(config_sections()).keys() | MEGATRON.keys()
    rows = [left for left, here in re.findall(r"^\| (.*) \| (.*) \|$", PAGE.read_text(), re.MULTILINE) if here.startswith("the same")]
    named = {name.replace("-", "_") for left in rows for name in re.findall(r"`--([\w-]+)[ `]", left)}
    missing = {name for name in named if name not in known and name.removeprefix("no_") not in known}
    assert len(named) > 25 and missing == set()
