"""What does ZenFlow cost in loss? The same samples with AdamW, with ZenFlow, and with as few
updates as its cold columns get.

    python tools/zenflow_study.py runs/zenflow

A small LLaMA is pretrained on the documentation that comes with Python, and tuned on its pairs of
signature and documentation, by the ``pretrain`` and ``sft`` commands themselves. Every contender
sees the same number of samples; plain accumulation makes one update where ZenFlow makes one of its
cold columns. Prints losses on held-out text as Markdown: the mean over seeds, and how far seeds
differ. Finished runs in the folder are not repeated.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, and no other

from megatron_llama.config.help import help_text
from megatron_llama.config.parse import parse
from megatron_llama.errors import UserError

SHAPE = (
    "--hidden-size 64 --intermediate-size 176 --num-layers 2 --num-attention-heads 4 "
    "--max-position-embeddings 256"
)
COMMON = ("--adam-beta2", "0.95", "--split", "95,5,0", "--eval-iters", "24", "--no-progress-bar")


POINTS = 6
"""Of a loss curve."""


@dataclass(frozen=True)
class StudyConfig:
    """What is compared, and for how long."""

    folder: str
    """Folder for data and runs. May stand first, without its name."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """One run of each contender for each: other initial weights, another order of the samples."""
    pretrain_steps: int = 192
    """Steps of pretraining; a multiple of 16, as plain accumulation makes one of sixteen."""
    sft_steps: int = 96
    """Steps of tuning; a multiple of 16."""
    pretrain_lr: float = 6e-3
    """Peak learning rate of pretraining."""
    sft_lr: float = 2e-3
    """Peak learning rate of tuning."""
    at_once: int = 2
    """Runs side by side."""


@dataclass(frozen=True)
class Contender:
    """A way to train."""

    name: str
    accumulate: int = 1
    """Steps whose samples become one step."""
    options: tuple[str, ...] = ()


def zenflow(ratio: float, interval: int, *, overlap: bool = False) -> Contender:
    """ZenFlow that chooses columns anew every 48 steps."""
    words = (
        f"--optimizer-offload zenflow --zenflow-topk-ratio {ratio} --zenflow-update-interval "
        f"{interval}"
    )
    words += (
        " --zenflow-select-strategy step --zenflow-select-interval 48"
        + " --zenflow-overlap-step" * overlap
    )
    return Contender(
        f"ZenFlow {ratio}, {interval}{', beside' if overlap else ''}", options=tuple(words.split())
    )


CONTENDERS = (
    Contender("AdamW"),
    *(zenflow(ratio, interval) for interval in (4, 16) for ratio in (0.05, 0.1)),
    zenflow(0.1, 4, overlap=True),
    Contender("accumulation 4", 4),
    Contender("accumulation 16", 16),
)


@dataclass(frozen=True)
class Task:
    """Pretraining or tuning."""

    name: str
    words: tuple[str, ...]
    """Of the command."""
    steps: int
    samples: int
    """In a step."""
    lr: float
    losses: dict[str, list[float]] = field(default_factory=dict)
    """By contender, one for each seed."""

    def command(self, one: Contender, seed: int, folder: Path) -> list[str]:
        """One run."""
        steps = self.steps // one.accumulate
        schedule = (
            f"--train-iters {steps} --lr {self.lr} --lr-warmup-iters {max(1, steps // 12)} "
            f"--eval-interval {steps} --seed {seed}"
        )
        batch = (
            f"--micro-batch-size {self.samples} --global-batch-size "
            f"{self.samples * one.accumulate} --save {folder}"
        )
        points = f"--log-interval {max(1, self.steps // POINTS // one.accumulate)}"
        return [
            *self.words,
            *COMMON,
            *schedule.split(),
            *batch.split(),
            *points.split(),
            *one.options,
        ]


def main(argv: Sequence[str]) -> int:
    """Run what is missing and print the table."""
    if {"-h", "--help"} & set(argv):
        usage = "python tools/zenflow_study.py FOLDER [--option value ...]"
        print(help_text(usage, __doc__ or "", [StudyConfig]), end="")
        return 0
    words = (
        [f"--folder={argv[0]}", *argv[1:]] if argv and not argv[0].startswith("--") else list(argv)
    )
    try:
        options = parse(words, [StudyConfig], aliases={}).get(StudyConfig)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for task in tasks(options, Path(options.folder)):
        runs = [(one, seed) for seed in options.seeds for one in CONTENDERS]
        with ProcessPoolExecutor(options.at_once, get_context("spawn"), alone) as pool:
            found = [
                pool.submit(measured, task, one, seed, Path(options.folder)) for one, seed in runs
            ]
            for (one, _), loss in zip(runs, found, strict=True):
                task.losses.setdefault(one.name, []).append(loss.result())
        print(
            "\n".join([*table(task), *curves(task, options.seeds[0], Path(options.folder))]),
            flush=True,
        )
    return 0


def tasks(options: StudyConfig, folder: Path) -> Iterator[Task]:
    """Pretraining, then tuning of what AdamW has pretrained with the first seed."""
    docs = prepared(folder)
    words = ("pretrain", "--data-path", str(docs), *SHAPE.split(), "--seq-length", "128")
    first = Task("pretraining", words, options.pretrain_steps, 8, options.pretrain_lr)
    yield first
    base = place(folder, first, CONTENDERS[0], options.seeds[0])
    words = (
        "sft",
        "--train-data",
        str(folder / "pairs.jsonl"),
        "--load",
        str(base),
        "--finetune",
        "--chat-template",
        "plain",
    )
    words += ("--packing", "--on-bad-sample", "drop", "--seq-length", "256")
    yield Task("tuning", words, options.sft_steps, 4, options.sft_lr)


def prepared(folder: Path) -> Path:
    """The dataset's prefix."""
    from megatron_llama.data.corpus import write_corpus, write_pairs

    folder.mkdir(parents=True, exist_ok=True)
    docs = folder / "docs"
    if not docs.with_name("docs.meta.json").exists():
        write_corpus(folder / "corpus.jsonl")
        write_pairs(folder / "pairs.jsonl")
        words = (
            f"preprocess --input {folder / 'corpus.jsonl'} --output-prefix {docs} "
            "--train-tokenizer --vocab-size 1024 --append-eod --overwrite"
        )
        run(words.split())
    return docs


