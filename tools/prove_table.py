"""The table of proven examples in ``docs/numerics.md``, from what ``prove --output`` has written:
``python tools/prove_table.py FOLDER ...``, where each folder has the name of its example."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

COLUMNS = (
    ("one process", "loss"),
    ("one process", "gradient"),
    ("one process", "update"),
    ("transformers", "loss"),
    ("transformers", "gradient"),
    ("precision", "loss"),
    ("reshard", "gradient"),
    ("export", "logits"),
)
"""Of which checks the worst deviation is shown."""
TO_THE_BIT = ("resume", "export", "data")
"""The checks that ask for equal bits, in whole or in part."""


def table(folders: Sequence[Path]) -> Iterator[str]:
    """Yield the lines of the table, one row for each case."""
    head = ["configuration", "shown as", *(" ".join(pair) for pair in COLUMNS), "equal to the bit"]
    yield f"| {' | '.join([*head, 'holds', 's'])} |"
    yield f"| --- | --- |{' ---: |' * len(COLUMNS)} --- | --- | ---: |"
    for folder in folders:
        found = json.loads((folder / "prove.json").read_text())
        for case in found["cases"]:
            yield f"| {' | '.join([folder.name, case['name'], *_cells(case)])} |"


def _cells(case: Mapping[str, Any]) -> Iterator[str]:
    checks = {check["name"]: check for check in case["checks"]}
    for name, what in COLUMNS:
        groups = {group["what"]: group for group in checks[name]["groups"]}
        yield f"{float(groups[what]['worst']['got']):.1e}" if what in groups else "not run"
    equal = [name for name in TO_THE_BIT if not checks[name]["not_run"] and checks[name]["holds"]]
    yield ", ".join(equal)
    yield "yes" if case["holds"] else "NO"
    yield f"{case['seconds']:.0f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python tools/prove_table.py", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="what prove --output has written")
    for line in table(parser.parse_args().folders):
        print(line)
