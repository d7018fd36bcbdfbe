"""Print the parity table: every tested layout against one process and against HuggingFace with
torch's AdamW.

    python tools/parity.py [--only WORD ...]
    python tools/parity.py --random [--seed N] [--count N]
    python tools/parity.py [--random] --pieces N
    python tools/parity.py --modules [--only WORD ...]
    python tools/parity.py --families [--random [--seed N] [--count N]] [--only WORD ...]
    python tools/parity.py --faults [--only WORD ...]
    python tools/parity.py --preferences [--only WORD ...]

The first: twenty fp32 steps of a small LLaMA on English text; tests/parallel/test_parity.py checks
six of them. The second: five steps of layouts drawn at random, of which
tests/parallel/test_random.py trains some, against one process. The third: twenty fp32 steps of
models of HuggingFace and of an MLP under ``megatron_llama.shard``, against torch's
DistributedDataParallel and AdamW; tests/engine/shard/test_parity.py trains some. The fourth: twenty
fp32 steps of every family of models in eighteen layouts, of experts in twenty more, and with each
loss of routers in five, of which tests/model/families/test_parity.py trains some; with ``--random``
in layouts drawn for it, 24 each, with losses of routers and divided experts where it can have them.
A token that stands between two experts within rounding may go to either: a layout that exceeds its
bound is compared with one process in which that token goes where the layout sent it, if the loads
of experts say that it did, and exceeds its bound otherwise. Its row says so.
``--only "qwen2 "`` takes one family. The fifth: what ``prove`` says of every seeded fault of
tests/prove/faults.py. The sixth: twenty fp32 steps of every method of preference tuning, against
plain torch on transformers' model; tests/tune/preference/test_parity.py makes some of them. A few
minutes each on two cores, and of the fourth for each family. Rows are printed as they are trained.
Deviations are the largest relative ones over all steps. Exit status 1 when
one exceeds its bound, or when a fault is not found.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, and no other

import torch

from megatron_llama.prove.proof import Proof, prove_case
from tests import harness
from tests.engine.shard.training import Run, Trained, ddp, differences, sharded
from tests.engine.shard.training import layouts as module_layouts
from tests.harness import Cluster
from tests.model.families import draw as family_draw
from tests.model.families import parting, twins
from tests.parallel.cases import (
    LAYOUTS,
    LOSS_BOUND,
    NORM_BOUND,
    Layout,
    Record,
    Reference,
    Row,
    deviation,
    reference,
    train,
)
from tests.parallel.draw import COUNT, SEED, alone, draw
from tests.prove.faults import CATALOGUE, Fault, faulty
from tests.tune.preference.cases import CASES, align, align_twin
from tests.tune.preference.test_parity import LAYOUTS as PREFERENCE_LAYOUTS

ROW_SECONDS = 900.0
"""What a row may take, on a machine that has other work."""


Explain = Callable[[Cluster, Any, Reference, Row], Row]
"""Returns the row of a layout that exceeds its bound, or another one that says why that is right:
see tests/model/families/parting.py."""


def rows(
    cluster: Cluster,
    layouts: Iterable[Layout],
    compare_with: Callable[[Cluster, Layout], Reference],
    explain: Explain | None = None,
) -> Iterator[Row]:
    """Train the references that are needed, each once, and every layout."""
    known: dict[Layout, Reference] = {}
    for layout in layouts:
        single = layout.reference
        if single not in known:
            known[single] = compare_with(cluster, single)
            yield known[single].row(single.name, known[single].single)
        expected = known[single]
        same = replace(layout, first=expected.first)
        ranks = cluster.run(layout.world_size, train, same, timeout=ROW_SECONDS)
        row = expected.row(layout.name, ranks[0])
        if explain is not None and not row.holds:
            row = explain(cluster, same, expected, row)
        yield row


COLUMNS = {
    "loss": "loss vs one process",
    "norm": "norm vs one process",
    "loss_hf": "loss vs HF",
    "norm_hf": "norm vs HF",
    "loss_rounding": "fp32 vs fp64: loss",
    "norm_rounding": "norm",
}
"""Fields of a row with their titles: loss and gradient norm against either reference, and the fp32
rounding that bounds them."""


def print_rows(table: Iterable[Row], names: Sequence[str], *, summary: bool) -> bool:
    """Print each row when it is there, with the columns of these fields; return whether there are
    any and all hold. ``summary``: end with the largest of each column, without the references."""
    print(_framed([" | ".join(["layout", *(COLUMNS[name] for name in names), "bounds"])]))
    print(_framed([" | ".join(["---"] + ["---:"] * (len(names) + 1))]), flush=True)
    printed: list[Row] = []
    for row in table:
        printed.append(row)
        held = "" if row.holds else " EXCEEDED"
        bounds = f"{row.loss_bound:.0e}, {row.norm_bound:.0e}{held}"
        print(_framed([" | ".join([row.name, *_cells(row, names), bounds])]), flush=True)
    if summary:
        drawn = [row for row in printed if not row.is_reference]
        largest = [f"**{_largest(drawn, name):.1e}**" for name in names]
        print(_framed([" | ".join([f"**largest of {len(drawn)}**", *largest, ""])]))
    return bool(printed) and all(row.holds for row in printed)


def _cells(row: Row, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        value = getattr(row, name)
        if value is None:
            yield "-"
        else:
            yield "0" if row.is_reference and name in ("loss", "norm") else f"{value:.1e}"


def _largest(table: Iterable[Row], name: str) -> float:
    # NaN is larger than any number here: max() alone would lose it.
    values = (value for row in table if (value := getattr(row, name)) is not None)
    return max(values, key=_size, default=0.0)


def _framed(lines: list[str]) -> str:
    return "\n".join(f"| {line} |" for line in lines)


Differences = dict[tuple[str, str], tuple[float, float]]


def modules(cluster: Cluster, only: Iterable[str]) -> Differences:
    """Train by ``shard`` and with DDP; returns the largest differences of losses and of norms by
    model and way to shard, over one and several microbatches, clipped or not."""
    known: dict[Run, list[Trained]] = {}
    found: Differences = {}
    for run, options in module_layouts():
        way = _way(run, options)
        if not all(word in f"{run.model} {way}" for word in only):
            continue
        if run not in known:
            known[run] = cluster.run(run.dp, ddp, run)
        new = differences(cluster.run(run.dp, sharded, run, options), known[run])
        old = found.get((run.model, way), (0.0, 0.0))
        found[run.model, way] = max(old[0], new[0], key=_size), max(old[1], new[1], key=_size)
    return found


def _way(run: Run, options: Mapping[str, Any]) -> str:
    return f"dp{run.dp} {options['strategy']}" + " in shards of 2" * ("shard_size" in options)


def _size(value: float) -> tuple[bool, float]:
    return value != value, value


def preferences(cluster: Cluster, only: Iterable[str]) -> Differences:
    """Tune by every method in every layout; returns the differences of losses and of norms from
    plain torch by method and layout."""
    known: dict[tuple[Layout, str], Record] = {}
    found: Differences = {}
    for layout in (Layout(), *PREFERENCE_LAYOUTS):
        for name, options in CASES.items():
            if not all(word in f"{name} {layout.name}" for word in only):
                continue
            single = layout.reference
            if (single, name) not in known:
                known[single, name] = align_twin(single, options)[0]
            new = cluster.run(layout.world_size, align, layout, options)[0][0]
            old = known[single, name]
            found[name, layout.name] = (
                deviation(new.losses, old.losses),
                deviation(new.norms, old.norms),
            )
    return found


def markdown_of_differences(found: Differences, head: str) -> str:
    """A line for each layout or way to shard, and in it loss and norm of each model or method."""
    models = list(dict.fromkeys(model for model, _ in found))
    lines = [
        " | ".join([f"loss, norm vs {head}", *models]),
        " | ".join(["---"] + ["---:"] * len(models)),
    ]
    for way in dict.fromkeys(way for _, way in found):
        cells = [found.get((model, way)) for model in models]
        lines.append(" | ".join([way, *("-" if cell is None else _exact(cell) for cell in cells)]))
    return _framed(lines)


def _held(found: Differences) -> bool:
    held = (loss <= LOSS_BOUND and norm <= NORM_BOUND for loss, norm in found.values())
    return bool(found) and all(held)


def _exact(cell: tuple[float, float]) -> str:
    return ", ".join("0" if value == 0 else f"{value:.1e}" for value in cell)


PROOF_SECONDS = 600.0
"""What a proof of a fault may take."""
PROOF_STEPS = 3
"""What is wrong from the second step on is found in it, and one step is left to resume with."""


def faults(only: Iterable[str]) -> Iterator[tuple[Fault, Proof]]:
    """Prove the case of each fault, with the fault in the package."""
    with Cluster() as cluster, tempfile.TemporaryDirectory() as folder:
        for number, fault in enumerate(CATALOGUE):
            if all(word in fault.name for word in only):
                place = Path(folder, str(number))
                place.mkdir()
                pool = faulty(cluster, fault)
                yield fault, prove_case(pool, fault.case, place, PROOF_SECONDS, steps=PROOF_STEPS)


def line_of_fault(fault: Fault, proof: Proof) -> str:
    """What a fault does, what it is modelled on, and what a proof says of it."""
    found_by = ", ".join(check.name for check in proof.checks if not check.holds) or "NOT FOUND"
    first, axes = "-", "-"
    if proof.location is not None:
        row = proof.location.row
        tensor = "" if row.tensor is None else f" of `{row.tensor}`"
        step = "" if row.step is None else f", step {row.step}"
        first = f"{row.what}{tensor}{step}: {row.got:.1e}"
        axes = ", ".join(proof.location.named) or "-"
    what = f"{fault.name} | {fault.does} | [{fault.issue}]({fault.link})"
    return f"| {what} | {found_by} | {first} | {axes} |"


HEAD_OF_FAULTS = (
    "| fault | what goes wrong | modelled on | found by | first number that is wrong | "
    "gone without |\n| --- | --- | --- | --- | --- | --- |"
)


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
        help="layouts (with --modules: models and ways, with --faults: faults, with --preferences: "
        "methods and layouts) whose name contains "
        "all these words",
    )
    parser.add_argument(
        "--random", action="store_true", help="draw layouts instead of taking the fixed ones"
    )
    parser.add_argument(
        "--pieces",
        type=int,
        default=0,
        metavar="N",
        help="tensor-parallel layouts only, fixed or drawn, all with --tp-comm-overlap N",
    )
    parser.add_argument(
        "--modules", action="store_true", help="models that are not ours, under shard()"
    )
    parser.add_argument(
        "--families", action="store_true", help="models of all families, against transformers"
    )
    parser.add_argument(
        "--faults", action="store_true", help="faults that are put into the package, by prove"
    )
    parser.add_argument(
        "--preferences", action="store_true", help="every method of preference tuning"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=SEED,
        metavar="N",
        help=f"of the draw; default {SEED}, which the tests use",
    )
    parser.add_argument(
        "--count",
        type=int,
        default=0,
        metavar="N",
        help=f"layouts to draw; default {COUNT}, of families {family_draw.COUNT} each",
    )
    return parser.parse_args()


def main() -> int:
    """Run and print."""
    options = arguments()
    torch.set_num_threads(1)
    if options.modules:
        harness.PRELOAD.append("tests.engine.shard.training")
        with Cluster() as cluster:
            found = modules(cluster, options.only)
        print(markdown_of_differences(found, "DDP"))
        return 0 if _held(found) else 1
    if options.preferences:
        harness.PRELOAD.append("tests.tune.preference.cases")
        with Cluster() as cluster:
            found = preferences(cluster, options.only)
        print(markdown_of_differences(found, "torch"))
        return 0 if _held(found) else 1
    if options.faults:
        print(HEAD_OF_FAULTS, flush=True)
        missed = 0
        for fault, proof in faults(options.only):
            print(line_of_fault(fault, proof), flush=True)
            missed += proof.holds
        return 1 if missed else 0
    names = list(COLUMNS)
    layouts: Sequence[Any] = LAYOUTS
    compare_with: Callable[[Cluster, Any], Reference] = reference
    if options.families:
        compare_with = family_draw.reference if options.random else twins.reference
        count = options.count or family_draw.COUNT
        named = {word.strip() for word in options.only} & twins.TWINS.keys()
        layouts = [
            layout
            for family in sorted(named) or twins.TWINS
            for layout in (
                family_draw.draw(family, options.seed, count)
                if options.random
                else (*twins.family_layouts(family), *twins.routed_layouts(family))
            )
        ]
    elif options.random:
        names = [name for name in COLUMNS if not name.endswith("_hf")]
        layouts = draw(options.seed, options.count or COUNT)
        compare_with = alone
    if options.pieces:
        cut = (replace(one, tp_comm=str(options.pieces)) for one in layouts if one.tp > 1)
        layouts = list(dict.fromkeys(cut))
    chosen = [layout for layout in layouts if all(word in layout.name for word in options.only)]
    if options.random:
        print(f"{len(chosen)} layouts drawn from seed {options.seed}\n")
    with Cluster() as cluster:
        explain = parting.explained if options.families else None
        table = rows(cluster, chosen, compare_with, explain)
        if options.random and not options.families:
            table = (row for row in table if not row.is_reference)
        holds = print_rows(table, names, summary=options.random)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
