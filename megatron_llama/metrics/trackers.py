"""The services that get the numbers of a run: TensorBoard, Weights & Biases, MLflow and Trackio.

``log.jsonl`` has every number; these have copies. So no service holds up a step or ends a run that
has begun: each is fed by its own thread, and lost lines are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

from megatron_llama.config.schema import Config, LogConfig
from megatron_llama.engine.comm.device import start_thread
from megatron_llama.errors import ConfigError, counted
from megatron_llama.metrics.log import MetricLogger, StepRecord, ValidationRecord
from megatron_llama.registry import Registry

CLOSE_SECONDS = 60.0
"""How long the end of a run waits for a service that has not taken everything."""

LINE = "a line"


class TrackedRun(MetricLogger, Protocol):
    """A receiver of log lines that keeps them as a run of its own."""

    @property
    def run(self) -> str:
        """The key that finds this run again, when the training is resumed."""
        ...


SERVICES: Registry[Callable[[Config, str | None], TrackedRun]] = Registry(
    {
        "W&B": "metrics.wandb:WandB",
        "MLflow": "metrics.mlflow:MLflow",
        "Trackio": "metrics.trackio:Trackio",
    }
)
"""Services by name. They take the configuration, and the run to go on with, if there is one. They
raise ConfigError where they cannot be reached."""


REQUIRED: Registry[Callable[[LogConfig], None]] = Registry(
    {
        "tensorboard_dir": "metrics.tensorboard:require_tensorboard",
        "wandb_project": "metrics.wandb:require_wandb",
        "mlflow_experiment": "metrics.mlflow:require_mlflow",
        "trackio_project": "metrics.trackio:require_trackio",
    }
)
"""The checks for the packages of trackers, by the option that asks for the tracker."""


def require_tracker(option: str, config: LogConfig) -> None:
    """Raise ConfigError if ``option`` asks for its tracker and the package is not installed."""
    # Looked up only if it is asked for: the look-up imports the tracker.
    if getattr(config, option) is not None:
        REQUIRED[option](config)


class Tracker:
    """A MetricLogger that passes all calls on to another one, in a thread. It waits for that thread
    only at its end."""

    def __init__(self, name: str, receiver: MetricLogger, *, run: str | None = None) -> None:
        """``name``: the service and its project or experiment. ``run``: that of a
        ``TrackedRun``."""
        self.name = name
        self.run = run
        self._receiver = receiver
        self._calls = SimpleQueue[tuple[str, Callable[[], None]] | None]()
        self._lines = SimpleQueue[str]()
        self._lost = 0
        self._thread = start_thread(self._feed, name=name)

    def step(self, record: StepRecord) -> None:
        self._calls.put((LINE, partial(self._receiver.step, record)))

    def validation(self, record: ValidationRecord) -> None:
        self._calls.put((LINE, partial(self._receiver.validation, record)))

    def rewind(self, iteration: int) -> None:
        self._calls.put(("the return to an iteration", partial(self._receiver.rewind, iteration)))

    def close(self) -> None:
        self._calls.put(("the end of the run", self._receiver.close))
        self._calls.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            # Besides those that wait it has one, and the last two are no lines.
            waiting = max(1, self._calls.qsize() - 1)
            self._lines.put(
                f"{self.name} has not answered for {CLOSE_SECONDS:.0f} s: it lacks up to the last "
                f"{counted(waiting, 'line')} of this process, which log.jsonl has"
            )
        elif self._lost:
            self._lines.put(
                f"{self.name} lacks {counted(self._lost, 'line')} of this process, which log.jsonl "
                "has"
            )

    def problems(self) -> Iterator[str]:
        """Yield what has gone wrong since the last call."""
        while True:
            try:
                yield self._lines.get_nowait()
            except Empty:
                return

    def _feed(self) -> None:
        failed = False
        while (entry := self._calls.get()) is not None:
            what, call = entry
            try:
                call()
            except Exception as error:
                # The training goes on, whatever a client, its server or its disk has raised.
                self._lost += what == LINE
                if not failed:
                    self._lines.put(
                        f"{self.name}: got {type(error).__name__}: {error}, expected it to take "
                        f"{what}; log.jsonl has everything, and the run goes on"
                    )
                failed = True


def open_trackers(
    config: Config, iteration: int, known: Mapping[str, str]
) -> tuple[list[Tracker], list[str]]:
    """Return the trackers of a run that continues after ``iteration``, and lines about their state.
    ``known``: its earlier runs by the names of their trackers, which go on with them.

    Raises ConfigError where a new run cannot have one, since a user can mend it then. A resumed
    run, perhaps at night, goes on without."""
    log = config.log
    trackers = list[Tracker]()
    lines = list[str]()
    if log.tensorboard_dir is not None:
        # A run loads only the services that it writes to.
        from megatron_llama.metrics.tensorboard import TensorBoard

        board = TensorBoard(log, iteration)
        trackers.append(Tracker(f"TensorBoard {log.tensorboard_dir}", board))
    projects = {
        "W&B": log.wandb_project,
        "MLflow": log.mlflow_experiment,
        "Trackio": log.trackio_project,
    }
    for service, project in projects.items():
        if project is None:
            continue
        name = f"{service} {project}"
        before = known.get(name) if iteration else None
        try:
            receiver = SERVICES[service](config, before)
        except ConfigError as error:
            if not iteration:
                for tracker in trackers:
                    tracker.close()
                raise
            lines.append(f"warning: {error}; the run goes on without {service}")
            continue
        if before is not None and receiver.run != before:
            lines.append(f"warning: {name} has no run {before} any more: a new one begins there")
        trackers.append(Tracker(name, receiver, run=receiver.run))
    return trackers, lines
