"""Log lines as a run of Trackio."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from megatron_llama.config.schema import Config, LogConfig
from megatron_llama.errors import ConfigError
from megatron_llama.metrics.log import StepRecord, ValidationRecord, scalars, validation_scalars


def require_trackio(config: LogConfig) -> None:
    """Raise ConfigError if a run of Trackio is asked for and its package is not installed."""
    if config.trackio_project is not None and find_spec("trackio") is None:
        do = "pip install '.[trackio]', or leave it out"
        where = "--trackio-project"
        raise ConfigError(where, got="no package trackio", expected="it installed", do=do)


class Trackio:
    """A MetricLogger. Every value is logged with its iteration as the step: iterations that a
    rewound run repeats stand at the same step, later."""

    def __init__(self, config: Config, run: str | None = None) -> None:
        """``run``: the run to go on with, if it is still there. Raises ConfigError if the project
        cannot be opened."""
        try:
            self._run = self._opened(config, run)
            if run is not None and run != self.run:
                # Its name now belongs to another run, or to none.
                self._run.finish()
                self._run = self._opened(config, None)
        except Exception as error:  # whatever the client, the network or a disk has raised
            do = "look at TRACKIO_DIR and TRACKIO_SPACE_ID, or leave --trackio-project out"
            expected = "a store that takes the run"
            where = "--trackio-project"
            raise ConfigError(where, got=error, expected=expected, do=do) from error

    @property
    def run(self) -> str:
        """Its id, and its name: only by names are runs found."""
        return f"{self._run.id} {self._run.name}"

    @staticmethod
    def _opened(config: Config, run: str | None) -> Any:
        import trackio

        return trackio.init(
            config.log.trackio_project,
            name=config.log.job_name if run is None else run.partition(" ")[2],
            resume="never" if run is None else "allow",
            config=asdict(config),
            embed=False,
            # The log lines have the load of the devices; a thread that asks them takes time.
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def step(self, record: StepRecord) -> None:
        self._run.log(scalars(record), step=record.iteration)

    def validation(self, record: ValidationRecord) -> None:
        self._run.log(validation_scalars(record), step=record.iteration)

    def rewind(self, iteration: int) -> None:
        pass  # the steps of what follows say where it belongs

    def close(self) -> None:
        self._run.finish()
