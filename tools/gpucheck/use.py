"""What users type, on one device: small runs of the commands, with the options that a device alone
can show, a few at a time.

    python -m tools.gpucheck.use [--jobs N] [--seconds S] [--only CASE,...] [--without CASE,...]
    [--json FILE]

They train on Python's documentation. A case passes if each of its commands ends with 0 and what is
said of its losses holds: *same* are those of the plain run within the rounding of bf16, *falling*
ones end below their first, and a resumed run has those of the unbroken one to the bit.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, and no other

from megatron_llama.data.corpus import write_corpus, write_pairs, write_preferences

STEPS = 12
SAME = 2e-2
"""Largest relative difference of the last loss."""
PAIRS = 150
"""Preferences: their scores are computed before the first step."""
TUNED = "--packing --on-bad-sample drop --chat-template plain --seq-length 256 --bf16"
Losses = Literal["same", "falling", "none"]


@dataclass(frozen=True)
class Case:
    """Commands that run one after the other. In their words ``{out}`` is a folder of the case,
    ``{data}`` that of the text, and ``{pretrain}`` a small run."""

    commands: tuple[str, ...]
    losses: Losses = "none"
    """Of the first command, which writes to ``{out}/run``."""


def _switch(options: str, losses: Losses = "same") -> Case:
    return Case((f"{{pretrain}} --bf16 --save {{out}}/run {options}",), losses)


FIXED = "{pretrain} --bf16 --deterministic-mode --save {out}/run --save-interval 6"
CASES: Mapping[str, Case] = MappingProxyType(
    {
        "plain": _switch("", "falling"),
        "resumed": Case(
            (FIXED, FIXED.replace("/run", "/resumed") + " --load {out}/run/iter_0000006"), "same"
        ),
        "fp32": Case(("{pretrain} --save {out}/run",), "same"),
        "fp16": Case(("{pretrain} --fp16 --save {out}/run",), "falling"),
        "no_shard": _switch("--data-parallel-sharding-strategy no_shard"),
        "optim_grads_params": _switch("--data-parallel-sharding-strategy optim_grads_params"),
        "compile": _switch("--compile"),
        "graphs": _switch("--cuda-graph-scope block"),
        "flash": _switch("--attention-backend flash"),
        "fused": _switch("--attention-backend fused"),
        "selective": _switch("--recompute-granularity selective"),
        "full": _switch("--recompute-granularity full"),
        "documents": _switch("--reset-attention-mask --reset-position-ids", "falling"),
        "moments in 8 bits": _switch("--exp-avg-dtype 8bit --exp-avg-sq-dtype 8bit"),
        "offload": _switch("--optimizer-offload exact"),
        "speculative": _switch("--optimizer-offload exact --offload-speculative"),
        "zenflow": _switch("--optimizer-offload zenflow", "falling"),
        "muon": _switch("--optimizer muon", "falling"),
        "schedule_free_adamw": _switch(
            "--optimizer schedule_free_adamw --lr-decay-style constant", "falling"
        ),
        "gemma": _switch("--model-type gemma3_text", "falling"),
        "blockwise": _switch("--fp8 blockwise --fp8-bf16-layers 0"),
        "tensorwise": _switch("--fp8 tensorwise --fp8-bf16-layers 0"),
        "profile": Case(
            (
                "{pretrain} --bf16 --profile --profile-step-start 5 --profile-step-end 7 "
                "--profile-dir {out}/profile",
                "{pretrain} --bf16 --record-timeline {out}/timeline.json --profile-step-start 5 "
                "--profile-step-end 7",
                "plan compare {out}/timeline.json",
            )
        ),
        "asynchronous": Case(
            (
                "{pretrain} --bf16 --save {out}/run --save-interval 4 --async-save "
                "--export-hf {out}/hf",
                "verify {out}/run {out}/hf",
                "evaluate --load {out}/run --data-path {data}/docs --split 95,5,0",
                "generate --load {out}/run --prompt Return --max-new-tokens 16",
                "sft --train-data {data}/pairs.jsonl --init-from-hf {out}/hf --train-iters 6 "
                f"--micro-batch-size 4 --lora-rank 8 --save {{out}}/tuned {TUNED}",
                "align --method dpo --train-data {data}/preferences.jsonl --init-from-hf {out}/hf "
                f"--train-iters 4 --micro-batch-size 4 --lr 1e-5 --save {{out}}/aligned {TUNED}",
            ),
            "same",
        ),
        "doctor": Case(("doctor",)),
    }
)
NEED_GPU = ("graphs",)
NEED_FP8 = ("blockwise", "tensorwise")
"""Cases for some generations of GPUs, with models of more than a tile."""


@dataclass(frozen=True)
class Row:
    """One case."""

    name: str
    result: str
    """``passed``, or what did not."""
    seconds: float
    last_loss: float | None


def prepare(folder: Path) -> None:
    """Write the text, its tokens, pairs and preferences."""
    write_corpus(folder / "corpus.jsonl")
    write_pairs(folder / "pairs.jsonl")
    write_preferences(folder / "all.jsonl", folder / "held-out.jsonl")
    lines = (folder / "all.jsonl").read_text().splitlines(keepends=True)[:PAIRS]
    (folder / "preferences.jsonl").write_text("".join(lines))
    words = f"preprocess --input {folder}/corpus.jsonl --output-prefix {folder}/docs"
    command = _command(f"{words} --train-tokenizer --vocab-size 4096 --append-eod")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def pretraining(data: Path, *, tiny: bool) -> str:
    """The words of a small run."""
    heads = "--num-attention-heads 4 --num-query-groups 2"
    size = (
        f"--hidden-size 64 --intermediate-size 128 --num-layers 2 {heads} --seq-length 128"
        if tiny
        else f"--hidden-size 512 --intermediate-size 1408 --num-layers 4 {heads} --seq-length 1024"
    )
    return (
        f"pretrain --data-path {data}/docs --split 95,5,0 {size} --micro-batch-size 2 "
        f"--global-batch-size 4 --train-iters {STEPS} --lr 1e-3 --log-interval 1 "
        "--eval-interval 100 --eval-iters 1"
    )


def losses_of(run: Path) -> list[float]:
    """Of all steps of a run, in order."""
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [record["lm_loss"] for record in records if "lm_loss" in record]


def judged(case: Case, out: Path, plain: Sequence[float] | None) -> str:
    """What is wrong with the losses of a case whose commands have passed; empty: nothing."""
    if case.losses == "none":
        return ""
    losses = losses_of(out / "run")
    if len(losses) != STEPS or not all(map(math.isfinite, losses)):
        return f"losses {losses}"
    if case.losses == "falling" and losses[-1] >= losses[0]:
        return f"the loss went from {losses[0]} to {losses[-1]}"
    if case.losses == "same" and plain and not math.isclose(losses[-1], plain[-1], rel_tol=SAME):
        return f"last loss {losses[-1]}, without the option {plain[-1]}"
    if (out / "resumed").exists() and losses_of(out / "resumed") != losses[STEPS // 2 :]:
        return f"resumed losses {losses_of(out / 'resumed')}, unbroken {losses[STEPS // 2 :]}"
    return ""


def run(name: str, data: Path, plain: Sequence[float] | None, end: float, *, tiny: bool) -> Row:
    """Run a case until ``end``, a time of ``time.monotonic``. What its commands say goes to this
    program's error output where one fails."""
    case = CASES[name]
    out = data / name.replace(" ", "-")
    out.mkdir()
    begin = time.monotonic()
    result = ""
    for command in case.commands:
        words = command.format(out=out, data=data, pretrain=pretraining(data, tiny=tiny))
        try:
            done = subprocess.run(
                _command(words),
                capture_output=True,
                text=True,
                timeout=max(1.0, end - time.monotonic()),
            )
        except subprocess.TimeoutExpired:
            result = f"no time was left for {words.split()[0]}"
            break
        if done.returncode:
            print(f"$ {words}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}", file=sys.stderr)
            result = f"{words.split()[0]} ended with {done.returncode}"
            break
    result = result or judged(case, out, plain)
    losses = losses_of(out / "run") if not result and case.losses != "none" else []
    row = Row(name, result or "passed", time.monotonic() - begin, losses[-1] if losses else None)
    print(f"{row.name}: {row.result}, {row.seconds:.0f} s", flush=True)
    return row


