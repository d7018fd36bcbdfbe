"""What Prometheus would read of a run: by the parser of its own client."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from threading import Event, Thread

import pytest
from megatron_llama.config.schema import LogConfig
from megatron_llama.errors import ConfigError
from megatron_llama.metrics import open_metrics
from megatron_llama.metrics.log import MetricLog, ValidationRecord
from megatron_llama.metrics.open_metrics import CONTENT_TYPE, OpenMetrics, require_port
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.metrics.test_metric_log import RECORD


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def ask(port: int, path: str = "/metrics") -> tuple[int, str | None, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, answer.getheader("Content-Type"), body


def values(text: str) -> dict[str, float]:
    """Sample by name, as the parser of prometheus_client reads the text: it refuses what the format does not allow."""
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_the_newest_numbers_are_served() -> None:
    board = OpenMetrics(LogConfig(open_metrics=str(free_port()), job_name='a "b"\\\nc'))
    try:
        status, kind, empty = ask(board.port)
        assert (status, kind) == (200, CONTENT_TYPE)
        assert set(values(empty)) == {f"megatron_llama_{name}" for name in ("run_info", "skipped_iterations_total", "rollbacks_total")}
        [info] = [one for family in text_string_to_metric_families(empty) for one in family.samples if one.name.endswith("run_info")]
        assert info.labels["job_name"] == 'a "b"\\\nc'
        board.step(RECORD)
        board.validation(ValidationRecord(1, 128, 2.5, 99, {"rewards/margins": 0.25}))
        board.step(replace(RECORD, iteration=2, lm_loss=None, mfu=None, skipped_iterations=3, numbers={"rewards/margins": 0.5}))
        found = values(ask(board.port)[2])
        read = {name.removeprefix("megatron_llama_"): value for name, value in found.items()}
        assert read["loss"] != read["loss"] and "mfu_ratio" not in read
        assert (read["iteration"], read["grad_norm"], read["validation_loss"]) == (2, 1.2341, 2.5)
        assert (read["rewards_margins"], read["validation_rewards_margins"], read["skipped_iterations_total"]) == (0.5, 0.25, 3)
        assert read["iteration_seconds"] == pytest.approx(1.23454321)
        board.rewind(1)
        after = values(ask(board.port)[2])
        assert "megatron_llama_loss" not in after and after["megatron_llama_rollbacks_total"] == 1
        assert ask(board.port, "/other")[0] == 404
    finally:
        board.close()
    with pytest.raises(ConnectionRefusedError):
        ask(board.port)


def test_a_reader_that_gives_up_leaves_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    board = OpenMetrics(LogConfig(open_metrics=str(free_port())))
    try:
        for asked in (b"", b"GET /metrics HTTP/1.0\r\n\r\n", b"\x16\x03\x01 what is this\r\n"):
            with socket.create_connection(("127.0.0.1", board.port)) as client:
                client.sendall(asked)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing it is a reset
        assert ask(board.port)[0] == 200  # it answers one after the other, so all of them are through
    finally:
        board.close()
    assert capfd.readouterr().err == ""


def test_a_reader_that_never_ends_its_question_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_metrics, "REQUEST_SECONDS", 0.3)
    board = OpenMetrics(LogConfig(open_metrics=str(free_port())))
    closed = Event()
    with socket.create_connection(("127.0.0.1", board.port)) as client:

        def letters() -> None:
            with suppress(OSError):
                while not ended.wait(0.1):
                    client.sendall(b"G")

        ended = Event()
        asking, closing = Thread(target=letters), Thread(target=lambda: (board.close(), closed.set()))
        asking.start()
        closing.start()
        try:
            assert closed.wait(30)
        finally:
            ended.set()
            asking.join()
            closing.join()


def test_a_port_that_is_taken_is_one_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = LogConfig(open_metrics=str(server.getsockname()[1]))
        with pytest.raises(ConfigError, match=r"^--open-metrics \d+: got Address already in use, expected a free port"):
            require_port(taken)
    require_port(taken)  # now it is free, and asking left it free
    require_port(taken)
    with pytest.raises(ConfigError, match="expected a free port of an address of this machine"):
        require_port(LogConfig(open_metrics="192.0.2.1:9400"))


def test_the_log_closes_it(tmp_path: Path) -> None:
    board = OpenMetrics(LogConfig(open_metrics=f"localhost:{free_port()}"))
    with MetricLog(tmp_path, prints=True, start_iteration=0, train_iters=9, progress_bar=False, loggers=[board]) as written:
        written.write(RECORD)
        assert values(ask(board.port)[2])["megatron_llama_loss"] == 12.5
    with pytest.raises(ConnectionRefusedError):
        ask(board.port)
