"""Train models of others' libraries by ``shard`` and by torch's DistributedDataParallel, and
compare.

    python -m tools.zoo [NAME ...] [--ranks 2 4] [--allow-missing]

Each model is tiny, random and built here; nothing is downloaded. It trains for five steps of two
microbatches on each rank, with torch's AdamW and clipping, in fp32 over gloo, by every sharding
strategy. Losses, gradient norms, and parameters and buffers after the last step are compared with
those of DDP on the same data, within the bounds of docs/numerics.md. transformers and peft come
with the tests' environment; diffusers, timm and torchvision have to be installed by whoever wants
their models. A model whose package is missing is named as not run. Exit status 1 if a difference
is beyond its bound, if a model does not train, or, without --allow-missing, if one was not run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, and no other

import torch

from megatron_llama.prove.pool import WorkerError, WorkerPool
from tools.zoo.compare import Compared, compare, known
from tools.zoo.training import MODELS

PRELOAD = ("tools.zoo.training", "transformers.models.llama.modeling_llama", "peft")
"""What all workers find imported, where it is installed."""
HEAD = (
    "| model | package | units | trained | ranks | loss | norm | weights | bound | s |\n"
    "| --- | --- | ---: | ---: | --- | ---: | ---: | ---: | --- | ---: |"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and return 1 if anything in it is not as it must be."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.zoo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"by default all: {', '.join(MODELS)}"
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], metavar="N")
    parser.add_argument(
        "--allow-missing", action="store_true", help="status 0 though packages are missing"
    )
    given = parser.parse_args(argv)
    try:
        names = known(given.names)
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    missing = [name for name in names if not _installed(MODELS[name].package)]
    held = True
    print(HEAD)
    with WorkerPool(PRELOAD) as pool:
        for name in names:
            if name in missing:
                print(f"| {name} | {MODELS[name].package} | not run: no such package |", flush=True)
                continue
            for line, holds in _lines(pool, name, given.ranks):
                print(line, flush=True)
                held &= holds
    if missing:
        print(f"not run: {', '.join(missing)}")
    return 0 if held and (given.allow_missing or not missing) else 1


def _installed(package: str) -> bool:
    return not package or find_spec(package) is not None


def _lines(pool: WorkerPool, name: str, ranks: Sequence[int]) -> Iterator[tuple[str, bool]]:
    """Yield the lines of a model, and whether each says that it is as with DDP."""
    package = MODELS[name].package or "none"
    for count in ranks:
        began = time.monotonic()
        try:
            compared = compare(pool, name, count)
        except WorkerError as error:
            yield f"| {name} | {package} | DDP over {count} ranks fails: {error} |", False
            continue
        seconds = time.monotonic() - began
        yield _line(name, package, count, compared, seconds), all(c.holds for c in compared)
        for wrong in (c for c in compared if not c.holds):
            yield f"| {name} | | {count} ranks, {wrong.strategy}: {wrong.bound} |", False


def _line(name: str, package: str, ranks: int, compared: Sequence[Compared], seconds: float) -> str:
    """Return the line of a model over some ranks, with the worst of all strategies."""
    # NaN is larger than any number here.
    worst = [
        max(column, key=lambda value: (value != value, value))
        for column in zip(
            *((c.found.loss, c.found.norm, c.found.value) for c in compared), strict=True
        )
    ]
    bounds = list(dict.fromkeys(c.bound if c.holds else "BEYOND" for c in compared))
    first = max(compared, key=lambda c: c.parameters)
    cells = [name, package, first.units, f"{first.parameters:,}", ranks]
    cells += [*(f"{value:.1e}" for value in worst), ", ".join(bounds), f"{seconds:.0f}"]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
