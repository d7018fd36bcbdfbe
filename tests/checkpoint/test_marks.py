"""A start believes what a save has found in a checkpoint, and looks at everything else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron_llama.checkpoint import native
from megatron_llama.checkpoint.finite import NotFinite
from megatron_llama.checkpoint.saver import Saver
from megatron_llama.config.schema import CheckpointConfig
from megatron_llama.engine.pieces import shard_pieces
from megatron_llama.metrics.log import MetricLog
from megatron_llama.train.setup.build import find_not_finite_at_start, load_or_init
from megatron_llama.train.setup.start import Start

from tests.checkpoint.cases import SINGLE, renew_sums, state_at
from tests.parallel.cases import Layout, trainer

ONE = Layout()
WEIGHT = "model.norm.weight"
MOMENT = f"optimizer.exp_avg_sq.{WEIGHT}"


def saved(folder: Path, state: str | None) -> Path:
    """A checkpoint in which the ``state`` of one weight has lost a value."""
    run = trainer(SINGLE, ONE)
    for piece in shard_pieces(run.optimizer):
        if piece.rectangle.name == WEIGHT and state is not None:
            piece.tensors[state].view(-1)[3] = torch.nan
    return native.save(folder, run.optimizer, run.mesh, state_at(1), ONE.config())


def begun(path: Path, **options: object) -> tuple[NotFinite, ...]:
    run = trainer(SINGLE, ONE)
    config = ONE.config()
    config = replace(config, checkpoint=replace(config.checkpoint, load=str(path), **options))
    start = Start(path, native.read_meta(path))
    load_or_init(config, run.optimizer, run.mesh, start)
    return find_not_finite_at_start(config, run.optimizer, run.mesh, start)


def edit_mark(path: Path, mark: object) -> None:
    content = json.loads((path / "meta.json").read_text())
    assert content.pop("not_finite") is not None
    (path / "meta.json").write_text(json.dumps(content if mark is None else {**content, "not_finite": mark}))
    renew_sums(path)


@pytest.mark.parametrize("state", [None, "master"])
def test_a_mark_says_what_looking_finds(state: str | None, tmp_path: Path) -> None:
    path = saved(tmp_path, state)
    expected = () if state is None else (NotFinite(WEIGHT, 1, (3,), "nan"),)
    assert native.read_meta(path).not_finite == expected == begun(path)
    edit_mark(path, None)
    assert native.read_meta(path).not_finite is None
    assert begun(path) == expected


def test_a_mark_saves_the_look(tmp_path: Path) -> None:
    path = saved(tmp_path, "master")
    edit_mark(path, [])
    assert begun(path) == ()


def test_what_is_not_loaded_is_not_said(tmp_path: Path) -> None:
    path = saved(tmp_path, "exp_avg_sq")
    assert [entry.name for entry in begun(path)] == [MOMENT]
    assert begun(path, load_optim=False) == ()


@pytest.mark.parametrize(("policy", "point"), [("rollback", 1), ("warn", 2)])
def test_a_run_that_keeps_marked_checkpoints_returns_to_the_newest(policy: str, point: int, tmp_path: Path) -> None:
    """Otherwise one lost value would take all the steps behind it at each return."""
    run = trainer(SINGLE, ONE)
    config = replace(ONE.config(), checkpoint=CheckpointConfig(save=str(tmp_path), on_bad_checkpoint=policy))
    log = MetricLog(None, prints=False, start_iteration=0, train_iters=9, progress_bar=False)
    saver = Saver(config, run.mesh, run.optimizer, None)
    saver.save(state_at(1), log)
    next(iter(shard_pieces(run.optimizer))).tensors["master"].view(-1)[0] = torch.nan
    saver.save(state_at(2), log)
    saver.finish(log)
    assert saver.newest_good == 1 and saver.return_point == tmp_path / f"iter_000000{point}"
    saver.rewind()
    assert saver.newest == saver.return_point == tmp_path / f"iter_000000{point}"
