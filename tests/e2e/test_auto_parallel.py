"""``pretrain --auto-parallel``: a run of several processes that all take the layout which the first one plans."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from megatron_llama.planner.choice import SEARCHED

from tests.e2e.product import Layout, Product, column


@pytest.mark.tries("auto_parallel")
@pytest.mark.long
def test_all_processes_take_the_planned_layout(product: Product, tmp_path: Path) -> None:
    """What is given stays. A resumed run in another layout says so, and goes on where it was."""
    run = {"auto_parallel": True, "micro_batch_size": None, "save": tmp_path / "run"}
    first = product.train(Layout(4, {"pipeline_model_parallel_size": 2}), train_iters=1, lr_decay_iters=2, save_interval=1, **run)
    (line,) = [line for line in first.out.splitlines() if "--auto-parallel: " in line]
    printed = dict(re.findall(r"--([a-z-]+) (\S+)", line))
    meta = json.loads(next((tmp_path / "run").glob("iter_*/meta.json")).read_text())
    saved = {**meta["config"]["parallel"], **meta["config"]["training"]}
    assert printed == {name.replace("_", "-"): str(saved[name]).lower() for name in SEARCHED if name != "pipeline_model_parallel_size"}
    assert saved["pipeline_model_parallel_size"] == 2 and "on 4 x cpu, 4 in a node" in first.out
    again = product.train(Layout(2, {}), train_iters=2, lr_decay_iters=2, load=tmp_path / "run", **run)
    assert "was saved in another layout (pipeline_model_parallel_size was 2" in again.out.replace("\n", " ")
    assert column(tmp_path / "run", "iteration") == [1, 2]


@pytest.mark.long
def test_an_error_of_the_planner_is_everybodys(product: Product) -> None:
    ended = product.launcher.start([*product.command(auto_parallel=True, global_batch_size=None)], 2).wait()
    assert ended.codes == (2, 2) and ended.err.count("--global-batch-size: got nothing, expected samples in a step") == 1


def test_instruction_tuning_takes_one_too(product: Product, tmp_path: Path) -> None:
    options = {
        "auto_parallel": True, "train_data": tmp_path / "none.jsonl", "data_path": None, "split": None, "tokenizer_model": None,
        "vocab_size": 512,
    }
    command = ["sft", *product.command(dry_run=True, world_size=4, pipeline_model_parallel_size=1, **options)[1:]]
    assert "the fastest of" in product.run(*command).ok().out


def test_what_is_missing_beside_a_layout_is_named(product: Product) -> None:
    """Instead of a layout that does not fit."""
    ended = product.run(*product.command(auto_parallel=True, dry_run=True, world_size=4, train_iters=None, lr_decay_iters=None))
    assert ended.codes == (2,) and "--train-iters: got 0, expected a positive number" in ended.err and "memory" not in ended.err


@pytest.mark.long
def test_a_model_with_experts_plans_itself_and_its_recording(product: Product, tmp_path: Path) -> None:
    """Two ranks divide its experts, and what they wait for stands beside the plan."""
    experts = {"model_type": "mixtral", "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": None}
    recorded = {"record_timeline": tmp_path / "run.json.gz", "profile_step_start": 1, "profile_step_end": 3}
    layout = Layout(2, {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall", "pipeline_model_parallel_size": 1})
    run = product.train(layout, auto_parallel=True, micro_batch_size=None, train_iters=3, lr_decay_iters=3, **experts, **recorded)
    assert "of those with" in run.out and "times of experts are computed, not measured" in run.out and "dp 2 (ep 2 alltoall)" in run.out
    compared = product.run("plan", "compare", tmp_path / "run.json.gz").ok().out
    assert "/ep2/alltoall/" in compared and "waiting for ep" in compared and "all_to_all on ep" in compared
