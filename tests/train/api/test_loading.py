"""What a run loads, it loads before its first step: an import in the middle of one would stall it, on each rank at another moment, and one in
a thread or a signal handler could wait for whoever waits for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.launcher import ROOT, free_port

PROGRAM = """
import gc, json, os, sys
from pathlib import Path
import megatron_llama as ml
from megatron_llama.pipeline.runtime import PipelineRuntime

def loaded():
    return {name for name in sys.modules if name.startswith("megatron_llama.")}

def train(options, folder):
    before_steps = []
    step = PipelineRuntime.step

    def noted_step(self, *given, **named):
        before_steps.append(loaded())
        return step(self, *given, **named)

    PipelineRuntime.step = noted_step
    folder.mkdir()
    os.chdir(folder)
    result = ml.train(options)
    assert result.iteration == 3, result
    (folder / "loaded.json").write_text(json.dumps([sorted(before_steps[0]), sorted(loaded() - before_steps[0])]))

gc.freeze()  # or each run looks at all of it when it begins and when it ends
for name, options in json.loads(sys.argv[1]).items():
    child = os.fork()
    if child == 0:
        train(options, Path.cwd() / name)
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0, name
"""
"""Runs, each in a copy of a process that has loaded no more than what all of them begin with."""
AFTER_THE_FIRST_STEP: Mapping[str, str] = {}
"""Modules that a run may load later, and why."""
CHOICES: Mapping[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "nothing": ({}, ()),
    "what is written": (
        {
            "save": "run", "save_interval": 2, "export_hf": "exported", "tensorboard_dir": "board", "open_metrics": "{port}",
            "eval_interval": 2, "eval_iters": 1, "profile_step_start": 1, "profile_step_end": 2, "record_timeline": "timeline.json",
        },
        ("checkpoint.model_folders.hf.writer", "metrics.open_metrics", "train.run.timeline_recorder"),
    ),
    "written in the background": ({"save": "run", "save_interval": 1, "async_save": True}, ()),
    "Muon": ({"optimizer": "muon"}, ("engine.rules.muon",)),
    "schedule-free": ({"optimizer": "schedule_free_adamw", "lr_decay_style": "constant"}, ("engine.rules.schedule_free",)),
    "exact offload": ({"optimizer_offload": "exact"}, ("engine.offload.exact",)),
    "ZenFlow": (
        {"optimizer_offload": "zenflow", "zenflow_select_strategy": "step", "zenflow_select_interval": 2, "zenflow_update_interval": 2},
        ("engine.offload.zenflow.rule",),
    ),
    "Megatron's order": ({"megatron_data_order": True}, ("data.megatron_order",)),
    "a dataset behind a URL": ({"data_path": "file://{data}", "data_cache_path": "cache"}, ("data.remote_indexed",)),
    "text": ({"data_path": "{text}", "tokenizer_model": "{tokenizer}", "split": None, "eval_interval": 0}, ("data.text_stream",)),
    "another family": ({"model_type": "qwen3", "qk_norm": "head"}, ("model.families.qwen3",)),
    "experts": (
        {"model_type": "mixtral", "num_experts": 4, "num_experts_per_tok": 2},
        ("model.families.experts", "model.nn.moe.block", "model.plan.experts", "train.setup.checks.experts"),
    ),
    "low-rank additions": ({"lora_rank": 2, "save": "run"}, ()),
}
"""Options that choose what is loaded, and modules that they choose."""


@pytest.mark.long
def test_what_options_choose_is_loaded_before_the_first_step(options: Mapping[str, object], data: Path, tmp_path: Path) -> None:
    [tokenizer] = data.parent.glob("**/tokenizer.model")
    places = {"data": data, "text": data.with_suffix(".jsonl"), "tokenizer": tokenizer, "port": free_port()}
    runs = {}
    for name, (changes, _) in CHOICES.items():
        given = {**options, "train_iters": 3, **{key: value.format(**places) if isinstance(value, str) else value for key, value in changes.items()}}
        runs[name] = {key: str(value) if isinstance(value, Path) else value for key, value in given.items() if value is not None}
    program = [sys.executable, "-c", PROGRAM, json.dumps(runs)]
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300)
    assert done.returncode == 0, done.stderr
    loaded = {name: json.loads((tmp_path / name / "loaded.json").read_text()) for name in CHOICES}
    assert [(name, module) for name, (_, after) in loaded.items() for module in after if module not in AFTER_THE_FIRST_STEP] == []
    chosen = [(name, f"megatron_llama.{module}") for name, (_, modules) in CHOICES.items() for module in modules]
    assert [(name, module) for name, module in chosen if module not in loaded[name][0]] == []
    assert [module for _, module in chosen if module in loaded["nothing"][0]] == [], "a run loads what its own options choose"
