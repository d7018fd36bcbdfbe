"""The options of ZenFlow: what they mean in steps, what is refused, and DeepSpeed's file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megatron_llama.config.megatron_names import MEGATRON
from megatron_llama.config.parse import parse
from megatron_llama.config.schema import Config, LoraConfig
from megatron_llama.config.sections import config_sections
from megatron_llama.engine.offload_options import OffloadConfig, ZenFlowConfig
from megatron_llama.engine.plan.zenflow import longest_window, selection_steps, sends_fp32
from megatron_llama.errors import ConfigError
from megatron_llama.train.setup.checks.ranges import value_problems
from megatron_llama.train.setup.checks.zenflow import zenflow_notes, zenflow_problems, zenflow_warnings
from megatron_llama.train.setup.resolve import assemble

BLOCK = {
    "topk_ratio": 0.05, "select_strategy": "step", "select_interval": 32, "update_interval": 8, "full_warm_up_rounds": 3,
    "overlap_step": True,
}
MEANT = ZenFlowConfig(
    zenflow_topk_ratio=0.05,
    zenflow_select_strategy="step",
    zenflow_select_interval="32",
    zenflow_update_interval="8",
    zenflow_full_warm_up_rounds=3,
    zenflow_overlap_step=True,
)


def configured(*argv: str) -> Config:
    return assemble(parse(argv, config_sections(), aliases=MEGATRON))


def file(folder: Path, content: Any) -> str:
    path = folder / "zenflow.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_intervals_in_steps() -> None:
    every_epoch = ZenFlowConfig(zenflow_select_strategy="epoch", zenflow_select_interval="3")
    assert selection_steps(every_epoch, 10) == 30
    assert selection_steps(MEANT, 10) == 32
    assert selection_steps(ZenFlowConfig(), 10) == 10 and selection_steps(ZenFlowConfig(), 0) == 0
    assert longest_window(MEANT) == 8 and longest_window(ZenFlowConfig(zenflow_update_interval_cap=5)) == 5
    at_once = replace(MEANT, zenflow_update_interval="1", zenflow_overlap_step=False)
    assert [sends_fp32(one) for one in (MEANT, at_once, replace(at_once, zenflow_overlap_step=True))] == [False, True, False]
    assert sends_fp32(replace(MEANT, zenflow_topk_ratio=1.0))


def test_yaml_flags_and_deepspeeds_file_say_the_same(tmp_path: Path) -> None:
    lines = "".join(f"  {name}: {str(value).lower()}\n" for name, value in BLOCK.items())
    (tmp_path / "run.yaml").write_text(f"zenflow:\n{lines}offload:\n  optimizer_offload: zenflow\n")
    words = [word for name, value in BLOCK.items() for word in (f"--zenflow-{name.replace('_', '-')}", str(value).lower())]
    from_yaml = configured("--config", str(tmp_path / "run.yaml"))
    from_flags = configured(*words, "--optimizer-offload", "zenflow")
    assert from_yaml.zenflow == from_flags.zenflow == MEANT
    whole = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": BLOCK}}
    for content in (BLOCK, whole):
        path = file(tmp_path, content)
        found = configured("--zenflow-config", path)
        assert found.zenflow == replace(MEANT, zenflow_config=path)
        assert found.offload.optimizer_offload == "zenflow", "the file asks for it"
    other = configured("--zenflow-config", path, "--zenflow-topk-ratio", "0.2", "--optimizer-offload", "none")
    assert other.zenflow.zenflow_topk_ratio == 0.2 and other.zenflow.zenflow_update_interval == "8"
    assert other.offload.optimizer_offload == "none"


def test_what_of_the_file_is_not_acted_on_is_said(tmp_path: Path) -> None:
    block = {**BLOCK, "offload": True, "auto_ratio": 0.9, "pt_reserved_cores_perc": 0.5}
    content = {
        "gradient_clipping": 1.0,
        "wall_clock_breakdown": False,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}, "zenflow": block},
    }
    notes = "\n".join(zenflow_notes(configured("--zenflow-config", file(tmp_path, content))))
    for text in (
        "auto_ratio is not acted on: a window of update_interval auto closes when 0.99 of the matrices ask",
        "offload is not acted on: moments of hot columns stay on the device",
        "pt_reserved_cores_perc is not acted on: --offload-cores",
        "gradient_clipping is not acted on: give --clip-grad",
        "wall_clock_breakdown is not acted on",
        "zero_optimization.stage is not acted on: give --data-parallel-sharding-strategy",
        "zero_optimization.offload_optimizer is not acted on",
    ):
        assert text in notes
    assert not list(zenflow_notes(configured("--zenflow-config", file(tmp_path, BLOCK))))


def test_a_file_is_refused_with_all_that_is_wrong(tmp_path: Path) -> None:
    block = {"topk_ration": 0.1, "update_interval": 0, "select_interval": True, "select_strategy": "never", "overlap_step": 1}
    with pytest.raises(ConfigError) as error:
        configured("--zenflow-config", file(tmp_path, {"zero_optimization": {"zenflow": block}}))
    for text in ("did you mean topk_ratio?", "update_interval: got 0", "select_interval: got true", 'got "never"', "overlap_step: got 1"):
        assert text in str(error.value)
    for content, text in (([], "expected an object"), ({"zero_optimization": {}}, "no zero_optimization.zenflow")):
        with pytest.raises(ConfigError, match=text):
            configured("--zenflow-config", file(tmp_path, content))
    (tmp_path / "twice.json").write_text('{"topk_ratio": 0.1, "topk_ratio": 0.2}')
    with pytest.raises(ConfigError, match="got topk_ratio stands there twice"):
        configured("--zenflow-config", str(tmp_path / "twice.json"))
    with pytest.raises(ConfigError, match="No such file"):
        configured("--zenflow-config", str(tmp_path / "none.json"))


def test_options_that_cannot_be_are_named_together() -> None:
    wrong = ZenFlowConfig(
        zenflow_topk_ratio=1.5,
        zenflow_select_strategy="step",
        zenflow_update_interval="often",
        zenflow_update_interval_cap=0,
        zenflow_full_warm_up_rounds=-1,
    )
    found = "\n".join([*value_problems(wrong), *zenflow_problems(Config(zenflow=wrong))])
    for name in ("topk-ratio", "update-interval:", "update-interval-cap", "full-warm-up-rounds", "select-interval"):
        assert f"--zenflow-{name}" in found
    short = replace(MEANT, zenflow_select_interval="4")
    assert "at least the 8 steps of a window" in "\n".join(zenflow_problems(Config(zenflow=short)))
    assert not list(value_problems(MEANT)) and not list(zenflow_problems(Config(zenflow=MEANT))) and not list(zenflow_problems(Config()))


def test_what_has_no_effect_is_said() -> None:
    on = OffloadConfig(optimizer_offload="zenflow")
    at_once = replace(MEANT, zenflow_update_interval="1", zenflow_overlap_step=False)
    assert "have no effect with --optimizer-offload none" in "\n".join(zenflow_warnings(Config(zenflow=MEANT)))
    assert "is AdamW" in "\n".join(zenflow_warnings(Config(zenflow=at_once, offload=on)))
    speculative = replace(on, offload_speculative=True)
    assert "--offload-speculative has no effect" in "\n".join(zenflow_warnings(Config(zenflow=MEANT, offload=speculative)))
    added = Config(zenflow=MEANT, offload=on, lora=LoraConfig(lora_rank=4))
    assert "low-rank additions are updated by AdamW" in "\n".join(zenflow_warnings(added))
    assert not list(zenflow_warnings(Config(zenflow=MEANT, offload=on))) and not list(zenflow_warnings(Config()))
