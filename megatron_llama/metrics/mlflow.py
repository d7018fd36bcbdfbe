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
    """A MetricLogger. What a rewound run repeats is logged at the same step once more."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError if the store cannot be reached."""
        from mlflow import MlflowClient, entities
        from mlflow.exceptions import MlflowException

        self._metric = entities.Metric
        name = config.log.mlflow_experiment
        values = {f"{a}.{b}": str(v) for a, part in asdict(config).items() for b, v in part.items()}
        params = [entities.Param(option, value) for option, value in values.items()]
        try:
            self._client = MlflowClient(config.log.mlflow_tracking_uri)
            found = self._client.get_experiment_by_name(name)
            number = found.experiment_id if found else self._client.create_experiment(name)
            self._run = self._client.create_run(number, run_name=config.log.job_name).info.run_id
            for first in range(0, len(params), 100):  # the service takes so many at a time
                self._client.log_batch(self._run, params=params[first : first + 100])
        except (MlflowException, ImportError, OSError) as wrong:
            do = "correct --mlflow-tracking-uri, or leave --mlflow-experiment out"
            raise ConfigError("--mlflow-experiment", got=wrong, expected="one", do=do) from wrong

    def step(self, record: StepRecord) -> None:
        self._log(scalars(record), record.iteration)

    def validation(self, record: ValidationRecord) -> None:
        self._log(validation_scalars(record), record.iteration)

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1e3)
        metrics = [self._metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def rewind(self, iteration: int) -> None:
        pass  # the steps of what follows say where it belongs

    def close(self) -> None:
        self._client.set_terminated(self._run)
