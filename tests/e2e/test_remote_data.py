"""Runs on indexed datasets behind a URL."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.range_server import serving

from tests.e2e.product import DP2, TP2, Layout, Product, Refuse, assert_same_state, exact_curve

LONG = pytest.mark.long


@pytest.mark.long
@pytest.mark.parametrize("layout", [DP2, pytest.param(TP2, marks=LONG)])
def test_a_run_from_a_server_is_that_from_the_disk(layout: Layout, product: Product, tmp_path: Path) -> None:
    """A blend of a remote and a local dataset, on two ranks that share a folder; killed between steps, and resumed with an empty one."""
    folder, name = product.data.parent, product.data.name
    product.train(layout, data_path=(3, product.data, 1, product.data), save=tmp_path / "disk", save_interval=3)
    with serving(folder, latency=0.005, bytes_per_second=50e6) as server:
        blend = (3, f"{server.url}/{name}", 1, product.data)
        product.train(layout, data_path=blend, data_cache_path=tmp_path / "first", save=tmp_path / "net", save_interval=3, exit_interval=3)
        product.train(layout, data_path=blend, data_cache_path=tmp_path / "second", load=tmp_path / "net", save=tmp_path / "net", save_interval=3)
    assert exact_curve(tmp_path / "net") == exact_curve(tmp_path / "disk")
    assert_same_state(tmp_path / "net" / "iter_0000006", tmp_path / "disk" / "iter_0000006")


def test_commands_on_a_remote_dataset(product: Product, refuse: Refuse, tmp_path: Path) -> None:
    with serving(product.data.parent) as server:
        url = f"{server.url}/{product.data.name}"
        lines = [
            [line for line in product.run("inspect", "dataset", each).ok().out.splitlines() if "okeniz" not in line]
            for each in (url, product.data)
        ]
        assert lines[0] == lines[1]
        said = refuse(product.command(data_path=url, data_cache_gib=0), code=2)
        assert "--data-cache-gib: got 0, expected more than 0 GiB" in said
        server.versions = False
        said = refuse(product.command(data_path=url, data_cache_path=tmp_path), code=1)
        assert f"{url}.idx: got a file without version" in said
