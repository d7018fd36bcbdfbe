"""docs/migrating.md names options that exist."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_llama.config.foreign_names import remedy_for
from megatron_llama.config.megatron_names import MEGATRON
from megatron_llama.config.parse import options_of
from megatron_llama.config.sections import config_sections
from megatron_llama.tune.preference.align_config import AlignConfig
from megatron_llama.tune.sft.sft_config import SFTConfig

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"


def test_every_option_on_the_right_exists() -> None:
    known = options_of((AlignConfig, SFTConfig, *config_sections())).keys() | MEGATRON.keys()
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


def test_every_name_on_the_left_is_answered() -> None:
    """As an option, or by an error that says what to give instead."""
    known = options_of((AlignConfig, SFTConfig, *config_sections())).keys() | MEGATRON.keys()
    page = PAGE.read_text()
    rows = re.findall(r"^\| (.*) \| (?:.*) \|$", page[page.index("## From Megatron-LM") :], re.MULTILINE)
    named = {name.replace("-", "_") for left in rows for name in re.findall(r"`(?:--)?([a-zA-Z][\w.-]+)[ `]", left) if "..." not in name}
    code = {"AutoModelForCausalLM.from_config", "trainer.save_model", "TrainingArguments"}
    code |= {f"{kind}Trainer" for kind in ("DPO", "KTO", "ORPO", "CPO", "Reward")}
    unknown = {name for name in named - known - code if name.removeprefix("no_") not in known and remedy_for(name) is None}
    assert len(named) > 150 and unknown == set()
