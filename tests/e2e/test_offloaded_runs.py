"""Runs whose optimizer is on the host: killed and resumed, refused where the machine is too small, planned to the byte."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from signal import Signals

import pytest

from tests.e2e.product import DP2, PP2, SHAPELESS, Layout, Product, assert_same_state, column, exact_curve, log, steps

LONG = 12
EXACT = {"optimizer_offload": "exact", "offload_speculative": True}
SEVENTY = {"model": "llama2-70b", "bf16": True, "seq_length": 4096, "micro_batch_size": 1, "lr": 1e-4}


def long_run(folder: Path) -> dict[str, object]:
    return {"save": folder, "load": folder, "train_iters": LONG, "lr_decay_iters": LONG, "num_layers": 2, "clip_grad": 1.4}


@pytest.mark.long
def test_killed_and_resumed_with_and_without_offload(product: Product, tmp_path: Path) -> None:
    """No bit tells the run from one that nobody killed, whose optimizer never left the device."""
    product.train(DP2, **long_run(tmp_path / "straight"))
    norms = column(tmp_path / "straight", "grad_norm")
    assert min(norms) < 1.4 < max(norms), "clipping is to be active on some steps"
    folder = tmp_path / "killed"
    run = product.start(DP2, **long_run(folder), save_interval=1, async_save=True, **EXACT)
    run.until(lambda: len(steps(folder)) >= 4)
    run.signal(Signals.SIGKILL)
    run.wait()
    assert 4 <= len(steps(folder)) < LONG
    product.train(DP2, **{**long_run(folder), "train_iters": 9}, **EXACT)
    product.train(DP2, **long_run(folder))
    assert exact_curve(folder)[-3:] == exact_curve(tmp_path / "straight")[-3:]
    assert_same_state(folder / f"iter_{LONG:07d}", tmp_path / "straight" / f"iter_{LONG:07d}")


@pytest.mark.long
def test_an_evaluation_and_an_export_see_what_was_trained(product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    product.train(
        PP2, save=tmp_path / "run", export_hf=tmp_path / "hf", eval_interval=3, eval_iters=2, log_interval=2, sample_interval=3,
        sample_prompt="the", sample_tokens=8, **EXACT,
    )  # fmt: skip
    ours = [entry["validation_loss"] for entry in log(tmp_path / "run") if "validation_loss" in entry]
    theirs = [entry["validation_loss"] for entry in log(straight("one")) if "validation_loss" in entry]
    assert ours == pytest.approx(theirs, rel=1e-6) and len(ours) == 3
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_a_machine_without_the_memory_is_told_so(product: Product, tmp_path: Path) -> None:
    """A warning of the plan; an error of the run on every rank, before it takes any memory."""
    options = {**SHAPELESS, "data_path": None, **SEVENTY, "optimizer_offload": "exact"}
    planned = product.run(*product.command(**options, vocab_size=32000, dry_run="yes")).ok().out
    assert "  offload       exact, " in planned and "valid for 1 process\n" in planned
    assert re.search(
        r"warning: --optimizer-offload: got \S+ \S+ free on this machine, expected \S+ \S+ for its 1 rank, \S+ \S+ of it for the ", planned
    )
    ended = product.start(
        Layout(2, {}), **{**options, "data_path": product.data, "vocab_size": 32000, "exchange_chunk_bytes": 1 << 28, "save": tmp_path}
    ).wait()
    assert set(ended.codes) == {1} and "Traceback" not in ended.err
    assert re.search(
        r"error: (rank \d: )?--optimizer-offload: got .* free on this machine, expected .* for its 2 ranks, .* of it for the optimizer", ended.err
    )


def test_options_without_an_effect_are_named(product: Product) -> None:
    said = product.run(*product.command(clip_grad=0, dry_run="yes", **EXACT)).ok().out
    assert "warning: --offload-speculative has no effect with --clip-grad 0: " in said
    said = product.run(*product.command(fp16=True, dry_run="yes", **EXACT)).ok().out
    assert "warning: --offload-speculative has no effect with --fp16: " in said
