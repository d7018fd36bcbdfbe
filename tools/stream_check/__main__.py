"""Proves the order of streams on the device path without a device: records steps of the real
engine, and reports accesses of the same memory that nothing orders (docs/streams.md).

python -m tools.stream_check --all              every layout, and every planted fault
python -m tools.stream_check LAYOUT ...         these layouts
python -m tools.stream_check --planted LAYOUT   and the planted faults that they reach
python -m tools.stream_check --list             the names of the layouts

The exit status is 1 if there is a race, or a planted fault that is not found.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, and no other

from tools.stream_check.layouts import layouts
from tools.stream_check.planted import calls
from tools.stream_check.run import Outcome, Result, plant, processes, reaching, result_of


def main(words: Sequence[str]) -> int:
    """Run, print what was found, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.stream_check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help="one of --list")
    parser.add_argument("--all", action="store_true", help="every layout and planted fault")
    parser.add_argument("--planted", action="store_true", help="leave out waits and records, too")
    parser.add_argument("--list", action="store_true", help="print the names of the layouts")
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(os.cpu_count() or 1, 8),
        help="processes at once (default: as many as processors, at most 8)",
    )
    options = parser.parse_args(words)
    known = tuple(layouts())
    if options.list:
        print("\n".join(known))
        return 0
    unknown = [name for name in options.layouts if name not in known]
    if unknown:
        parser.error(f"no layout is called {', '.join(unknown)}; --list names them")
    if options.all == bool(options.layouts):
        parser.error("give --all or the names of layouts")
    if options.jobs < 1:
        parser.error(f"--jobs: got {options.jobs}, expected 1 or more")
    begin = time.perf_counter()
    with processes(options.jobs) as pool:
        results = []
        for result in pool.map(result_of, known if options.all else options.layouts):
            print(layout_lines(result), flush=True)
            results.append(result)
        planted = []
        if options.all or options.planted:
            chosen = [(call, reaching(call, results)) for call in calls()]
            if not options.all:
                chosen = [(call, reached_by) for call, reached_by in chosen if reached_by]
            print("\nplanted faults: each of these calls was left out")
            for outcome in pool.map(plant, *zip(*chosen, strict=True)):
                print(outcome_lines(outcome), flush=True)
                planted.append(outcome)
    print(f"\n{time.perf_counter() - begin:.0f} seconds in {options.jobs} processes")
    print(last_line(results, planted))
    return status(results, planted)


def layout_lines(result: Result) -> str:
    """A layout and its races as text."""
    head = (
        f"{result.layout:<40} {result.accesses:>8,} accesses  {result.seconds:5.1f} s  "
        f"{len(result.races)} races"
    )
    return "\n".join([head, *(_indented(str(race)) for race in result.races)])


def outcome_lines(outcome: Outcome) -> str:
    """A planted fault and what was reported, as text."""
    if outcome.found is not None:
        report = f"in {outcome.layout}: {outcome.found}"
        return f"found      {outcome.call}\n{_indented(report)}"
    word = "NOT FOUND" if outcome.is_missed else "none"
    return f"{word:<10} {outcome.call}\n{_indented(outcome.why)}"


def last_line(results: Sequence[Result], planted: Sequence[Outcome]) -> str:
    """The sums of everything."""
    races = sum(len(result.races) for result in results)
    accesses = sum(result.accesses for result in results)
    expected = [outcome for outcome in planted if outcome.expected]
    found = sum(outcome.found is not None for outcome in expected)
    return (
        f"races {races}, accesses {accesses}, layouts {len(results)}, "
        f"planted faults found {found} of {len(expected)}"
    )


def status(results: Sequence[Result], planted: Sequence[Outcome]) -> int:
    """1 if there is a race or a planted fault was missed, else 0."""
    wrong = any(result.races for result in results)
    return int(wrong or any(outcome.is_missed for outcome in planted))


def _indented(text: str) -> str:
    return textwrap.indent(text, " " * 11)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
