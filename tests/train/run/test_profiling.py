"""A run that fails while it is traced."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron_llama.config.schema import Config, LogConfig
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.mesh import Mesh
from megatron_llama.metrics.log import LINES, MetricLog
from megatron_llama.train.run.profiling import Profiling


def test_an_error_does_not_wait_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may wait for ranks that are gone, while the user waits for the error."""
    options = LogConfig(
        profile=True, profile_dir=str(tmp_path), record_timeline=str(tmp_path / "timeline.json"), profile_step_start=0, profile_step_end=9
    )
    mesh = Mesh.single()
    log = MetricLog(None, prints=False, start_iteration=0, train_iters=9, progress_bar=False, line=LINES["compact"], loggers=[])
    waited: list[str] = []
    later: list[Callable[[], object]] = []
    with pytest.raises(torch.OutOfMemoryError), Profiling(Config(log=options), mesh, log, lambda: None, lambda: None) as profiling:
        profiling.before(0)
        monkeypatch.setattr(devices, "synchronize", lambda device: waited.append("device"))
        monkeypatch.setattr(atexit, "register", later.append)
        raise torch.OutOfMemoryError("CUDA out of memory.")
    monkeypatch.undo()
    [stop] = later
    stop()  # as the interpreter does at its end
    assert waited == [] and mesh.recorder.timeline is None
