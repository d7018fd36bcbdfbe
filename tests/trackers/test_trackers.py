"""MLflow and Trackio hold what log.jsonl has, as their own clients read it from stores on this machine."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from megatron_llama.config.schema import Config, LogConfig
from megatron_llama.errors import ConfigError
from megatron_llama.metrics.events import START, tracked_runs
from megatron_llama.metrics.log import MetricLog, ValidationRecord
from megatron_llama.metrics.mlflow import MLflow, require_mlflow
from megatron_llama.metrics.trackers import open_trackers
from megatron_llama.metrics.trackio import require_trackio

from tests.metrics.test_metric_log import RECORD

pytestmark = pytest.mark.trackers


def written(folder: Path, config: Config) -> list[dict[str, float]]:
    """A run of four steps that goes back once, and is resumed once, as a run opens its trackers. Returns what log.jsonl has then."""
    steps = [replace(RECORD, iteration=n, lm_loss=None if n == 2 else 10.0 / (n + 1), numbers={"rewards/margins": n / 4}) for n in range(6)]
    for start, iterations in ((0, (1, 2, 3, 4)), (4, (5,))):
        trackers, lines = open_trackers(config, start, tracked_runs(folder))
        assert lines == []
        with MetricLog(folder, prints=True, start_iteration=start, train_iters=5, progress_bar=False, trackers=trackers) as log:
            log.event(START, iteration=start, trackers=log.tracked)
            for n in iterations:
                log.write(steps[n])
                if n == 3:
                    log.write_validation(ValidationRecord(3, 9, 2.5, 99, {"rewards/margins": 0.75}))
                    log.rewind(2)
                    log.write(steps[3])
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.tries("mlflow_experiment", "mlflow_tracking_uri")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    store = (tmp_path / "store").as_uri()
    config = Config(log=LogConfig(mlflow_experiment="llamas", mlflow_tracking_uri=store, job_name="small"))
    require_mlflow(config.log)
    lines = written(tmp_path, config)
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("llamas")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("small", "FINISHED")
    assert run.data.params["log.job_name"] == "small" and len(run.data.params) > 150

    def curve(name: str) -> list[tuple[int, float]]:
        return [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]

    losses = [(line["iteration"], line["lm_loss"]) for line in lines if line.get("lm_loss") is not None]
    assert dict(curve("lm_loss")) == dict(losses)
    assert [step for step, _ in curve("lm_loss")] == [1, 3, 3, 4, 5], "what is repeated stands at its step once more"
    assert curve("validation_loss") == [(3, 2.5)] and curve("rewards/margins")[-1] == (5, 1.25)
    # A run that was deleted there is begun again.
    client.delete_run(run.info.run_id)
    [tracker], [line] = open_trackers(config, 4, tracked_runs(tmp_path))
    tracker.close()
    assert (tracker.run != run.info.run_id and line == f"warning: MLflow llamas has no run {run.info.run_id} any more: a new one begins there")


def test_a_store_that_goes_away_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = tmp_path / "store"
    config = Config(log=LogConfig(mlflow_experiment="llamas", mlflow_tracking_uri=store.as_uri()))
    trackers, _ = open_trackers(config, 0, {})
    with MetricLog(tmp_path, prints=True, start_iteration=0, train_iters=5, progress_bar=False, trackers=trackers) as log:
        shutil.rmtree(store)
        for n in (1, 2, 3):
            log.write(replace(RECORD, iteration=n))
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3
    said = capsys.readouterr().out
    assert re.search(r" warning: MLflow llamas: got \w+: .*expected it to take a line; log.jsonl has everything", said), said
    assert " warning: MLflow llamas lacks 3 lines of this process, which log.jsonl has" in said


def test_a_resumed_run_goes_on_without_a_store(tmp_path: Path) -> None:
    config = Config(log=LogConfig(mlflow_experiment="llamas", mlflow_tracking_uri="nowhere://store"))
    trackers, [line] = open_trackers(config, 4, {"MLflow llamas": "7"})
    assert trackers == [] and re.match(r"warning: --mlflow-experiment: got .*; the run goes on without MLflow$", line)
    with pytest.raises(ConfigError, match="correct --mlflow-tracking-uri"):
        open_trackers(config, 0, {})


def test_mlflow_without_a_store_is_one_error(tmp_path: Path) -> None:
    config = Config(log=LogConfig(mlflow_experiment="llamas", mlflow_tracking_uri="nowhere://store"))
    with pytest.raises(ConfigError, match=r"^--mlflow-experiment: got .*correct --mlflow-tracking-uri"):
        MLflow(config)


@pytest.mark.tries("trackio_project")
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))  # read when trackio is imported, here for the first time
    config = Config(log=LogConfig(trackio_project="llamas", job_name="small"))
    require_trackio(config.log)
    lines = written(tmp_path, config)
    from trackio.sqlite_storage import SQLiteStorage

    runs = SQLiteStorage.get_run_records("llamas")
    assert [run["name"] for run in runs] == ["small"]
    found = [one for run in runs for one in SQLiteStorage.get_logs("llamas", run["name"], run_id=run["id"])]
    curve = [(one["step"], one["lm_loss"]) for one in found if "lm_loss" in one]
    assert dict(curve) == {line["iteration"]: line["lm_loss"] for line in lines if line.get("lm_loss") is not None}
    assert sorted(step for step, _ in curve) == [1, 3, 3, 4, 5]
    assert [(one["step"], one["validation_loss"]) for one in found if "validation_loss" in one] == [(3, 2.5)]
    assert [one["rewards/margins"] for one in found if one["step"] == 5] == [1.25]
    # Another run of that name is not taken for this one.
    known = tracked_runs(tmp_path)
    [other], _ = open_trackers(config, 0, {})
    other.step(RECORD)
    other.close()
    [tracker], [line] = open_trackers(config, 4, known)
    tracker.close()
    assert tracker.run not in (*known.values(), other.run) and "has no run" in line
