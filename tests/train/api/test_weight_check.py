"""A run whose weights are still compared with their sums: it is stopped, or the damage comes out after a save."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import megatron_llama as ml
import pytest
from megatron_llama.checkpoint import listed_files
from megatron_llama.train.setup import weight_check

from tests.flipped import flip

SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@pytest.fixture(scope="module")
def exported(options: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a run."""
    folder = tmp_path_factory.mktemp("exported") / "hf"
    ml.train(options, train_iters=1, export_hf=folder)
    return folder


@pytest.fixture
def begun(options: Mapping[str, Any], exported: Path, tmp_path: Path) -> dict[str, Any]:
    """Options of a run that begins with it, in a folder of its own."""
    shutil.copytree(exported, tmp_path / "hf")
    rest = {name: value for name, value in options.items() if name not in SHAPE}
    return {**rest, "init_from_hf": tmp_path / "hf", "save": tmp_path / "run", "export_hf": tmp_path / "exported"}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No file of the weights is compared before the event is set."""
    goes_on = threading.Event()
    hashed = listed_files.file_sum

    def slow(path: Path, kind: str = "sha256", stopped: threading.Event | None = None) -> str:
        while stopped is not None and not goes_on.wait(0.01) and not stopped.is_set():
            pass
        return hashed(path, kind, stopped)

    monkeypatch.setattr(listed_files, "file_sum", slow)
    monkeypatch.setattr(weight_check, "WEIGHT_CHECK_SECONDS", 0.1)
    return goes_on


class Calls(ml.Callback):
    """Calls a function after a step, or after a save."""

    def __init__(self, *, step: Any = None, save: Any = None) -> None:
        self.step, self.save = step, save

    def on_step(self, run: ml.Run, step: ml.Step) -> None:
        if self.step is not None and step.iteration == 2:
            self.step()

    def on_save(self, run: ml.Run, path: Path) -> None:
        if self.save is not None:
            self.save()


@pytest.mark.long
@pytest.mark.parametrize("how", ["SIGTERM", "exit_interval"])
def test_a_run_that_is_stopped_saves_before_all_is_compared(
    how: str, begun: dict[str, Any], reads: threading.Event, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if how == "SIGTERM":
        result = ml.train(begun, [Calls(step=lambda: os.kill(os.getpid(), signal.SIGTERM))])
        assert result.stopped_by == signal.SIGTERM
    else:
        result = ml.train(begun, exit_interval=2)
    assert result.checkpoint is not None and (result.checkpoint / "meta.json").is_file() and result.iteration < 6
    said = capsys.readouterr().out
    assert f" warning: 1 file of the weights in {tmp_path}/hf, 0.0 GiB, is not compared with {tmp_path}/hf/SHA256SUMS yet" in said
    assert result.export is None and not (tmp_path / "exported").exists()
    reads.set()
    assert ml.train(begun, load=tmp_path / "run").export == tmp_path / "exported", "it goes on"


@pytest.mark.long
@pytest.mark.parametrize("async_save", [False, True])
def test_damage_that_comes_out_after_a_save(async_save: bool, begun: dict[str, Any], reads: threading.Event, tmp_path: Path) -> None:
    """It ends the run, which says what was saved meanwhile."""
    file = tmp_path / "hf" / "model.safetensors"
    flip(file, -4)
    with pytest.raises(ml.UserError) as error:
        ml.train(begun, [Calls(save=reads.set)], save_interval=2, async_save=async_save)
    assert f"{file}: got sha256 " in str(error.value) and f"remove it: {tmp_path}/run/iter_0000002" in str(error.value)
    assert not (tmp_path / "exported").exists()
