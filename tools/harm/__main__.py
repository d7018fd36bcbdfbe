"""Harm files, processes and options on purpose, and say what the program makes of it.

python -m tools.harm corrupt [--formats NAME ...] [--count N] [--seed N] [--case N]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, and no other

import torch

from tools.harm import contenders, corrupting, hostiling, kills, option_lines
from tools.harm.formats import FORMATS
from tools.harm.judging import BAD, Journal, Result, table
from tools.harm.materials import Workshop

PARTS = ("corrupt", "hostile", "kills", "options", "contenders")


def main(argv: list[str] | None = None) -> int:
    """Run parts, print their table, and return 1 if anything is not as it must be."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.harm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", default=[], help=f"of {', '.join(PARTS)}")
    parser.add_argument("--formats", nargs="+", metavar="NAME", help="by default all")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="do this case of one format again and show it")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after this time")
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir(), "harm"))
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    names = given.formats or list(FORMATS)
    shop = Workshop(given.output / "materials")
    if given.case is not None:
        scratch = given.output / "case"
        if given.parts == ["hostile"]:
            result = hostiling.Attacker(shop, scratch).result(given.case)
        else:
            format = FORMATS[names[0]]
            result = corrupting.Corruptor(format, shop, scratch, given.seed).result(given.case)
        print(result.line())
        print((given.output / "case" / "said.txt").read_text())
        return 0
    deadline = time.monotonic() + given.seconds
    given.output.mkdir(parents=True, exist_ok=True)
    journal = Journal(given.output / f"journal-{given.seed}.jsonl")
    parts = given.parts or list(PARTS)
    streams: list[Iterator[Result | str]] = []
    if "corrupt" in parts:
        streams.append(corrupting.corrupt(names, given.count, shop, journal, given.seed, deadline))
    if "hostile" in parts:
        streams.append(hostiling.attack(names, given.count, shop, journal, deadline))
    if "kills" in parts:
        streams.append(kills.strike(given.count, shop, journal, given.seed, deadline))
    if "options" in parts:
        streams.append(option_lines.try_lines(given.count, shop, journal, given.seed, deadline))
    if "contenders" in parts:
        streams.append(contenders.compete(given.count, shop, journal, given.seed, deadline))
    for news in chain.from_iterable(streams):
        if not isinstance(news, Result):
            print(news, flush=True)
        elif news.verdict in BAD and news.part != contenders.PART:
            print(news.line(), flush=True)
    # Another program's results say nothing of this one.
    results = [result for result in journal.results.values() if result.part != contenders.PART]
    for line in (*table(results), "", *contenders.comparison(journal)):
        print(line)
    return int(any(result.verdict in BAD for result in results))


if __name__ == "__main__":
    sys.exit(main())
