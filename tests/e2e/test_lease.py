"""Two runs and one folder: the second is refused, or takes the folder over, and neither destroys what the other writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from signal import Signals
from typing import Any

import pytest

from tests.e2e.product import DP2, ONE, Product, contents, steps

ENDLESS = {"train_iters": 100_000, "lr_decay_iters": 100_000, "save_interval": 3, "save_retain": 2, "num_layers": 2, "load": "auto"}


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def left(folder: Path) -> list[str]:
    """What no run that has ended leaves."""
    return [path.name for path in folder.iterdir() if path.suffix in (".incomplete", ".replaced", ".draft") or path.match("lease.*")]


@pytest.mark.long
@pytest.mark.tries("steal_save")
def test_a_second_start_is_refused_and_one_that_steals_ends_the_first(product: Product, tmp_path: Path) -> None:
    options = {**ENDLESS, "async_save": True, "save": tmp_path}
    first = product.start(DP2, **options)
    first.until(lambda: len(steps(tmp_path)) >= 4)
    refused = product.start(DP2, **options).wait()
    assert set(refused.codes) == {1}
    holder = f"process {first.pids[0]} on "
    assert refused.err.startswith(f"error: --save {tmp_path}: got a run that writes there ({holder}") and refused.err.count("\n") == 1
    done = len(steps(tmp_path))
    first.until(lambda: len(steps(tmp_path)) > done)
    wrong = product.start(DP2, **options, steal_save=True, tensor_model_parallel_size=3).wait()
    assert set(wrong.codes) == {2} and "taken over" not in wrong.out, "who cannot run takes a folder from nobody"
    done = len(steps(tmp_path))
    first.until(lambda: len(steps(tmp_path)) > done)
    thief = product.start(DP2, **options, steal_save=True)
    ended = first.wait()
    assert set(ended.codes) == {1}
    words = rf"error: rank 0: --save {tmp_path}: got taken over by process {thief.pids[0]} on .*, expected this run alone to write there; "
    assert re.match(words, ended.err) and "free space" not in ended.err and "Traceback" not in ended.err, ended.err
    done = len(steps(tmp_path))
    thief.until(lambda: len(steps(tmp_path)) > done + 4)
    thief.signal(Signals.SIGTERM)
    out = thief.wait().ok(143).out
    assert f" --save {tmp_path}: taken over from {holder}" in out
    assert [entry["iteration"] for entry in steps(tmp_path)] == list(range(1, steps(tmp_path)[-1]["iteration"] + 1))
    happened = [(event["event"], "taken over" in event.get("error", "")) for event in events(tmp_path) if event["event"] != "saved"]
    assert happened == [("start", False), ("end", True), ("start", False), ("end", False)], "nothing is written behind the end"
    assert left(tmp_path) == []
    newest = product.run("inspect", "checkpoint", tmp_path, "--verify").ok().out
    assert f"iter_{steps(tmp_path)[-1]['iteration']:07d}" in newest and "verified: " in newest


@pytest.mark.long
def test_a_run_that_was_stopped_while_another_took_its_folder_writes_nothing(product: Product, tmp_path: Path) -> None:
    """It comes back when the other one has ended, in the middle of whatever it did."""
    first = product.start(ONE, save=tmp_path, **{**ENDLESS, "save_interval": 1})
    first.until(lambda: len(steps(tmp_path)) >= 4)
    first.signal(Signals.SIGSTOP)
    try:
        thief = product.train(ONE, save=tmp_path, **{**ENDLESS, "train_iters": 40}, steal_save=True)
        assert " taken over from " in thief.out
        before = contents(tmp_path)
    finally:
        first.signal(Signals.SIGCONT)
    ended = first.wait()
    assert ended.codes == (1,) and "another start has taken the folder over and ended" in ended.err, ended.err
    assert contents(tmp_path) == before and left(tmp_path) == []


def test_a_killed_run_goes_on_at_once(product: Product, tmp_path: Path) -> None:
    """Its lease is there still, and its process is not."""
    run = product.start(save=tmp_path, **ENDLESS)
    run.until(lambda: len(steps(tmp_path)) >= 4)
    run.signal(Signals.SIGKILL)
    run.wait()
    assert left(tmp_path) == ["lease.1.json"]
    said = product.train(save=tmp_path, **{**ENDLESS, "train_iters": 6}).out
    assert "--save" not in said and "held by" not in said and steps(tmp_path)[-1]["iteration"] >= 6
    assert left(tmp_path) == []


@pytest.mark.long
def test_a_folder_that_another_run_writes_can_be_read(product: Product, tmp_path: Path) -> None:
    # It keeps what is read here, however slow that is.
    run = product.start(save=tmp_path / "run", **ENDLESS | {"save_retain": 1000})
    run.until(lambda: (tmp_path / "run" / "iter_0000003").is_dir())
    product.train(load=tmp_path / "run" / "iter_0000003", save=tmp_path / "branch", num_layers=2, train_iters=4)
    assert "lease" not in product.run("inspect", "checkpoint", tmp_path / "run").ok().out
    run.signal(Signals.SIGTERM)
    run.wait().ok(143)
