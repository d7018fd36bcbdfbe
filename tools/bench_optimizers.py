"""What loss does each optimizer reach after equal steps on quickstart's corpus?

    python tools/bench_optimizers.py [--seeds 1 2 3] [--optimizers adamw muon] [--output FOLDER]
    python tools/bench_optimizers.py --updates

Every run is quickstart's recipe in one process, but for optimizer and batch: the documentation that
comes with Python, a model of about 5 million parameters, the same samples and learning rate for
all. The seed draws the initial weights and the order of the samples. Printed is the validation
loss, which all of them compute on the same samples, as the mean over the seeds with the least and
the largest. What an earlier call has finished in the folder is not run again.

--updates trains nothing: it prints the processor time of an update on this machine, for each
element of a shard. Muon has none, since its time goes by matrices.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, and no other

import torch

from megatron_llama.config.help import help_text
from megatron_llama.config.parse import parse
from megatron_llama.config.schema import OptimizerConfig
from megatron_llama.data.corpus import write_corpus
from megatron_llama.engine.options import MUON, SCHEDULE_FREE
from megatron_llama.engine.plan.buckets import BucketKind
from megatron_llama.engine.rules.schedule_free import ScheduleFreeAdamW
from megatron_llama.engine.rules.update_rule import AdamW, Shard, UpdateRule
from megatron_llama.errors import ConfigError, UserError
from megatron_llama.pipeline.plan.run_engine import update_options
from tools.processor import processor

ROOT = Path(__file__).resolve().parent.parent
OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "adamw": ("--optimizer", "adam"),
    "adamw-bf16": ("--optimizer", "adam", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"),
    "adamw-8bit": ("--optimizer", "adam", "--exp-avg-dtype", "8bit", "--exp-avg-sq-dtype", "8bit"),
    "muon": ("--optimizer", "muon"),
    "schedule-free": ("--optimizer", "schedule_free_adamw", "--lr-decay-style", "constant"),
}
"""The options that make each."""
UPDATED = 1 << 22
"""Elements of the shard of --updates."""
ROUNDS = 12
"""Updates of each, of which the fastest counts."""


@dataclass(frozen=True)
class BenchConfig:
    """What is trained, and for how long."""

    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    """Which to compare."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """One run of each optimizer with each of them."""
    train_iters: int = 120
    """Steps of a run; a sixth of them warms the learning rate up."""
    global_batch_size: int = 16
    """Samples of a step, all at a time."""
    eval_interval: int = 40
    """Steps between evaluations, on all samples for validation."""
    seq_length: int = 0
    """Tokens of a sample. 0: the recipe's."""
    lr: tuple[float, ...] = (2e-3,)
    """Peak learning rates, tried one after the other; the least is a tenth."""
    output: str = "bench-optimizers"
    """Folder for corpus and runs."""
    updates: bool = False
    """Print how long updates take, and nothing else."""
    json: str | None = None
    """Write what was measured to this file."""


@dataclass(frozen=True)
class Curve:
    """One run."""

    optimizer: str
    seed: int
    lr: float
    losses: Mapping[int, float]
    """Validation loss by iteration."""

    @property
    def name(self) -> str:
        """Optimizer and learning rate."""
        return f"{self.optimizer}, lr {self.lr:g}"


def run(command: Sequence[object], log: Path) -> None:
    """Run a command of the trainer, with what it says in a file. Raises UserError if it fails."""
    words = [sys.executable, "-m", "megatron_llama", *map(str, command)]
    with log.open("w") as out:
        status = subprocess.run(words, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT).returncode
    if status:
        raise UserError(f"{' '.join(words)} ended with status {status}, see {log}")


def make_corpus(folder: Path) -> Path:
    """Make corpus and tokenizer as quickstart does, unless they are there; returns the prefix."""
    prefix = folder / "docs"
    if not (folder / "docs.meta.json").exists():
        write_corpus(folder / "corpus.jsonl")
        made = ["--input", folder / "corpus.jsonl", "--output-prefix", prefix, "--overwrite"]
        trained = ["--train-tokenizer", "--vocab-size", 4096, "--append-eod"]
        run(["preprocess", *made, *trained], folder / "preprocess.txt")
    return prefix


