"""The newest numbers of a run over HTTP, as OpenMetrics text, which Prometheus reads.

The format: OpenMetrics 1.0, https://prometheus.io/docs/specs/om/open_metrics_spec/.
"""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer

from megatron_llama import __version__
from megatron_llama.config.schema import LogConfig
from megatron_llama.engine.comm.device import start_thread
from megatron_llama.errors import ConfigError
from megatron_llama.metrics.log import StepRecord, ValidationRecord

PREFIX = "megatron_llama_"
LOCAL = "127.0.0.1"
"""The default address: only this machine sees the numbers unless the user says otherwise."""
CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
REQUEST_SECONDS = 5.0
"""How long one client may take to ask, while others wait."""
Family = tuple[str, str, float | None]
"""Name without prefix, help, value."""


class OpenMetrics:
    """A MetricLogger. It answers ``GET /metrics`` from a thread until it is closed."""

    def __init__(self, config: LogConfig) -> None:
        """Raises ConfigError if the port cannot be had."""
        self._job = config.job_name or ""
        self._lock = threading.Lock()
        self._step: list[Family] = []
        self._validation: list[Family] = []
        self._rollbacks = 0
        self._skipped = 0
        self._server = _listen(config, self.text)
        start_thread(self._server.serve_forever, 0.1, name="OpenMetrics")

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return int(self._server.server_address[1])

    def step(self, record: StepRecord) -> None:
        families = list(_step_families(record))
        with self._lock:
            self._step = families
            self._skipped += record.skipped_iterations

    def validation(self, record: ValidationRecord) -> None:
        numbers = record.numbers.items()
        families: list[Family] = [
            ("validation_iteration", "Optimizer steps before the evaluation", record.iteration),
            ("validation_loss", f"Mean over {record.names.unit}", record.loss),
            *((f"validation_{name}", f"Validation {name}", value) for name, value in numbers),
        ]
        with self._lock:
            self._validation = families

    def rewind(self, iteration: int) -> None:
        with self._lock:
            self._rollbacks += 1
            # The run has taken the last interval back.
            self._step = []
            self._validation = []

    def close(self) -> None:
        # The shutdown waits for the reader that is being answered. A very slow reader may not hold
        # up the end of the run.
        start_thread(self._server.shutdown, name="OpenMetrics ends").join(2 * REQUEST_SECONDS)
        self._server.server_close()

    def text(self) -> str:
        """Return the whole exposition."""
        with self._lock:
            gauges = [*self._step, *self._validation]
            counters = (
                ("skipped_iterations", "Bad steps since this process began", self._skipped),
                ("rollbacks", "Returns to a checkpoint since this process began", self._rollbacks),
            )
        version = f'version="{_escaped(__version__)}",job_name="{_escaped(self._job)}"'
        lines = [
            f"# TYPE {PREFIX}run info",
            f"# HELP {PREFIX}run What is running.",
            f"{PREFIX}run_info{{{version}}} 1",
        ]
        for name, words, value in gauges:
            if value is not None:
                full = PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name)
                lines += [f"# TYPE {full} gauge", f"# HELP {full} {_escaped(words)}."]
                lines.append(f"{full} {_number(value)}")
        for name, words, count in counters:
            full = PREFIX + name
            lines += [f"# TYPE {full} counter", f"# HELP {full} {words}.", f"{full}_total {count}"]
        return "\n".join([*lines, "# EOF", ""])


def require_port(config: LogConfig) -> None:
    """Raise ConfigError unless the port of --open-metrics can be had on this machine."""
    if config.open_metrics is not None:
        _listen(config, str).server_close()


def _step_families(record: StepRecord) -> Iterator[Family]:
    """Yield the numbers of the newest log line. A number that was not finite is NaN, an unknown one
    None."""
    r = record
    nan = float("nan")
    skipped = "NaN if the step was skipped"
    yield "iteration", "Optimizer steps done", r.iteration
    yield "train_iterations", "Optimizer steps of the whole run", r.train_iters
    yield "consumed_samples", "Samples behind the run", r.consumed_samples
    yield "loss", f"{r.names.loss} of the step, {skipped}", nan if r.lm_loss is None else r.lm_loss
    yield (
        "grad_norm",
        f"Gradient norm before clipping, {skipped}",
        nan if r.grad_norm is None else r.grad_norm,
    )
    yield "learning_rate", "Learning rate of the step", r.learning_rate
    yield "loss_scale", "Loss scale of fp16", r.loss_scale
    yield "global_batch_size", "Samples of the step", r.global_batch_size
    yield "iteration_seconds", "Mean time of a step since the last line", r.elapsed_ms / 1e3
    yield "tokens_per_second", "Tokens a second of all processes", r.tokens_per_second
    yield "tokens_per_second_per_gpu", "Tokens a second of a process", r.tokens_per_second_per_gpu
    yield "tflops_per_gpu", "TFLOP/s of a process", r.tflops_per_gpu
    yield "mfu_ratio", "Share of the device's peak FLOP/s", r.mfu
    exposed = None if r.exposed_comm_ms is None else r.exposed_comm_ms / 1e3
    yield "exposed_communication_seconds", "Communication of a step that nothing hid", exposed
    yield "peak_memory_bytes", "Peak memory of the device of rank 0", r.peak_memory_bytes
    yield "eta_seconds", "Time until the run ends", r.eta_seconds
    yield "last_line_timestamp_seconds", "Unix time of these numbers", time.time()
    for name, value in r.numbers.items():
        yield name, f"{name} of the step, {skipped}", nan if value is None else value


def _number(value: float) -> str:
    return "NaN" if value != value else repr(value)


def _escaped(text: str) -> str:
    """Return a label's value or a help text, escaped for the format."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _listen(config: LogConfig, text: Callable[[], str]) -> TCPServer:
    """Take the port of --open-metrics. Raises ConfigError."""
    assert config.open_metrics is not None
    host, _, port = config.open_metrics.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or LOCAL

    class Handler(BaseHTTPRequestHandler):
        """The answer to one request."""

        timeout = REQUEST_SECONDS

        def do_GET(self) -> None:
            known = self.path.partition("?")[0] in ("/", "/metrics")
            body = text().encode() if known else b"see /metrics\n"
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", CONTENT_TYPE if known else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass  # a run's log is no log of its readers

    class Server(TCPServer):
        """A server that can take a port whose last owner has just closed it."""

        allow_reuse_address = True
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def handle_error(self, request: object, client_address: object) -> None:
            # A reader that gives up is no error of the run.
            if not isinstance(sys.exception(), OSError):
                super().handle_error(request, client_address)  # type: ignore[arg-type]

    try:
        return Server((host, int(port)), Handler)
    except (OSError, OverflowError) as error:
        got = error.strerror if isinstance(error, OSError) and error.strerror else error
        do = "give another --open-metrics PORT, or leave it out"
        expected = "a free port of an address of this machine"
        where = f"--open-metrics {config.open_metrics}"
        raise ConfigError(where, got=got, expected=expected, do=do) from error
