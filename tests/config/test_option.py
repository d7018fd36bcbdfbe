"""What a field says of its option is all that is said of it anywhere: a new option is a field, and the code that obeys it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from megatron_llama.config.parse import options_of
from megatron_llama.config.parts import part_of
from megatron_llama.config.schema import TrainingConfig
from megatron_llama.config.sections import config_sections
from megatron_llama.option import KEPT, POSITIVE, Rules, left_out, option, rules_of, section
from megatron_llama.train.setup.checks.ranges import value_problems
from megatron_llama.tune.preference.align_config import AlignConfig
from megatron_llama.tune.sft.sft_config import SFTConfig

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = (*config_sections(), SFTConfig, AlignConfig)


def test_a_field_that_does_not_say_what_prove_does_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match=r"NoiseConfig\.second does not say what prove does with it: .*left_out"):

        @section()
        @dataclass(frozen=True)
        class NoiseConfig:
            first: int = option(1, small=KEPT)
            second: int = 1


def test_fields_have_what_their_section_says_unless_they_say_it() -> None:
    @section(changes="nothing", small=left_out("nobody sees it"))
    @dataclass(frozen=True)
    class NoiseConfig:
        plain: int = 1
        own: int = option(1, check=POSITIVE, changes="weights", small=KEPT, draws=(2, 3))

    rules = rules_of(NoiseConfig)
    assert rules["plain"] == Rules(changes="nothing", small=left_out("nobody sees it"))
    assert rules["own"] == Rules(POSITIVE, changes="weights", small=KEPT, draws=(2, 3))
    assert list(value_problems(NoiseConfig(plain=-1, own=0))) == [
        "--plain: got -1, expected 0 or more; give --plain N",
        "--own: got 0, expected a positive number; give --own N",
    ]
    assert rules_of(part_of(TrainingConfig, "A part.", "seed")) == rules_of(TrainingConfig)


@pytest.mark.parametrize("owner", SECTIONS, ids=lambda owner: owner.__name__)
def test_defaults_and_drawn_values_are_what_the_field_expects(owner: type[Any]) -> None:
    assert list(value_problems(owner())) == []
    for name, each in options_of([owner]).items():
        assert each.check is None or all(map(each.check.holds, each.rules.draws)), name


def changes_of_the_manual() -> Iterator[tuple[str, str, str]]:
    """(file, lines before, lines after) of each change in the example of ``docs/architecture.md``."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```diff\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    for file, body in re.findall(r"^--- (\S+)\n@@\n(.*?)(?=^--- |\Z)", example, re.DOTALL | re.MULTILINE):
        lines = body.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))
        yield file, before, after


USED = """
import io, json, sys
from contextlib import redirect_stdout
from pathlib import Path
from megatron_llama.train.api.common.options import read_options
from megatron_llama.checkpoint.meta import TrainState, meta_json
from megatron_llama.cli import main
from megatron_llama.config.megatron_names import MEGATRON
from megatron_llama.config.help import options_markdown
from megatron_llama.config.parse import parse
from megatron_llama.config.sections import config_sections
from megatron_llama.train.run.lr import learning_rate
from megatron_llama.train.setup.resolve import assemble, problems
from megatron_llama.prove.given import LEFT_OUT, SECTIONS
from megatron_llama.prove.shrink import shrink

RUN = {"preset": "llama3.2-1b", "train_iters": 100, "lr_warmup_iters": 10, "lr": 1e-3}


def configured(*flags):
    words = [word for name, value in RUN.items() for word in (f"--{name}", str(value))]
    return assemble(parse([*words, *flags], config_sections(), aliases=MEGATRON))


Path("run.yaml").write_text("optimizer:\\n  lr_warmup_init: 1e-5\\n")
help_text = io.StringIO()
with redirect_stdout(help_text):
    main(["pretrain", "--help"])
config = configured("--lr-warmup-init", "1e-5")
(case,) = shrink(read_options(None, {**RUN, "lr_warmup_init": 1e-5, "global_batch_size": 8}, SECTIONS), 2, 2)
print(json.dumps({
    "flag": config.optimizer.lr_warmup_init,
    "yaml": configured("--config", "run.yaml").optimizer.lr_warmup_init,
    "python": read_options(None, {"lr_warmup_init": 1e-5}, SECTIONS).explicit == {"lr_warmup_init"},
    "help": help_text.getvalue(),
    "manual": options_markdown(config_sections(), MEGATRON),
    "refused": problems(configured("--lr-warmup-init", "-1"), 1),
    "obeyed": [learning_rate(config.optimizer, 100, step) for step in (0, 5, 10)],
    "checkpoint": json.loads(meta_json(TrainState(1, 1), 1, [1.0, 0, 0], config))["config"]["optimizer"]["lr_warmup_init"],
    "left out": "lr_warmup_init" in LEFT_OUT,
    "told": [(note.yours, note.here, note.why) for note in case.notes if note.option == "--lr-warmup-init"],
    "in the case": "lr_warmup_init" in case.options,
}))
"""


@pytest.mark.long
def test_a_new_option_is_a_field_and_the_code_that_obeys_it(tmp_path: Path) -> None:
    """The example of the manual, in a copy of the package."""
    shutil.copytree(ROOT / "megatron_llama", tmp_path / "megatron_llama", ignore=shutil.ignore_patterns("__pycache__"))
    changes = list(changes_of_the_manual())
    assert [file for file, _, _ in changes] == ["megatron_llama/config/schema.py", "megatron_llama/train/run/lr.py"]
    for file, before, after in changes:
        text = (tmp_path / file).read_text(encoding="utf-8")
        assert text.count(before) == 1, f"the example of docs/architecture.md does not fit {file} any more"
        (tmp_path / file).write_text(text.replace(before, after), encoding="utf-8")
    done = subprocess.run([sys.executable, "-c", USED], capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen.pop("flag") == seen.pop("yaml") == seen.pop("checkpoint") == 1e-5 and seen.pop("python")
    assert "  --lr-warmup-init FLOAT  (default: 0.0)\n      Learning rate of the first step of the warm-up.\n" in seen.pop("help")
    assert "| `--lr-warmup-init FLOAT` | `0.0` | Learning rate of the first step of the warm-up. |" in seen.pop("manual")
    assert seen.pop("refused") == ["--lr-warmup-init: got -1.0, expected 0 or more; give --lr-warmup-init N"]
    assert seen.pop("obeyed") == [1e-5, pytest.approx(1e-5 + 0.5 * (1e-3 - 1e-5)), 1e-3]
    assert seen.pop("left out") and not seen.pop("in the case")
    assert seen == {"told": [["1e-05", "left out", "prove's learning rates begin at 0"]]}
