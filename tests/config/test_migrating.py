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

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
KNOWN = options_of((AlignConfig, SFTConfig, *config_sections())).keys() | MEGATRON.keys()
ROWS = re.findall(r"^\| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
CODE = {"AutoModelForCausalLM.from_config", "trainer.save_model", "TrainingArguments"}
CODE |= {f"{kind}Trainer" for kind in ("DPO", "KTO", "ORPO", "CPO", "Reward")}


def named(cells: list[str], pattern: str = r"`--([\w-]+)[ `]") -> set[str]:
    return {name.replace("-", "_") for cell in cells for name in re.findall(pattern, cell)}


def test_every_option_on_the_right_exists() -> None:
    found = named([here for _, here in ROWS], r"`--([\w-]+)`")
    assert len(ROWS) > 60 and len(found) > 50 and found - KNOWN == set()


def test_what_is_the_same_is_the_same() -> None:
    """Where a row says `the same`, its flags are ours."""
    found = named([left for left, here in ROWS if here.startswith("the same")])
    assert len(found) > 25 and {name for name in found if not {name, name.removeprefix("no_")} & KNOWN} == set()


def test_every_name_on_the_left_is_answered() -> None:
    """As an option, or by an error that says what to give instead."""
    rows = re.findall(r"^\| (.*) \| (?:.*) \|$", PAGE[PAGE.index("## From Megatron-LM") :], re.MULTILINE)
    found = {name for name in named(rows, r"`(?:--)?([a-zA-Z][\w.-]+)[ `]") if "..." not in name}
    unknown = {name for name in found - KNOWN - CODE if name.removeprefix("no_") not in KNOWN and remedy_for(name) is None}
    assert len(found) > 150 and unknown == set()