def _command(words: str) -> list[str]:
    return [sys.executable, "-m", "megatron_llama", *words.split()]


def main(given: Sequence[str]) -> int:
    """Run all cases and print a line for each. Returns 1 if one did not pass."""
    parser = argparse.ArgumentParser("python -m tools.gpucheck.use", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--jobs", type=int, default=6, help="cases at once (default 6)")
    parser.add_argument("--seconds", type=float, default=140.0, help="for all (default 140)")
    parser.add_argument("--only", help="these cases: one or more of " + ", ".join(CASES))
    parser.add_argument("--without", default="", metavar="CASE,...", help="leave out these cases")
    parser.add_argument("--tiny", action="store_true", help="models for a CPU")
    parser.add_argument("--json", type=Path, help="also write the rows into this file")
    options = parser.parse_args(given)
    names = [*CASES] if options.only is None else options.only.split(",")
    without = options.without.split(",") if options.without else []
    if unknown := [name for name in (*names, *without) if name not in CASES]:
        parser.error(f"--only, --without: no case is called {', '.join(unknown)}")
    names = [name for name in names if name not in without]
    end = time.monotonic() + options.seconds
    rows = list[Row]()

    def note(row: Row) -> None:
        rows.append(row)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")

    with tempfile.TemporaryDirectory(prefix="use-") as folder:
        data = Path(folder)
        prepare(data)
        plain: Sequence[float] | None = None
        if "plain" in names:
            # The others are compared with it.
            note(run("plain", data, None, end, tiny=options.tiny))
            if rows[0].last_loss is not None:
                plain = losses_of(data / "plain" / "run")
        with ThreadPoolExecutor(options.jobs) as pool:
            left = [name for name in names if name != "plain"]
            runs = [pool.submit(run, n, data, plain, end, tiny=options.tiny) for n in left]
            for done in as_completed(runs):
                note(done.result())
    return 0 if all(row.result == "passed" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