def measure(options: BenchConfig) -> Iterator[Curve]:
    """Train, and yield each run as it ends."""
    folder = Path(options.output).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    prefix = make_corpus(folder)
    recipe = ROOT / "megatron_llama" / "train" / "commands" / "quickstart.yaml"
    for seed in options.seeds:
        for lr in options.lr:
            for optimizer in options.optimizers:
                rate = ["--lr", lr, "--min-lr", lr / 10]
                batch = options.global_batch_size
                sizes = [options.train_iters, options.seq_length, batch]
                words = [optimizer, *map(str, [*sizes, seed, lr])]
                where = folder / "-".join(words)
                done = folder / f"{where.name}.json"
                if not done.exists():
                    shutil.rmtree(where, ignore_errors=True)
                    steps = ["--train-iters", options.train_iters]
                    steps += ["--lr-warmup-iters", options.train_iters // 6]
                    steps += ["--eval-interval", options.eval_interval, "--save-interval", 0]
                    steps += ["--global-batch-size", batch, "--micro-batch-size", batch]
                    if options.seq_length:
                        steps += ["--seq-length", options.seq_length]
                    command = ["pretrain", "--config", recipe, "--data-path", prefix, *steps]
                    chosen = [*rate, *OPTIMIZERS[optimizer], "--seed", seed, "--save", where]
                    run([*command, *chosen], folder / f"{where.name}.txt")
                    done.write_text(json.dumps(dict(validation_losses(where / "log.jsonl"))))
                    shutil.rmtree(where)
                losses = {int(at): loss for at, loss in json.loads(done.read_text()).items()}
                yield Curve(optimizer, seed, lr, losses)


def validation_losses(log: Path) -> Iterator[tuple[int, float]]:
    """Yield iteration and loss of every evaluation in a run's log."""
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        if "validation_loss" in entry:
            yield entry["iteration"], entry["validation_loss"]


def update_times() -> Iterator[str]:
    """Yield the processor time of an update by each elementwise optimizer, the least of some
    rounds in which they take turns, by one thread."""
    torch.set_num_threads(1)
    kind = BucketKind(True, 1, False, False, 0, 1, True, False)
    draw = torch.Generator().manual_seed(1)
    weights = torch.randn(UPDATED, generator=draw).to(torch.bfloat16)
    grad = torch.randn(UPDATED, generator=draw)
    rules: dict[str, UpdateRule] = {}
    for name, words in OPTIMIZERS.items():
        options = parse(words, [OptimizerConfig], aliases={}).get(OptimizerConfig)
        if options.optimizer == MUON:
            continue
        averages = options.optimizer == SCHEDULE_FREE
        numbers = update_options(options)
        rules[name] = ScheduleFreeAdamW([numbers]) if averages else AdamW([numbers])
        rules[name].attach(Shard(0, 0, weights.clone(), torch.float32, kind, ())).copy_(weights)
        rules[name].refresh(0)
    least = dict.fromkeys(rules, float("inf"))
    for _ in range(ROUNDS):
        for name, rule in rules.items():
            begin = time.process_time()
            rule.step(0, grad, scale=torch.ones(()), skip=torch.zeros(()), lr=1e-3)
            least[name] = min(least[name], time.process_time() - begin)
    for name, seconds in least.items():
        ratio = seconds / least["adamw"]
        yield f"{name:16} {1e9 * seconds / UPDATED:5.1f} ns for an element, {ratio:5.2f} of AdamW's"


def table(curves: Sequence[Curve]) -> Iterator[str]:
    """Yield the lines of a table: a row for each optimizer, a column for each evaluation."""
    iterations = sorted(curves[0].losses)[1:]
    seeds = len({curve.seed for curve in curves})
    yield (
        f"| validation loss, {seeds} seeds | " + " | ".join(f"{n} steps" for n in iterations) + " |"
    )
    yield "|---" * (1 + len(iterations)) + "|"
    for name in dict.fromkeys(curve.name for curve in curves):
        cells = []
        for n in iterations:
            found = [curve.losses[n] for curve in curves if curve.name == name]
            cells.append(f"{statistics.mean(found):.3f} ({min(found):.3f} to {max(found):.3f})")
        yield f"| {name} | " + " | ".join(cells) + " |"


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    if {"-h", "--help"} & set(argv):
        usage = "python tools/bench_optimizers.py [--option value ...]"
        print(help_text(usage, __doc__ or "", [BenchConfig]), end="")
        return 0
    options = parse(argv, [BenchConfig], aliases={}).get(BenchConfig)
    print(processor(), flush=True)
    if options.updates:
        print(*update_times(), sep="\n")
        return 0
    for name in options.optimizers:
        if name not in OPTIMIZERS:
            expected = f"one of {', '.join(OPTIMIZERS)}"
            raise ConfigError("--optimizers", got=name, expected=expected, do="correct the name")
    curves = []
    for curve in measure(options):
        print(f"{curve.name}, seed {curve.seed}: {max(curve.losses.items())[1]:.4f}", flush=True)
        curves.append(curve)
    print(*table(curves), sep="\n")
    if options.json is not None:
        found = [{**vars(curve), "losses": dict(curve.losses)} for curve in curves]
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
