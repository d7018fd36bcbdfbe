"""Runs on text that is tokenized while they train."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tools.range_server import serving

from tests.e2e.product import CP2_RING, DP2, ONE, TP2, ZB_V, Layout, Product, Refuse, assert_same_state, column

TP2_ZB_V = Layout(4, {**TP2.options, **ZB_V.options})
STREAM = {"split": None, "seq_length": 32, "stream_lanes": 4, "stream_window": 16, "micro_batch_size": 1}


@pytest.fixture(scope="module")
def text(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a data set on the hub: two training files, one for validation, and what lies beside."""
    folder = tmp_path_factory.mktemp("text")
    shares = {"train-0": product.texts[:250], "train-1": product.texts[250:500], "validation": product.texts[500:]}
    for name, texts in shares.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"body": each}) + "\n" for each in texts))
    (folder / "README.md").write_text("Python's language reference")
    return folder


def options(product: Product, text: object, **changes: object) -> dict[str, object]:
    [tokenizer] = product.data.parent.glob("**/tokenizer.model")
    return {**STREAM, "data_path": text, "stream_key": "body", "tokenizer_model": tokenizer, "eval_interval": 3, "eval_iters": 1, **changes}


def places(checkpoint: Path) -> list:
    return json.loads((checkpoint / "meta.json").read_text())["stream_places"]


@pytest.mark.few(1, all=1)
@pytest.mark.long
@pytest.mark.parametrize(("first", "second"), [(DP2, ONE), (TP2_ZB_V, CP2_RING)], ids=["dp 2 and one", "tp 2 zb-v and cp 2"])
def test_a_run_goes_on_at_another_dp(first: Layout, second: Layout, product: Product, text: Path, tmp_path: Path) -> None:
    """From a slow server, and resumed from the disk: the same samples. In the same layout, the same bits."""
    straight = product.train(first, **options(product, text), save=tmp_path / "straight")
    assert "tokenized while the run trains on it, shuffled" in straight.out and "2 files" in straight.out
    with serving(text, latency=0.01) as server:
        product.train(first, **options(product, server.url), save=tmp_path / "cut", exit_interval=4)
    for layout, folder in ((first, "same"), (second, "other")):
        product.train(layout, **options(product, text), load=tmp_path / "cut", save=tmp_path / folder)
        assert places(tmp_path / folder / "iter_0000006") == places(tmp_path / "straight" / "iter_0000006")
    assert_same_state(tmp_path / "same" / "iter_0000006", tmp_path / "straight" / "iter_0000006")
    both = [column(tmp_path / "straight", "lm_loss")[4:], column(tmp_path / "other", "lm_loss")]
    assert both[1] == pytest.approx(both[0], rel=1e-5)
    assert " validation loss at iteration 6 " in straight.out


@pytest.mark.long
def test_samples_that_a_rollback_leaves_out(product: Product, text: Path, tmp_path: Path) -> None:
    """The run returns to a checkpoint, and reads on from its place behind the samples that it leaves out."""
    spiky = {"loss_spike_factor": 1.001, "loss_spike_window": 1, "on_bad_step": "rollback", "eval_interval": None, "eval_iters": None}
    ended = product.train(**options(product, text, **spiky, train_iters=10, lr_decay_iters=12), save=tmp_path / "a", save_interval=1)
    assert " back to iteration " in ended.out
    left_out = re.findall(r"samples (\d+) to (\d+) are left out", ended.out)
    [[*rows]] = places(tmp_path / "a" / "iter_0000010")
    consumed = 10 * 8 + 8 * len(left_out)
    assert f"consumed samples: {consumed}" in ended.out
    lanes, block = 2, 8
    assert [row[0] for row in rows] == [(consumed // lanes - 1) // block] * lanes


@pytest.mark.long
def test_what_a_text_does_not_go_with(product: Product, text: Path, refuse: Refuse, tmp_path: Path) -> None:
    wrong = options(
        product, (text, product.data), epochs=2, train_iters=None, lr_decay_iters=None, split="90,10,0", stream_lanes=0,
        stream_window=0, stream_workers=0, eval_iters=0,
    )  # fmt: skip
    said = refuse(product.command(**wrong), code=2)
    for problem in (
        f"--data-path: got the indexed dataset {product.data} beside text",
        "--data-path: got several texts without weights",
        "--epochs: got 2, expected a length in steps or samples",
        "--split: got 90,10,0",
        "--stream-window: got 0",
        "--stream-lanes: got 0",
        "--stream-workers: got 0",
        "--eval-iters: got 0",
    ):
        assert problem in said
    said = refuse(product.command(**options(product, text, tokenizer_model=None, vocab_size=512)), code=1)
    assert "--tokenizer-model: got no tokenizer, expected the tokenizer that makes tokens of the text" in said
    said = refuse(product.command(**options(product, text / "train-0.jsonl")), code=1)
    assert "got no file for evaluation (train-0.jsonl), expected files whose names" in said
    product.train(**options(product, text), train_iters=1, save=tmp_path)
    said = refuse(product.command(**options(product, text, stream_window=8, load=tmp_path, save=tmp_path)), code=1)
    assert "got other text than that of" in said and "samples in a window 16, now 8" in said
