"""Training from the command line: the same curve whatever the layout, and what is printed and written on the way."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.product import (
    CP2_RING,
    DP2,
    EVALUATED,
    GLOBAL_BATCH_SIZE,
    ITERS,
    SEQ_LENGTH,
    SPREAD,
    Product,
    assert_same_curve,
    column,
    log,
    steps,
)

NUMBER = r"\d+\.\d+"
LINE = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration +(?P<iteration>\d+)/ +6 \| consumed samples: +(?P<samples>\d+) \| "
    rf"elapsed time per iteration \(ms\): {NUMBER} \| throughput per GPU \(TFLOP/s/GPU\): {NUMBER} \| "
    r"learning rate: (?P<lr>\d\.\d{6}E[-+]\d\d) \| global batch size: +8 \| lm loss: (?P<loss>\d\.\d{6}E[-+]\d\d) \| "
    rf"loss scale: 1\.0 \| grad norm: (?P<norm>{NUMBER}) \| number of skipped iterations: +0 \| number of nan iterations: +0 \| "
    rf"tokens/s/GPU: {NUMBER} \| exposed comm \(ms\): {NUMBER} \| MFU: n/a \| peak memory \(GiB\): {NUMBER} \| ETA: \d+:\d\d:\d\d \|"
)
VALIDATION = re.compile(
    r" validation loss at iteration (\d+) \| consumed samples: +(\d+) \| lm loss value: (\S+) \| "
    r"lm loss PPL: (\S+) \| validation tokens: (\d+) \|"
)
STEP_KEYS = (
    "iteration lm_loss grad_norm loss_scale skipped_iterations learning_rate consumed_samples tokens_per_second "
    "tokens_per_second_per_gpu tflops_per_gpu mfu exposed_comm_ms elapsed_ms peak_memory_bytes data_parallel_bytes global_batch_size "
    "eta_seconds time"
)


@pytest.mark.tries("tensor_model_parallel_size")
@pytest.mark.few(1)
@pytest.mark.parametrize("name", SPREAD)
def test_every_layout_trains_the_same_model(name: str, straight: Callable[[str], Path]) -> None:
    assert_same_curve(straight(name), straight("one"))


@pytest.mark.tries("log_format")
def test_log_lines_and_log_file_say_the_same(product: Product, tmp_path: Path) -> None:
    printed = product.train(DP2, save=tmp_path, log_format="megatron", **EVALUATED)
    lines = [match for line in printed.out.splitlines() if (match := LINE.fullmatch(line))]
    evaluations = [match for line in printed.out.splitlines() if (match := VALIDATION.fullmatch(line))]
    assert printed.outs[1] == "", "only rank 0 prints"
    assert len(lines) == ITERS and printed.out.endswith(f" saved {tmp_path}/iter_0000006\n")
    assert [set(entry) for entry in steps(tmp_path)] == [set(STEP_KEYS.split())] * ITERS
    for entry, line in zip(steps(tmp_path), lines, strict=True):
        assert (int(line["iteration"]), int(line["samples"])) == (entry["iteration"], entry["iteration"] * GLOBAL_BATCH_SIZE)
        assert entry["consumed_samples"] == int(line["samples"]) and entry["global_batch_size"] == GLOBAL_BATCH_SIZE
        assert [line["lr"], line["loss"]] == [f"{entry[key]:.6E}" for key in ("learning_rate", "lm_loss")]
        assert line["norm"] == f"{entry['grad_norm']:.3f}"
        assert math.isclose(entry["tokens_per_second"], GLOBAL_BATCH_SIZE * SEQ_LENGTH / entry["elapsed_ms"] * 1e3)
        assert math.isclose(entry["tokens_per_second"], 2 * entry["tokens_per_second_per_gpu"])
        assert (entry["loss_scale"], entry["skipped_iterations"]) == (1.0, 0)
        assert entry["exposed_comm_ms"] > 0.0 and entry["peak_memory_bytes"] > 2**20 and entry["mfu"] is None

    written = [entry for entry in log(tmp_path) if "validation_loss" in entry]
    tokens = EVALUATED["eval_iters"] * GLOBAL_BATCH_SIZE * SEQ_LENGTH  # type: ignore[operator]
    assert [(entry["iteration"], entry["consumed_samples"], entry["validation_tokens"]) for entry in written] == [
        (iteration, iteration * GLOBAL_BATCH_SIZE, tokens) for iteration in (0, 3, 6)
    ]
    for entry, match in zip(written, evaluations, strict=True):
        expected = [entry["iteration"], entry["consumed_samples"], f"{entry['validation_loss']:.6E}", entry["validation_tokens"]]
        assert [int(match[1]), int(match[2]), match[3], int(match[5])] == expected
        assert float(match[4]) == pytest.approx(math.exp(entry["validation_loss"]), rel=1e-6)


@pytest.mark.tries("data_order")
@pytest.mark.long
def test_data_order(product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    product.train(save=tmp_path, data_order="sequential")
    shuffled, sequential = column(straight("one"), "lm_loss"), column(tmp_path, "lm_loss")
    assert all(abs(ours - theirs) > 1e-4 for ours, theirs in zip(sequential, shuffled, strict=True))


MASKS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


@pytest.fixture(scope="module")
def masked(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masked")
    product.train(save=folder, **dict.fromkeys(MASKS, True))
    return folder


@pytest.mark.long
def test_document_masks_where_samples_are_divided(product: Product, masked: Path, tmp_path: Path) -> None:
    product.train(CP2_RING, save=tmp_path, **dict.fromkeys(MASKS, True))
    assert_same_curve(tmp_path, masked)


@pytest.mark.tries("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
@pytest.mark.parametrize("mask", MASKS)
def test_each_document_mask_changes_the_loss(mask: str, product: Product, masked: Path, straight: Callable[[str], Path], tmp_path: Path) -> None:
    product.train(save=tmp_path, train_iters=1, **{mask: True})
    alone, none, raise_on_all_ranks = (column(folder, "lm_loss")[0] for folder in (tmp_path, straight("one"), masked))
    assert len({alone, none, raise_on_all_ranks}) == 3
