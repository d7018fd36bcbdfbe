"""``report RUN [RUN ...]``: the course of a run as a page, as JSON, and in a few lines."""

from __future__ import annotations

from megatron_llama.config.parse import Parsed
from megatron_llama.errors import ConfigError, counted
from megatron_llama.planner.configs import ReportConfig
from megatron_llama.planner.outputs import write_json, write_page
from megatron_llama.planner.run.folder import read_run
from megatron_llama.planner.run.page import PROBLEMS, report_page
from megatron_llama.planner.run.summary import Summary, differences, summaries_as_json, summary_of


def report(parsed: Parsed) -> None:
    """Print the numbers of runs, and write the files of --html and --json. Raises ConfigError, and
    DataError for a folder with nothing that can be shown."""
    options = parsed.get(ReportConfig)
    if not options.runs:
        raise ConfigError("report", got="no run", expected="a folder", do="write report RUN")
    repeated = sorted({name for name in options.runs if options.runs.count(name) > 1})
    if repeated:
        got = f"{', '.join(repeated)} twice"
        raise ConfigError("report", got=got, expected="each run once", do="leave one out")
    runs = [read_run(name) for name in options.runs]
    summaries = [summary_of(run, options.coefficients) for run in runs]
    for summary in summaries:
        _print(summary)
    for name, values in differences(summaries).items() if len(summaries) > 1 else ():
        print(f"{name}: {' | '.join(values)}")
    if options.json is not None:
        write_json(options.json, summaries_as_json(summaries))
    if options.html is not None:
        write_page(options.html, report_page(summaries))
        print(f"written: {options.html}")


def _print(summary: Summary) -> None:
    print(summary.name)
    for name, value in summary.rows():
        print(f"  {name:<34}{value}")
    problems = summary.run.problems
    for problem in problems[:PROBLEMS]:
        print(f"  not understood: {problem}")
    if len(problems) > PROBLEMS:
        print(f"  and {counted(len(problems) - PROBLEMS, 'line')} more")
