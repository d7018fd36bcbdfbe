"""Print the parity table: every tested layout against one process and against HuggingFace with
torch's AdamW.

    python tools/parity.py [--only WORD ...]
    python tools/parity.py --random [--seed N] [--count N]

The first: twenty fp32 steps of a small LLaMA on English text, the same that
tests/parallel/test_parity.py checks. The second: five steps of layouts drawn at random, as in
tests/parallel/test_random.py, against one process. A few minutes each on two cores. Deviations are
the largest relative ones over all steps. Exit status 1 when one exceeds its bound.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, and no other

import torch

from tests.harness import Cluster
from tests.parallel.cases import LAYOUTS, Layout, Reference, Row, reference, train
from tests.parallel.draw import COUNT, SEED, alone, draw


def rows(
    cluster: Cluster,
    layouts: Iterable[Layout],
    compare_with: Callable[[Cluster, Layout], Reference],
) -> list[Row]:
    """Train the references that are needed, each once, and every layout."""
    known: dict[Layout, Reference] = {}
    table: list[Row] = []
    for layout in layouts:
        single = layout.reference
        if single not in known:
            known[single] = compare_with(cluster, single)
            table.append(known[single].row(single.name, known[single].single))
        table.append(
            known[single].row(layout.name, cluster.run(layout.world_size, train, layout)[0])
        )
    return table


def markdown(table: list[Row]) -> str:
    """The table, loss and gradient norm against either reference, and the fp32 rounding that bounds
    them."""
    head = [
        "layout",
        "loss vs one process",
        "norm vs one process",
        "loss vs HF",
        "norm vs HF",
        "fp32 vs fp64: loss",
        "norm",
        "bounds",
    ]
    lines = [" | ".join(head), " | ".join(["---"] + ["---:"] * (len(head) - 1))]
    for row in table:
        hf = (
            ("-", "-")
            if row.loss_hf is None or row.norm_hf is None
            else (f"{row.loss_hf:.1e}", f"{row.norm_hf:.1e}")
        )
        own = ("0", "0") if row.is_reference else (f"{row.loss:.1e}", f"{row.norm:.1e}")
        lines.append(" | ".join([row.name, *own, *hf, *_bounds(row)]))
    return _framed(lines)


def markdown_of_drawn(table: list[Row]) -> str:
    """The same without HuggingFace and without the references, and a last line with the largest of
    each column."""
    drawn = [row for row in table if not row.is_reference]
    head = [
        "layout",
        "loss vs one process",
        "norm vs one process",
        "fp32 vs fp64: loss",
        "norm",
        "bounds",
    ]
    lines = [" | ".join(head), " | ".join(["---"] + ["---:"] * (len(head) - 1))]
    lines += [
        " | ".join([row.name, f"{row.loss:.1e}", f"{row.norm:.1e}", *_bounds(row)]) for row in drawn
    ]
    columns = [
        [getattr(row, name) for row in drawn]
        for name in ("loss", "norm", "loss_rounding", "norm_rounding")
    ]
    # NaN is larger than any number here: max() alone would lose it.
    largest = [
        max(column, key=lambda value: (value != value, value), default=0.0) for column in columns
    ]
    lines.append(
        " | ".join([f"**largest of {len(drawn)}**", *(f"**{value:.1e}**" for value in largest), ""])
    )
    return _framed(lines)


def _bounds(row: Row) -> tuple[str, str, str]:
    held = "" if row.holds else " EXCEEDED"
    return (
        f"{row.loss_rounding:.1e}",
        f"{row.norm_rounding:.1e}",
        f"{row.loss_bound:.0e}, {row.norm_bound:.0e}{held}",
    )


def _framed(lines: list[str]) -> str:
    return "\n".join(f"| {line} |" for line in lines)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python tools/parity.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        help="layouts whose name contains all these words",
    )
    parser.add_argument(
        "--random", action="store_true", help="draw layouts instead of taking the fixed ones"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=SEED,
        metavar="N",
        help=f"of the draw; default {SEED}, which the tests use",
    )
    parser.add_argument(
        "--count", type=int, default=COUNT, metavar="N", help=f"layouts to draw; default {COUNT}"
    )
    return parser.parse_args()


def main() -> int:
    """Run and print."""
    options = arguments()
    torch.set_num_threads(1)
    layouts = draw(options.seed, options.count) if options.random else LAYOUTS
    chosen = [layout for layout in layouts if all(word in layout.name for word in options.only)]
    with Cluster() as cluster:
        table = rows(cluster, chosen, alone if options.random else reference)
    print(markdown_of_drawn(table) if options.random else markdown(table))
    return 0 if table and all(row.holds for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
