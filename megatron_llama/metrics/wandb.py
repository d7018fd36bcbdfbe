"""Log lines as a run of Weights & Biases."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec

from megatron_llama.config.schema import Config, LogConfig
from megatron_llama.errors import ConfigError
from megatron_llama.metrics.log import StepRecord, ValidationRecord, scalars, validation_scalars


def require_wandb(config: LogConfig) -> None:
    """Raise ConfigError if a run of Weights & Biases is asked for and its package is not
    installed."""
    if config.wandb_project is not None and find_spec("wandb") is None:
        do = "pip install '.[wandb]', or leave it out"
        raise ConfigError("--wandb-project", got="no package wandb", expected="it installed", do=do)


class WandB:
    """A MetricLogger. Every value is logged with its iteration as the x-axis, so that iterations
    that a rewound run repeats are drawn at the same place."""

    def __init__(self, config: Config, run: str | None = None) -> None:
        """``run``: the id of the run to go on with. Raises ConfigError if the service cannot be
        reached."""
        import wandb

        options = config.log
        name = options.wandb_exp_name or options.job_name
        # The service does not get the run's output (console), and prints little (quiet).
        settings = wandb.Settings(console="off", quiet=True)
        try:
            self._run = wandb.init(
                project=options.wandb_project,
                name=name,
                dir=options.wandb_save_dir,
                config=asdict(config),
                id=run,
                resume=None if run is None else "allow",
                # A run may be resumed with other options.
                allow_val_change=True,
                settings=settings,
            )
        except Exception as error:  # whatever the client, the network or a disk has raised
            do = "run wandb login, set WANDB_MODE=offline, or leave --wandb-project out"
            raise ConfigError(
                "--wandb-project", got=error, expected="a service that takes the run", do=do
            ) from error
        self._run.define_metric("*", step_metric="iteration")

    @property
    def run(self) -> str:
        return str(self._run.id)

    def step(self, record: StepRecord) -> None:
        self._run.log(scalars(record))

    def validation(self, record: ValidationRecord) -> None:
        self._run.log(validation_scalars(record))

    def rewind(self, iteration: int) -> None:
        pass  # the x-axis of what follows says where it belongs

    def close(self) -> None:
        self._run.finish()
