"""Log lines as TensorBoard events, under the names that Megatron gives them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_llama.config.schema import LogConfig
from megatron_llama.errors import ConfigError
from megatron_llama.metrics.log import StepRecord, ValidationRecord

FLUSH_SECONDS = 120


def require_tensorboard(config: LogConfig) -> None:
    """Raise ConfigError if events are asked for and the package that writes them is not
    installed."""
    if config.tensorboard_dir is not None and find_spec("tensorboard") is None:
        do = "pip install '.[tensorboard]', or leave it out"
        raise ConfigError(
            "--tensorboard-dir", got="no package tensorboard", expected="it installed", do=do
        )


class TensorBoard:
    """A MetricLogger. When a resumed or rewound run repeats iterations, its events hide the earlier
    ones."""

    def __init__(self, config: LogConfig, iteration: int) -> None:
        """``iteration``: the run continues after it."""
        assert config.tensorboard_dir is not None
        self._config = config
        self._folder = Path(config.tensorboard_dir, config.job_name or "")
        self._writer = self._open(iteration)

    def _open(self, iteration: int) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        queue = self._config.tensorboard_queue_size
        return SummaryWriter(
            str(self._folder), purge_step=iteration + 1, max_queue=queue, flush_secs=FLUSH_SECONDS
        )

    def step(self, record: StepRecord) -> None:
        for name, value in self._scalars(record):
            if value is not None:
                self._writer.add_scalar(name, value, record.iteration)

    def _scalars(self, r: StepRecord) -> Iterator[tuple[str, float | None]]:
        yield from (
            ("learning-rate", r.learning_rate),
            (r.names.loss, r.lm_loss),
            ("grad-norm", r.grad_norm),
            ("loss-scale", r.loss_scale),
            *r.numbers.items(),
        )
        if self._config.log_batch_size_to_tensorboard:
            yield "batch-size", r.global_batch_size
        if self._config.log_timers_to_tensorboard:
            yield "iteration-time", r.elapsed_ms / 1e3
            yield (
                "exposed-communication-time",
                None if r.exposed_comm_ms is None else r.exposed_comm_ms / 1e3,
            )
            yield from (
                ("tokens-per-second-per-gpu", r.tokens_per_second_per_gpu),
                ("tflops-per-gpu", r.tflops_per_gpu),
                ("mfu", r.mfu),
            )

    def validation(self, record: ValidationRecord) -> None:
        name = f"{record.names.loss} validation"
        self._writer.add_scalar(name, record.loss, record.iteration)
        if self._config.log_validation_ppl_to_tensorboard and record.names.perplexity:
            perplexity = math.exp(min(20.0, record.loss))
            self._writer.add_scalar(f"{name} ppl", perplexity, record.iteration)
        for name, value in record.numbers.items():
            self._writer.add_scalar(f"{name} validation", value, record.iteration)

    def rewind(self, iteration: int) -> None:
        self._writer.close()
        self._writer = self._open(iteration)

    def close(self) -> None:
        self._writer.close()
