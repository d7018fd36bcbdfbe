"""Proves the order of streams on the device path without a device: records steps of the real
engine, and reports accesses of the same memory that nothing orders (docs/streams.md).

python -m tools.stream_check --all              every layout, and every planted fault
python -m tools.stream_check LAYOUT ...         these layouts
python -m tools.stream_check --planted LAYOUT   and the planted faults that they reach
python -m tools.stream_check --graphs [LAYOUT ...]   passes of blocks as graphs, and their faults
python -m tools.stream_check --list             the names of the layouts

The exit status is 1 if there is a race, a pass that is no graph, or a planted fault that is not
found.
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

from tools.stream_check.graph_faults import FAULTS, Found, plant_in_graphs
from tools.stream_check.graphs import GraphResult, graph_layouts, graph_result_of
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
    parser.add_argument("--graphs", action="store_true", help="only graphs of blocks")
    parser.add_argument("--list", action="store_true", help="print the names of the layouts")
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(os.cpu_count() or 1, 8),
        help="processes at once (default: as many as processors, at most 8)",
    )
    options = parser.parse_args(words)
    known = tuple(graph_layouts() if options.graphs else layouts())
    if options.list:
        print("\n".join(known))
        return 0
    unknown = [name for name in options.layouts if name not in known]
    if unknown:
        parser.error(f"no layout is called {', '.join(unknown)}; --list names them")
    if options.all == bool(options.layouts) and not options.graphs:
        parser.error("give --all or the names of layouts")
    if options.jobs < 1:
        parser.error(f"--jobs: got {options.jobs}, expected 1 or more")
    begin = time.perf_counter()
    with processes(options.jobs) as pool:
        graphs, found = [], []
        if options.graphs or options.all:
            for graph in pool.map(graph_result_of, options.layouts or graph_layouts()):
                print(graph_lines(graph), flush=True)
                graphs.append(graph)
            if not options.layouts:
                print("\nplanted faults of graphs")
                for fault in pool.map(plant_in_graphs, FAULTS):
                    print(f"{'found' if fault.reported else 'NOT FOUND':<10} {fault.fault}")
                    print(_indented(fault.reported or f"expected: {fault.expected}"), flush=True)
                    found.append(fault)
            print(f"\n{graphs_line(graphs, found)}")
        if options.graphs:
            return graphs_status(graphs, found)
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
    return max(status(results, planted), graphs_status(graphs, found))


def graph_lines(result: GraphResult) -> str:
    """A layout with graphs and what is wrong as text."""
    wrong = (*result.problems, *result.races)
    head = (
        f"{result.layout:<40} {result.graphs:>4} graphs  {result.replays:>5} replays  "
        f"{result.seconds:5.1f} s  {len(wrong)} problems"
    )
    return "\n".join([head, *(_indented(str(problem)) for problem in wrong)])


def graphs_line(results: Sequence[GraphResult], found: Sequence[Found]) -> str:
    """The sums of all layouts with graphs."""
    return (
        f"graphs {sum(result.graphs for result in results)}, "
        f"replays {sum(result.replays for result in results)}, "
        f"problems {sum(len(result.problems) + len(result.races) for result in results)}, "
        f"layouts {len(results)}, planted faults found {sum(bool(one.reported) for one in found)} "
        f"of {len(found)}"
    )


def graphs_status(results: Sequence[GraphResult], found: Sequence[Found]) -> int:
    """1 if some pass is no graph or a planted fault was missed, else 0."""
    unsound = any(not result.is_sound for result in results)
    return int(unsound or any(not one.reported for one in found))


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
