"""Print the parity table: every tested layout against one process and against HuggingFace with torch's AdamW.

    python tools/parity.py [--only WORD ...]

Twenty fp32 steps of a small LLaMA on English text, the same that tests/parallel/test_parity.py checks; about two minutes on two
cores. Deviations are the largest relative ones over all steps. Exit status 1 when one exceeds its bound.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from tests.harness import Cluster
from tests.parallel.cases import LAYOUTS, Layout, Reference, Row, reference, train


def rows(cluster: Cluster, only: list[str]) -> list[Row]:
    """Train the references that are needed, then every layout whose name holds all words of ``only``."""
    known: dict[Layout, Reference] = {}
    table: list[Row] = []
    for layout in LAYOUTS:
        if not all(word in layout.name for word in only):
            continue
        alone = layout.reference
        if alone not in known:
            known[alone] = reference(cluster, alone)
            table.append(known[alone].row(alone.name, known[alone].single))
        table.append(known[alone].row(layout.name, cluster.run(layout.world_size, train, layout)[0]))
    return table


def markdown(table: list[Row]) -> str:
    """The table, loss and gradient norm against either reference, and the fp32 rounding that bounds them."""
    head = ["layout", "loss vs one process", "norm vs one process", "loss vs HF", "norm vs HF", "fp32 vs fp64: loss", "norm", "bounds"]
    lines = [" | ".join(head), " | ".join(["---"] + ["---:"] * (len(head) - 1))]
    for row in table:
        hf = ("-", "-") if row.loss_hf is None or row.norm_hf is None else (f"{row.loss_hf:.1e}", f"{row.norm_hf:.1e}")
        own = ("0", "0") if row.is_reference else (f"{row.loss:.1e}", f"{row.norm:.1e}")
        bounds = f"{row.loss_bound:.0e}, {row.norm_bound:.0e}" + ("" if row.holds else " EXCEEDED")
        lines.append(" | ".join([row.name, *own, *hf, f"{row.loss_rounding:.1e}", f"{row.norm_rounding:.1e}", bounds]))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="layouts whose name contains all these words")
    torch.set_num_threads(1)
    with Cluster() as cluster:
        table = rows(cluster, parser.parse_args().only)
    print(markdown(table))
    return 0 if table and all(row.holds for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