def run(words: Sequence[str]) -> None:
    """One command of the program, in this process."""
    from megatron_llama.cli import main as program

    with redirect_stdout(StringIO()) as out, redirect_stderr(out):
        status = program(list(words))
    if status:
        raise RuntimeError(f"{' '.join(words)}: exit status {status}\n{out.getvalue()}")


def alone() -> None:
    """A process of the pool computes on one processor."""
    import torch

    torch.set_num_threads(1)


def place(folder: Path, task: Task, one: Contender, seed: int) -> Path:
    """Where a run keeps its log and its checkpoint."""
    return folder / task.name / one.name.replace(", ", "-").replace(" ", "-") / str(seed)


def measured(task: Task, one: Contender, seed: int, folder: Path) -> float:
    """The loss on held-out text at the end of a run."""
    here = place(folder, task, one, seed)
    if not (here / "latest_checkpointed_iteration.txt").exists():
        run(task.command(one, seed, here))
    lines = [json.loads(line) for line in (here / "log.jsonl").read_text().splitlines()]
    return float([line["validation_loss"] for line in lines if "validation_loss" in line][-1])


def table(task: Task) -> Iterator[str]:
    """Losses, and their ratio to AdamW's of the same seed."""
    yield f"\n{task.name}: {task.steps} steps of {task.samples} samples, lr {task.lr}"
    yield "| | loss, mean of seeds | least to most | against AdamW, mean | worst |"
    yield "|---|---|---|---|---|"
    plain = task.losses[CONTENDERS[0].name]
    for name, losses in task.losses.items():
        ratios = [100 * (loss / other - 1) for loss, other in zip(losses, plain, strict=True)]
        spread = f"{min(losses):.4f} to {max(losses):.4f}"
        yield (
            f"| {name} | {statistics.fmean(losses):.4f} | {spread} | "
            f"{statistics.fmean(ratios):+.2f} % | {max(ratios):+.2f} % |"
        )


def curves(task: Task, seed: int, folder: Path) -> Iterator[str]:
    """Training losses on the way, by samples seen: each that of one step."""
    found = {}
    for one in CONTENDERS:
        lines = [
            json.loads(line)
            for line in (place(folder, task, one, seed) / "log.jsonl").read_text().splitlines()
        ]
        found[one.name] = {
            line["consumed_samples"]: line["lm_loss"] for line in lines if "lm_loss" in line
        }
    seen = sorted(set.intersection(*(set(points) for points in found.values())))
    yield f"\n| training loss, seed {seed}, after samples: | " + " | ".join(map(str, seen)) + " |"
    yield "|---" * (len(seen) + 1) + "|"
    for name, points in found.items():
        yield f"| {name} | " + " | ".join(f"{points[at]:.3f}" for at in seen) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
