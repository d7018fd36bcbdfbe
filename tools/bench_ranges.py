"""An indexed dataset behind a slow server, against the same one on the disk: tokens a second.

    python -m tools.bench_ranges --folder runs/bench-ranges

It writes a dataset of ``--megabytes`` (kept for the next time) and serves it over HTTP with
``--rate`` and ``--latency``. Then it trains a small model in turns: from the disk, from the server
with an empty cache, and from the server with the cache that this has left. The rounds take turns,
so that what else the machine does falls on all three alike.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, and no other

from megatron_llama.data.indexed import IndexedDatasetWriter
from tools.bench_stream import MODEL, finished
from tools.processor import processor
from tools.range_server import serving

VOCAB_SIZE = 4096
DOCUMENT = 1000
"""Tokens of each document."""


def write_dataset(prefix: Path, megabytes: float) -> None:
    """Write a dataset of random ids, unless it is there: what is timed does not depend on them."""
    if prefix.with_suffix(".idx").exists():
        return
    prefix.parent.mkdir(parents=True, exist_ok=True)
    chance = np.random.default_rng(1)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(int(megabytes * 1e6 / 2 / DOCUMENT)):
            writer.add(chance.integers(0, VOCAB_SIZE, DOCUMENT).astype(np.uint16))


def tokens_per_second(folder: Path, options: Mapping[str, object]) -> tuple[float, float]:
    """Train, and return the tokens a second between the first step and the last, and the slowest
    step in seconds."""
    lines = finished(folder, 1, {**options, "vocab_size": VOCAB_SIZE})
    times = [line["seconds"] for line in lines]
    steps = [after - before for before, after in pairwise(times)]
    tokens = int(str(MODEL["seq_length"])) * int(str(MODEL["global_batch_size"]))
    return tokens * len(steps) / sum(steps), max(steps)


def main() -> None:
    """Read the options, and bench."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench_ranges",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, required=True, help="for the dataset and the runs")
    parser.add_argument("--megabytes", type=float, default=400.0, help="of the dataset")
    parser.add_argument("--rate", type=float, default=50e6, help="bytes a second of the server")
    parser.add_argument("--latency", type=float, default=0.005, help="seconds before each answer")
    parser.add_argument("--rounds", type=int, default=5, help="of three runs each")
    parser.add_argument("--steps", type=int, default=20, help="of each run")
    arguments = parser.parse_args()
    folder = arguments.folder
    prefix = folder / "data" / "docs"
    write_dataset(prefix, arguments.megabytes)
    cache = folder / "cache"
    rates: dict[str, list[float]] = {"disk": [], "empty cache": [], "full cache": []}
    with serving(
        prefix.parent, latency=arguments.latency, bytes_per_second=arguments.rate
    ) as server:
        remote = {"data_path": f"{server.url}/docs", "data_cache_path": str(cache)}
        for _ in range(arguments.rounds):
            shutil.rmtree(cache, ignore_errors=True)
            for name in rates:
                options = {"data_path": str(prefix)} if name == "disk" else remote
                before = server.sent
                rate, slowest = tokens_per_second(
                    folder, {**options, "train_iters": arguments.steps}
                )
                rates[name].append(rate)
                print(
                    f"{name}: {rate:,.0f} tokens/s, slowest step {slowest * 1e3:.0f} ms, "
                    f"{(server.sent - before) / 1e6:.1f} MB from the server",
                    flush=True,
                )
    print(processor())
    disk = rates["disk"]
    for name in ("empty cache", "full cache"):
        shares = [rate / whole for rate, whole in zip(rates[name], disk, strict=True)]
        print(
            f"{name}: {statistics.median(shares):.3f} of the disk's tokens/s (median of "
            f"{len(shares)}, {min(shares):.3f} to {max(shares):.3f})"
        )


if __name__ == "__main__":
    main()
