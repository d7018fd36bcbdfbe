"""Log lines as a run of Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from megatron_llama.config.schema import Config, LogConfig
from megatron_llama.errors import ConfigError
from megatron_llama.metrics.log import StepRecord


def require_wandb(config: LogConfig) -> None:
    """Raise ConfigError where a run is wanted and the package that keeps it is not installed."""
    if config.wandb_project is not None and find_spec("wandb") is None:
        do = "pip install megatron-llama[wandb], or leave it out"
        raise ConfigError("--wandb-project", got="no package wandb", expected="it installed", do=do)


class WandB:
    """A MetricLogger. Everything has its iteration beside it, so that what a rewound run repeats
    stands over the same place."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError where the service cannot be reached."""
        import wandb

        options = config.log
        name = options.wandb_exp_name or options.job_name
        # The run's own output is not for the service, and the service's messages are few.
        settings = wandb.Settings(console="off", quiet=True)
        try:
            self._run = wandb.init(
                project=options.wandb_project,
                name=name,
                dir=options.wandb_save_dir,
                config=asdict(config),
                settings=settings,
            )
        except wandb.Error as error:
            do = "run wandb login, set WANDB_MODE=offline, or leave --wandb-project out"
            raise ConfigError(
                "--wandb-project", got=error, expected="a service that takes the run", do=do
            ) from error
        self._run.define_metric("*", step_metric="iteration")

    def step(self, record: StepRecord) -> None:
        """See MetricLogger."""
        values = {
            name: value for name, value in asdict(record).items() if isinstance(value, int | float)
        }
        self._log(values)

    def validation(self, iteration: int, loss: float) -> None:
        """See MetricLogger."""
        self._log({"iteration": iteration, "validation_loss": loss})

    def _log(self, values: Mapping[str, Any]) -> None:
        self._run.log(dict(values))

    def rewind(self, iteration: int) -> None:
        """See MetricLogger."""

    def close(self) -> None:
        """See MetricLogger."""
        self._run.finish()
