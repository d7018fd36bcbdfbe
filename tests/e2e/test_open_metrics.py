"""``--open-metrics`` of a run: its port is taken at the start, or refused there."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.e2e.product import EVALUATED, Product, log
from tests.metrics.test_open_metrics import free_port


@pytest.mark.long
@pytest.mark.tries("open_metrics")
def test_a_run_serves_and_a_second_one_is_refused(product: Product, tmp_path: Path) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        refused = product.run(*product.command(open_metrics=port, save=tmp_path / "no"))
    assert refused.codes == (2,) and f"--open-metrics {port}: got Address already in use" in refused.err
    assert not list((tmp_path / "no").glob("iter_*"))
    ended = product.train(open_metrics=port, save=tmp_path / "run", **EVALUATED)
    assert f"OpenMetrics at {port}" in ended.out and len(log(tmp_path / "run")) > 6
