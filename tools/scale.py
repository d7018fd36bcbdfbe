"""What do a start, the search for a dead rank, a save, a resume and an order of samples cost in a
run of thousands of processes?

    python tools/scale.py --world 1024 4096 16384 --part start watch

Each part does on one machine what single processes of such a run do, with their real plans and no
weights, and prints seconds and bytes, rank 0's and the others'. A row says whether it was measured
or computed from what was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, and no other

from tools.processor import processor
from tools.scaling.rows import Row, table

PARTS: Mapping[str, str] = MappingProxyType(
    {
        "start": "start:start",
        "watch": "watch:watch",
        "save": "checkpoint:save",
        "resume": "checkpoint:resume",
        "data": "data:data",
        "sharded": "checkpoint:sharded",
        "one-index": "checkpoint:one_index",
    }
)
"""The function of each part in ``tools/scaling``: the number of processes becomes rows."""
ON_REQUEST = ("sharded", "one-index")
"""Parts that only run where they are named: minutes, and gigabytes of memory."""


def main() -> None:
    """Print a table for each number of processes."""
    parser = argparse.ArgumentParser(
        prog="python tools/scale.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--world", type=int, nargs="+", default=[1024, 4096, 16384])
    usual = [name for name in PARTS if name not in ON_REQUEST]
    parser.add_argument("--part", nargs="+", default=usual, choices=PARTS)
    options = parser.parse_args()
    print(f"{processor()}\n")
    for world in options.world:
        rows = [row for name in options.part for row in _function(PARTS[name])(world)]
        print(table(rows, world), end="\n\n", flush=True)


def _function(place: str) -> Callable[[int], list[Row]]:
    module, _, name = place.partition(":")
    function: Callable[[int], list[Row]] = getattr(import_module(f"tools.scaling.{module}"), name)
    return function


if __name__ == "__main__":
    main()
