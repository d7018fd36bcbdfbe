"""ZenFlow by the command line: DeepSpeed's file, a kill, and another mode."""

from __future__ import annotations

import json
from pathlib import Path
from signal import Signals

import pytest
from megatron_llama.config.schema import Config, DataConfig, ModelConfig, TrainingConfig
from megatron_llama.train.setup.inputs import TRAINING, open_stream

from tests.e2e.product import DP2, GLOBAL_BATCH_SIZE, SEQ_LENGTH, VOCAB_SIZE, Product, assert_same_state, exact_curve, log, state

SPLIT = "1,99,0"
"""So few samples to train on that a run has several epochs."""
ITERS = 14


def steps_per_epoch(product: Product) -> int:
    config = Config(ModelConfig(vocab_size=VOCAB_SIZE), training=TrainingConfig(seq_length=SEQ_LENGTH), data=DataConfig(split=SPLIT))
    return -(-len(open_stream(config, str(product.data), TRAINING)) // GLOBAL_BATCH_SIZE)


@pytest.mark.tries("zenflow_select_strategy", "zenflow_config")
@pytest.mark.long
def test_a_run_by_deepspeeds_file(product: Product, tmp_path: Path) -> None:
    """Columns are chosen once an epoch; a run that is killed in the middle of a window ends as the one that was not."""
    block = {"topk_ratio": 0.25, "select_strategy": "epoch", "select_interval": 1, "update_interval": 2, "overlap_step": True}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"steps_per_print": 5, "zero_optimization": {"stage": 2, "zenflow": block}}))
    options = {"zenflow_config": file, "split": SPLIT, "train_iters": ITERS, "save_interval": 4}
    done = product.train(DP2, save=tmp_path / "one", **options)
    assert "steps_per_print is not acted on: give --log-interval" in done.out
    found = state(tmp_path / "one" / f"iter_{ITERS:07d}")
    epoch = steps_per_epoch(product)
    assert 2 <= epoch <= ITERS // 2, "the choice of an epoch has to be seen"
    steps, chosen = found["optimizer.zenflow.windows"].tolist()
    # Windows of two begin behind the first choice, and behind each save: a choice comes with the first end of one in another epoch.
    ends, last, opened = [], 1, 1
    for step in range(2, ITERS + 1):
        if step - opened == 2:
            opened = step
            if step - last >= epoch:
                last = step
                ends.append(step)
        opened = step if step % 4 == 0 else opened
    assert len(ends) > 1 and (steps, chosen - 1) == (ITERS, ends[-1])
    hot, updates = (found[f"optimizer.{name}.model.layers.1.mlp.down_proj.weight"] for name in ("hot", "updates"))
    assert hot.sum() == len(hot) // 4 and updates.max() <= ITERS and len(updates.unique()) > 2
    run = product.start(DP2, save=tmp_path / "two", async_save=True, **options)
    run.until(lambda: (tmp_path / "two" / "iter_0000004").exists() and len(log(tmp_path / "two")) >= 5)
    run.signal(Signals.SIGKILL)
    run.wait()
    product.train(DP2, save=tmp_path / "two", load=tmp_path / "two", async_save=True, **options)
    assert exact_curve(tmp_path / "two") == exact_curve(tmp_path / "one")
    assert_same_state(tmp_path / "two" / f"iter_{ITERS:07d}", tmp_path / "one" / f"iter_{ITERS:07d}")


def test_a_dry_run_counts_what_stays_on_the_device(product: Product) -> None:
    words = product.command(bf16=True, optimizer_offload="zenflow", zenflow_update_interval=4, dry_run=True)
    printed = product.run(*words).ok().out
    assert "hot columns" in printed
