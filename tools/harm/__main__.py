"""Harm files, processes and options on purpose, and say what the program makes of it.

    python -m tools.harm [PART ...] [--formats NAME ...] [--count N] [--seconds N] [--output DIR]
    python -m tools.harm corrupt --formats NAME --case N     do a case again, and show all of it

corrupt: flipped bits, other digits, missing ends, strange ends, zeros, files of siblings, missing
files, in every format that is read. hostile: small inputs that take the machine, lie, or reach
elsewhere. kills: SIGKILL at random moments over ten layouts, and full disks; --count is the number
of kills. options: command lines drawn at random, through dry run and run. contenders: the same
damage, read by torch and by Megatron-Core, too. Without a part, all of them.

Every case is drawn from --seed and its number, and runs in a process of its own, whose memory and
time are measured. Results go into DIR/journal-SEED.jsonl: the same command goes on with what is
missing. The materials of the cases stay in DIR. Exit status 1 if anything is silent, ends with a
traceback, or takes too much.
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

from tests.launcher import Launcher
from tools.harm import contenders, corrupting, hostiling, kills, option_lines
from tools.harm.formats import FORMATS
from tools.harm.judging import BAD, Journal, Result, emptied, table
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
    parser.add_argument("--count", type=int, default=100, help="cases of each format or part")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="do this case of one format again and show it")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after this time")
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir(), "harm"))
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    names = given.formats or list(FORMATS)
    shop = Workshop(given.output / "materials")
    if given.case is not None:
        part = given.parts[0] if given.parts else corrupting.PART
        result = repeated(part, names[0], given.case, shop, given.output / "case", given.seed)
        said = given.output / "case" / "said.txt"
        print(result.line(), said.read_text() if said.exists() else "", sep="\n")
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


def repeated(part: str, name: str, case: int, shop: Workshop, scratch: Path, seed: int) -> Result:
    """Do a case again. ``name`` is that of the format, or of the layout."""
    if part == hostiling.PART:
        return hostiling.Attacker(shop, scratch).result(case)
    if part == corrupting.PART:
        return corrupting.Corruptor(FORMATS[name], shop, scratch, seed).result(case)
    with Launcher(emptied(scratch.with_name("launched-case"))) as launcher:
        if part == kills.PART:
            return kills.Killer(launcher, shop, scratch, seed).result(name, case)
        return option_lines.Liner(launcher, shop, scratch, seed).result(case)


if __name__ == "__main__":
    sys.exit(main())
