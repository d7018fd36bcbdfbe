"""Measure how often ``prove --steps-from`` takes rounding for a fault, and a fault for rounding.

    python tools/drift_rates.py --folder DIR [--settings NAME ...] [--dtypes NAME ...]

Trains a small LLaMA on English text for 160 steps: with five learning rates and initial weights, in
fp32 and in bf16, in one process and in other layouts, and with faults of several sizes that begin
in the first step or later. Every two right runs of a setting are a pair; every faulty run is
compared with the right one process. Prints the distribution of the largest rises of right pairs
(``TAILS`` in ``megatron_llama/prove/drift.py``), the false alarms, and which faults are found at
which step. An hour on two cores. What is in DIR already is not trained again, so a run that
was stopped goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, and no other

import torch

from megatron_llama.launch.launcher import Place
from megatron_llama.model.init import InitialWeights
from megatron_llama.prove.drift import (
    FLOORS,
    LENGTHS,
    TAILS,
    Difference,
    Drift,
    Dtype,
    judge,
    largest_rises,
)
from megatron_llama.prove.logs import FP32_ROUNDING
from tests.harness import Cluster
from tests.parallel.cases import GLOBAL_BATCH_SIZE, Layout, Trainer, batch, trainer
from tests.prove.faults import CATALOGUE

STEPS = 160
DTYPES: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
POSITIONS = 3000
"""Samples of the text, which is then read again."""


Right = dict[tuple[str, Dtype], dict[str, Any]]
"""The curves of right runs by layout, for each setting and dtype."""


@dataclass(frozen=True)
class Setting:
    """What is trained."""

    seed: int
    lr: float
    std: float
    """Of the initial weights."""
    first: int
    """The first sample."""
    warmup: int = 0
    """Steps."""
    clip: float = 1.0


SETTINGS: Mapping[str, Setting] = {
    "base": Setting(1234, 1e-3, 0.05, 0),
    "hot": Setting(7, 3e-3, 0.05, 1000),
    "cool": Setting(11, 2e-4, 0.02, 500, warmup=20),
    "wide": Setting(21, 1e-3, 0.1, 2000, clip=0.0),
    "fresh": Setting(99, 2e-3, 0.03, 1500, warmup=5),
}


@dataclass(frozen=True)
class Fault:
    """What is wrong in a run, from a step on."""

    kind: str = ""
    """Nothing, a name below, or a fault of tests/prove/faults.py."""
    size: float = 0.0
    begin: int = 1
    """The step in which it first acts."""


ALONE = Layout()
RIGHT = (
    *(ALONE, Layout(microbatches=2), Layout(microbatches=4), Layout(microbatches=8)),
    *(Layout(tp=2, sp=True), Layout(cp=2, cp_comm="ring")),
    Layout(dp=2, strategy="optim_grads_params", microbatches=2),
)
TWO, FOUR = Layout(microbatches=2), Layout(microbatches=4)
WRONG: tuple[tuple[Layout, Fault], ...] = (
    *((TWO, Fault("lr", size, begin)) for size in (0.1, 0.01, 0.001) for begin in (1, 41)),
    *((TWO, Fault("clip", size, begin)) for size in (1.0, 0.1) for begin in (1, 41)),
    *((FOUR, Fault("repeated", begin=begin)) for begin in (1, 41)),
    *((FOUR, Fault("repeated once", begin=begin)) for begin in (6, 41)),
    *((TWO, Fault("stale", size, begin)) for size in (0, 2) for begin in (1, 41)),
    *((TWO, Fault("stale once", size, 41)) for size in (0, 2)),
    *((TWO, Fault("noise", size, 41)) for size in (1e-2, 1e-3, 1e-4)),
    (Layout(tp=2, sp=True), Fault("norms_not_summed")),
    (Layout(cp=2), Fault("positions_in_rank_order")),
    (Layout(dp=2, reduce_bf16=True), Fault("gradients sent in bf16")),
)
"""``lr``, ``clip``: too large by so much. ``repeated``: the last microbatch is the first again.
``stale``: one bucket of weights, of which size is the number, is not updated. ``noise``: all
weights change by so much, once."""


def run(place: Place, layout: Layout, setting: Setting, fault: Fault) -> list[list[float]]:
    """Train; returns the loss and the gradient norm of each step."""
    seeded = {planted.name.replace(" ", "_"): planted.patch for planted in CATALOGUE}
    with seeded.get(fault.kind, nullcontext)():
        trained = trainer(place, layout)
        trained.optimizer.load_weights(InitialWeights(setting.seed, setting.std))
        return [_step(trained, step, setting, fault) for step in range(1, STEPS + 1)]


def _step(trained: Trainer, step: int, setting: Setting, fault: Fault) -> list[float]:
    layout, optimizer = trained.layout, trained.optimizer
    first = step == fault.begin
    kind = fault.kind if first or (step > fault.begin and not fault.kind.endswith("once")) else ""
    size = GLOBAL_BATCH_SIZE // (layout.dp * layout.microbatches)
    starts = (
        setting.first
        + (step - 1) * GLOBAL_BATCH_SIZE
        + (m * layout.dp + trained.mesh.data_rank) * size
        for m in range(layout.microbatches)
    )
    batches = [batch(range(start % POSITIONS, start % POSITIONS + size)) for start in starts]
    if kind.startswith("repeated"):
        batches[-1] = batches[0]
    loss = trained.runtime.step(batches)
    kept = [master.clone() for master in optimizer.masters] if kind.startswith("stale") else []
    lr = setting.lr * min(1.0, step / setting.warmup) if setting.warmup else setting.lr
    norm = optimizer.step(
        lr * (1 + fault.size * (kind == "lr")),
        clip=setting.clip * (1 + fault.size * (kind == "clip")),
    ).grad_norm
    if kept or (kind == "noise" and first):
        optimizer.settle()
        chance = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for number, master in enumerate(optimizer.masters):
                if kind == "noise":
                    master.mul_(1 + fault.size * torch.randn(master.shape, generator=chance))
                elif number == fault.size:
                    master.copy_(kept[number])
        optimizer.publish()
    return [loss.item(), norm.item()]


def trained_runs(
    folder: Path, settings: Sequence[str], dtypes: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield every run, with what it is of. Trains those that the folder does not have."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "runs.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    known = {json.dumps(entry["of"]): entry for entry in map(json.loads, lines)}
    with Cluster() as cluster, file.open("a") as out:
        for name, dtype in itertools.product(settings, dtypes):
            for layout, fault in (*((right, Fault()) for right in RIGHT), *WRONG):
                typed = replace(layout, bf16=dtype == "bf16", steps=STEPS)
                of = {"setting": name, "dtype": dtype, "layout": layout.name, **asdict(fault)}
                entry = known.get(json.dumps(of))
                if entry is None:
                    arguments = (typed, SETTINGS[name], fault)
                    curve = cluster.run(typed.world_size, run, *arguments, timeout=400)[0]
                    entry = {"of": of, "curve": curve}
                    out.write(json.dumps(entry) + "\n")
                    out.flush()
                yield entry


FORMS: Mapping[str, tuple[str, str]] = {
    "all digits": ("", ""),
    "Megatron-LM": (".6E", ".3f"),
    "torchtitan": (".5f", ".4f"),
    "torchtitan before 2025": (".4f", "no"),
}
"""How logs print losses and gradient norms."""
FIRST = (12, 50, STEPS)
"""So many steps are compared."""


def differences(
    one: Sequence[Sequence[float]], other: Sequence[Sequence[float]], form: str = "all digits"
) -> list[Difference]:
    """The steps of two runs, as logs have them."""
    found = []
    for step, (a, b) in enumerate(zip(one, other, strict=True), 1):
        (loss, hidden), (norm, norm_hidden) = (
            _difference(x, y, printed) for x, y, printed in zip(a, b, FORMS[form], strict=True)
        )
        assert loss is not None
        found.append(Difference(step, loss, hidden, norm, norm_hidden))
    return found


def _difference(one: float, other: float, printed: str) -> tuple[float | None, float]:
    """The relative difference of two numbers as they are printed, and what the digits hide."""
    if printed == "no":
        return None, 0.0
    digits = 0.0
    if printed:
        texts = [format(value, printed) for value in (one, other)]
        one, other = map(float, texts)
        exponent = Decimal(texts[0]).as_tuple().exponent
        assert isinstance(exponent, int)
        digits = 10.0**exponent
    scale = max(one, other)
    return (other - one) / scale, digits / scale + 2 * FP32_ROUNDING


def rates(runs: Sequence[dict[str, Any]], right: Right) -> Iterator[str]:
    """Yield how often the first steps of logs are judged wrongly, by what they print."""
    yield "| log | steps | false alarms | of right pairs | faults found, fp32 | bf16 |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for form, steps in itertools.product(FORMS, FIRST):
        alarms = [
            judge(differences(curves[a], curves[b], form)[:steps], dtype=dtype).verdict == "drift"
            for (_, dtype), curves in right.items()
            for a, b in itertools.combinations(curves, 2)
        ]
        found: dict[str, list[bool]] = {dtype: [] for dtype in DTYPES}
        for of, curve in ((entry["of"], entry["curve"]) for entry in runs):
            # A fault has to act for a few of the steps.
            if of["kind"] and of["begin"] + 4 <= steps:
                alone = right[of["setting"], of["dtype"]][ALONE.name]
                drift = judge(differences(alone, curve, form)[:steps], dtype=of["dtype"])
                found[of["dtype"]].append(drift.verdict == "drift")
        hits = " | ".join(f"{sum(seen)} of {len(seen)}" for seen in found.values())
        yield f"| {form} | {steps} | {sum(alarms)} | {len(alarms)} | {hits} |"


def report(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield what was measured."""
    right: Right = defaultdict(dict)
    for entry in runs:
        if not entry["of"]["kind"]:
            key = entry["of"]["setting"], entry["of"]["dtype"]
            right[key][entry["of"]["layout"]] = entry["curve"]
    rises: dict[tuple[str, int], list[float]] = defaultdict(list)
    alarms = []
    for (setting, dtype), curves in right.items():
        for a, b in itertools.combinations(curves, 2):
            found = differences(curves[a], curves[b])
            for quantity in TAILS:
                largest = largest_rises(quantity, found, FLOORS[dtype][quantity])
                for steps, rise in zip(LENGTHS, largest, strict=True):
                    rises[quantity, steps].append(rise)
            verdict = judge(found, dtype=dtype)
            if verdict.verdict != "rounding":
                alarms.append(f"{setting} {dtype}: {a} and {b}: {verdict.why}")
    yield "| largest rise of right pairs | steps | a quarter has more than | scale | largest |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for (name, steps), values in rises.items():
        upper = statistics.quantiles(values, n=4)[-1]
        beyond = [math.log(value / upper) for value in values if value > upper]
        scale = statistics.fmean(beyond) if beyond else 0.0
        yield f"| {name} | {steps} | {upper:.1f} | {scale:.2f} | {max(values):.1f} |"
    pairs = len(rises["loss", 1])
    yield f"\n{len(alarms)} false alarms in {pairs} pairs of {sum(map(len, right.values()))} runs"
    yield from alarms
    yield "\n| fault | size | from step | " + " | ".join(f"{s} {d}" for s, d in right) + " |"
    yield "| --- | ---: | ---: |" + " --- |" * len(right)
    wrong: dict[tuple[str, float, int], dict[tuple[str, Dtype], str]] = defaultdict(dict)
    for entry in runs:
        of = entry["of"]
        if of["kind"]:
            curves = right[of["setting"], of["dtype"]]
            drift = judge(differences(curves[ALONE.name], entry["curve"]), dtype=of["dtype"])
            fault = of["kind"], of["size"], of["begin"]
            wrong[fault][of["setting"], of["dtype"]] = _seen(drift)
    for (kind, size, begin), seen in wrong.items():
        cells = " | ".join(seen.get(key, "") for key in right)
        yield f"| {kind} | {size:g} | {begin} | {cells} |"
    yield ""
    yield from rates(runs, right)


def _seen(found: Drift) -> str:
    """The step from which a drift was called, or a dash."""
    return f"step {found.rises[0].iteration}" if found.rises else "-"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python tools/drift_rates.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    arguments = parser.parse_args()
    runs = list(trained_runs(arguments.folder, arguments.settings, arguments.dtypes))
    print("\n".join(report(runs)))


if __name__ == "__main__":
    main()
