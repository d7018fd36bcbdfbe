"""Log lines as a run of MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec

from megatron_llama.config.schema import Config, LogConfig
from megatron_llama.errors import ConfigError
from megatron_llama.metrics.log import StepRecord, ValidationRecord, scalars, validation_scalars


def require_mlflow(config: LogConfig) -> None:
    """Raise ConfigError if a run of MLflow is asked for and its package is not installed."""
    if config.mlflow_experiment is not None and find_spec("mlflow") is None:
        do = "pip install '.[mlflow]', or leave it out"
        raise ConfigError("--mlflow-experiment", got="no package mlflow", expected="one", do=do)


class MLflow:
    """A MetricLogger. Iterations that a rewound run repeats are logged at the same steps once
    more."""

    def __init__(self, config: Config, run: str | None = None) -> None:
        """``run``: the id of the run to go on with, if it is still there. Raises ConfigError if the
        store cannot be reached."""
        from mlflow import MlflowClient, entities

        self._metric = entities.Metric
        try:
            self._client = MlflowClient(config.log.mlflow_tracking_uri)
            self.run = run if run is not None and self._goes_on(run) else self._begun(config)
            """The id."""
        except Exception as wrong:  # whatever the client, the network or a disk has raised
            do = "correct --mlflow-tracking-uri, or leave --mlflow-experiment out"
            expected = "a store that takes the run"
            raise ConfigError("--mlflow-experiment", got=wrong, expected=expected, do=do) from wrong

    def _goes_on(self, run: str) -> bool:
        """Open a run again. False if it was deleted."""
        from mlflow.exceptions import MlflowException

        try:
            existing = self._client.get_run(run)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        if existing.info.lifecycle_stage != "active":
            return False
        # Its parameters stay those of its first start: the service lets none change.
        self._client.update_run(run, status="RUNNING")
        return True

    def _begun(self, config: Config) -> str:
        """Begin a run, and return its id."""
        from mlflow.entities import Param

        name = config.log.mlflow_experiment
        values = {f"{a}.{b}": str(v) for a, opts in asdict(config).items() for b, v in opts.items()}
        params = [Param(option, value) for option, value in values.items()]
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        run = str(self._client.create_run(number, run_name=config.log.job_name).info.run_id)
        for first in range(0, len(params), 100):  # the service takes so many at a time
            self._client.log_batch(run, params=params[first : first + 100])
        return run

    def step(self, record: StepRecord) -> None:
        self._log(scalars(record), record.iteration)

    def validation(self, record: ValidationRecord) -> None:
        self._log(validation_scalars(record), record.iteration)

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1e3)
        metrics = [self._metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self.run, metrics=metrics)

    def rewind(self, iteration: int) -> None:
        pass  # the steps of what follows say where it belongs

    def close(self) -> None:
        self._client.set_terminated(self.run)
