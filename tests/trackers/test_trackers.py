"""MLflow and Trackio hold what log.jsonl has, as their own clients read it from stores on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from megatron_llama.config.schema import Config, LogConfig
from megatron_llama.errors import ConfigError
from megatron_llama.metrics.log import MetricLog, MetricLogger, ValidationRecord
from megatron_llama.metrics.mlflow import MLflow, require_mlflow
from megatron_llama.metrics.trackio import Trackio, require_trackio

from tests.metrics.test_metric_log import RECORD

pytestmark = pytest.mark.trackers


def written(folder: Path, opened: Callable[[], MetricLogger]) -> list[dict[str, float]]:
    """A run of four steps that goes back once, and is resumed once. Returns what log.jsonl has then."""
    steps = [replace(RECORD, iteration=n, lm_loss=None if n == 2 else 10.0 / (n + 1), numbers={"rewards/margins": n / 4}) for n in range(6)]
    for start, iterations in ((0, (1, 2, 3, 4)), (4, (5,))):
        with MetricLog(folder, prints=True, start_iteration=start, train_iters=5, progress_bar=False, loggers=[opened()]) as log:
            for n in iterations:
                log.write(steps[n])
                if n == 3:
                    log.write_validation(ValidationRecord(3, 9, 2.5, 99, {"rewards/margins": 0.75}))
                    log.rewind(2)
                    log.write(steps[3])
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    store = (tmp_path / "store").as_uri()
    config = Config(log=LogConfig(mlflow_experiment="llamas", mlflow_tracking_uri=store, job_name="small"))
    require_mlflow(config.log)
    lines = written(tmp_path, lambda: MLflow(config))
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("llamas")
    second, first = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])
    assert [run.info.run_name for run in (first, second)] == ["small"] * 2
    assert [run.info.status for run in (first, second)] == ["FINISHED"] * 2
    assert first.data.params["log.job_name"] == "small" and len(first.data.params) > 150

    def curve(run: object, name: str) -> list[tuple[int, float]]:
        return [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]  # type: ignore[attr-defined]

    losses = [(line["iteration"], line["lm_loss"]) for line in lines if line.get("lm_loss") is not None]
    assert dict(curve(first, "lm_loss") + curve(second, "lm_loss")) == dict(losses)
    assert [step for step, _ in curve(first, "lm_loss")] == [1, 3, 3, 4], "what is repeated stands at its step once more"
    assert curve(first, "validation_loss") == [(3, 2.5)] and curve(second, "rewards/margins") == [(5, 1.25)]


def test_mlflow_without_a_store_is_one_error(tmp_path: Path) -> None:
    config = Config(log=LogConfig(mlflow_experiment="llamas", mlflow_tracking_uri="nowhere://store"))
    with pytest.raises(ConfigError, match=r"^--mlflow-experiment: got .*correct --mlflow-tracking-uri"):
        MLflow(config)


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))  # read when trackio is imported, here for the first time
    config = Config(log=LogConfig(trackio_project="llamas", job_name="small"))
    require_trackio(config.log)
    lines = written(tmp_path, lambda: Trackio(config))
    from trackio.sqlite_storage import SQLiteStorage

    runs = SQLiteStorage.get_run_records("llamas")
    assert [run["name"] for run in runs] == ["small"] * 2
    found = [one for run in runs for one in SQLiteStorage.get_logs("llamas", run["name"], run_id=run["id"])]
    curve = [(one["step"], one["lm_loss"]) for one in found if "lm_loss" in one]
    assert dict(curve) == {line["iteration"]: line["lm_loss"] for line in lines if line.get("lm_loss") is not None}
    assert sorted(step for step, _ in curve) == [1, 3, 3, 4, 5]
    assert [(one["step"], one["validation_loss"]) for one in found if "validation_loss" in one] == [(3, 2.5)]
    assert [one["rewards/margins"] for one in found if one["step"] == 5] == [1.25]
