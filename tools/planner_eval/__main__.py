"""How good the planner is, on tables of published runs.

python -m tools.planner_eval score RUNS.csv [--json FILE]
python -m tools.planner_eval fit RUNS.csv [--write]
python -m tools.planner_eval headlines
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, and no other

from megatron_llama.errors import UserError
from megatron_llama.planner.fitted import FITTED
from tools.planner_eval import headlines
from tools.planner_eval.fit import fit_table
from tools.planner_eval.judge import lines
from tools.planner_eval.published import read_rows
from tools.planner_eval.score import score


def main(words: Sequence[str]) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.planner_eval", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    scored = commands.add_parser("score", help="errors of step times, rankings and memory")
    scored.add_argument("table", type=Path)
    scored.add_argument("--json", type=Path, help="write the figures to this file")
    fitted = commands.add_parser("fit", help="fit the coefficients, and print what that reaches")
    fitted.add_argument("table", type=Path)
    fitted.add_argument("--write", action="store_true", help="replace those of the package")
    commands.add_parser("headlines", help="what other trainers published, simulated")
    options = parser.parse_args(words)
    try:
        if options.command == "score":
            figures = score(read_rows(options.table), FITTED)
            print("\n".join(lines(figures)))
            if options.json is not None:
                options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        elif options.command == "fit":
            fit_table(options.table, write=options.write)
        else:
            headlines.scaling()
            headlines.layer_sharding()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
