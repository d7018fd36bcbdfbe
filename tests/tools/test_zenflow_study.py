"""The study of what ZenFlow costs: its commands are ones that the program takes, and its table says what was found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from megatron_llama.config.megatron_names import MEGATRON
from megatron_llama.config.parse import parse
from megatron_llama.config.schema import OptimizerConfig, TrainingConfig
from megatron_llama.engine.offload_options import ZenFlowConfig
from megatron_llama.train.commands import pretrain
from megatron_llama.train.setup.checks.ranges import value_problems
from megatron_llama.train.setup.checks.zenflow import zenflow_problems
from megatron_llama.train.setup.resolve import assemble
from megatron_llama.tune.commands import sft
from tools.zenflow_study import CONTENDERS, Contender, StudyConfig, Task, table, tasks


@pytest.fixture
def both(tmp_path: Path) -> list[Task]:
    """Pretraining and tuning, of data that seem to be there."""
    (tmp_path / "docs.meta.json").write_text("{}")
    return list(tasks(StudyConfig(str(tmp_path)), tmp_path))


@pytest.mark.parametrize("one", CONTENDERS, ids=lambda one: one.name)
def test_everybody_sees_as_many_samples(both: list[Task], one: Contender, tmp_path: Path) -> None:
    for task, sections in zip(both, (pretrain.SECTIONS, sft.SECTIONS), strict=True):
        name, *words = task.command(one, 7, tmp_path)
        assert name == task.words[0]
        parsed = parse(words, sections, aliases=MEGATRON)
        training, optimizer, zenflow = (parsed.get(TrainingConfig), parsed.get(OptimizerConfig), parsed.get(ZenFlowConfig))
        assert training.train_iters * training.global_batch_size == task.steps * task.samples and training.seed == 7
        assert training.eval_interval == training.train_iters and optimizer.lr == task.lr
        assert not list(value_problems(zenflow)) and not list(zenflow_problems(replace(assemble(parsed), zenflow=zenflow)))
        assert (zenflow != ZenFlowConfig()) == one.name.startswith("ZenFlow")


def test_the_table_compares_within_seeds() -> None:
    task = Task("tuning", ("sft",), 96, 4, 2e-3, {CONTENDERS[0].name: [2.0, 4.0], "other": [2.2, 4.2]})
    *_, plain, other = table(task)
    assert plain == "| AdamW | 3.0000 | 2.0000 to 4.0000 | +0.00 % | +0.00 % |"
    assert other == "| other | 3.2000 | 2.2000 to 4.2000 | +7.50 % | +10.00 % |"
