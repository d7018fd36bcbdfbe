"""Text behind a slow server, against an indexed dataset on the disk: time of a step, memory, and
the samples after a kill.

    python -m tools.bench_stream --gigabytes 3 --folder runs/bench-stream

It writes shards of jsonl (kept for the next time), serves them over HTTP with ``--rate`` and
``--latency``, and preprocesses one of them. Then it trains a small model in turns on both, one
process each, and says how long a step takes on the text, over that on the dataset. At last a run on
two data-parallel ranks is killed (SIGKILL) and goes on with ``--resume-ranks``: the tokens of every
position of the run are compared with those of a run on one process that nobody interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import count, pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, and no other

import megatron_llama as ml
from megatron_llama.data.corpus import python_documentation
from megatron_llama.data.tokenizer.spm import train_tokenizer
from megatron_llama.files import replacing
from tools.processor import processor
from tools.range_server import serving

SHARD_BYTES = 100_000_000
MODEL: Mapping[str, object] = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "seq_length": 256,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "lr": 1e-3,
    "log_interval": 100,
    "eval_interval": 0,
    "progress_bar": False,
}
WINDOW = 128
KILLED_AFTER = 34
SAVE_INTERVAL = 10
STEPS = 60


def write_shards(folder: Path, gigabytes: float) -> None:
    """Write shards of paragraphs of Python's documentation, each in an order of its own, and a
    tokenizer, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [part for text in python_documentation() for part in text.split("\n\n") if part]
    if not (folder / "tokenizer.model").exists():
        train_tokenizer(texts[:4000], 4096, folder / "tokenizer.model")
    shards = folder / "text"
    shards.mkdir(exist_ok=True)
    sizes = [SHARD_BYTES] * int(gigabytes * 1e9 // SHARD_BYTES) or [int(gigabytes * 1e9)]
    for number, size in enumerate(sizes):
        path = shards / f"train-{number:05}.jsonl"
        if path.exists():
            continue
        chance = random.Random(number)
        written = 0
        with replacing(path) as temporary, temporary.open("w") as file:
            while written < size:
                lines = "".join(
                    json.dumps({"text": "\n".join(chance.choices(texts, k=4))}) + "\n"
                    for _ in range(1000)
                )
                written += file.write(lines)


class Witness(ml.Callback):
    """Writes after each step its time, the memory of this rank and its workers, and the hashes of
    the samples by their positions."""

    def __init__(self, folder: Path, begun: float) -> None:
        self._file = (folder / f"rank-{os.environ.get('RANK', '0')}.jsonl").open("a")
        self._begun = begun

    def on_step(self, run: ml.Run, step: ml.Step) -> None:
        """Write a line."""
        size = run.config.training.global_batch_size
        micro = run.config.training.micro_batch_size
        first = step.consumed_samples - size
        hashes = {}
        for number, batch in enumerate(step.batches):
            for place in range(micro):
                position = first + (number * run.world_size + run.rank) * micro + place
                row = (
                    batch.tokens[:, place].numpy().tobytes()
                    + batch.labels[-1:, place].numpy().tobytes()
                )
                hashes[position] = hashlib.sha256(row).hexdigest()[:16]
        line = {
            "iteration": step.iteration,
            "seconds": time.time() - self._begun,
            "memory": resident_bytes(),
            "samples": hashes,
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def resident_bytes() -> tuple[int, int]:
    """Return the memory of this process, and that of its children."""
    children = [
        int(child)
        for task in Path("/proc/self/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    own, *others = (_resident(pid) for pid in (os.getpid(), *children))
    return own, sum(others)


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def start(
    folder: Path, ranks: int, options: Mapping[str, object]
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a run, which writes what it has seen into a new folder below ``folder``."""
    seen = next(path for n in count() if not (path := folder / f"seen-{n}").exists())
    seen.mkdir()
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    values = json.dumps({**MODEL, **options})
    command += ["-m", "tools.bench_stream", "--train-on", values, "--folder", str(seen)]
    with (seen / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    return process, seen


def lines_of(seen: Path) -> list[dict[str, Any]]:
    """Return what all ranks of a run have written, whole lines alone."""
    return [
        json.loads(line)
        for path in sorted(seen.glob("rank-*.jsonl"))
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def finished(folder: Path, ranks: int, options: Mapping[str, object]) -> list[dict[str, Any]]:
    """Return the lines of a run that has come to its end."""
    process, seen = start(folder, ranks, options)
    if process.wait():
        raise SystemExit((seen / "log").read_text())
    return lines_of(seen)


def step_seconds(lines: list[dict[str, Any]]) -> float:
    """Return the median time of the steps in the second half of a run."""
    times: list[float] = [line["seconds"] for line in lines]
    steps = [after - before for before, after in pairwise(times)]
    return statistics.median(steps[len(steps) // 2 :])


def samples_of(lines: list[dict[str, Any]]) -> dict[str, str]:
    """Return the hash of the sample at every position."""
    return {position: digest for line in lines for position, digest in line["samples"].items()}


def killed(folder: Path, ranks: int, options: Mapping[str, object]) -> list[dict[str, Any]]:
    """Kill a run after ``KILLED_AFTER`` steps, and return its lines."""
    process, seen = start(folder, ranks, options)
    while process.poll() is None:
        if max((line["iteration"] for line in lines_of(seen)), default=0) >= KILLED_AFTER:
            os.killpg(process.pid, signal.SIGKILL)
            for path in Path("/proc").glob("[0-9]*"):
                _kill_rank(path, str(seen))
            process.wait()
            return lines_of(seen)
        time.sleep(0.05)
    raise SystemExit((seen / "log").read_text())


def _kill_rank(process: Path, seen: str) -> None:
    """Kill a process if it is a rank of the run that writes into ``seen``: the launcher gives each
    a session of its own."""
    try:
        if seen in (process / "cmdline").read_text().split("\0"):
            os.kill(int(process.name), signal.SIGKILL)
    except OSError:
        return  # it has ended


def bench(folder: Path, gigabytes: float, arguments: argparse.Namespace) -> None:
    """Run everything, and print what it has come to."""
    write_shards(folder, gigabytes)
    shards = sorted((folder / "text").iterdir())
    size = sum(path.stat().st_size for path in shards)
    print(f"{processor()}\n{len(shards)} shards, {size / 1e9:.2f} GB", flush=True)
    tokenizer = str(folder / "tokenizer.model")
    if not (folder / "docs.idx").exists():
        small = folder / "some.jsonl"
        small.write_bytes(b"".join(shards[0].read_bytes().splitlines(keepends=True)[:20000]))
        command = [sys.executable, "-m", "megatron_llama", "preprocess", "--input", str(small)]
        command += ["--output-prefix", str(folder / "docs"), "--tokenizer-model", tokenizer]
        subprocess.run([*command, "--append-eod"], check=True)
    with serving(
        folder / "text", latency=arguments.latency, bytes_per_second=arguments.rate
    ) as server:
        text: dict[str, object] = {"data_path": server.url, "tokenizer_model": tokenizer}
        text["stream_workers"] = arguments.workers
        # Two samples of each lane, so that every step asks for text.
        text["stream_window"] = WINDOW
        indexed = {"data_path": str(folder / "docs")}
        ratios = []
        for round_number in range(arguments.rounds):
            runs = [
                finished(folder, 1, {**options, "train_iters": arguments.steps})
                for options in (indexed, text)
            ]
            ratios.append(step_seconds(runs[1]) / step_seconds(runs[0]))
            memory = [sum(line["memory"]) / 2**20 for line in runs[1]]
            print(
                f"round {round_number}: a step {step_seconds(runs[0]) * 1e3:.0f} ms on .bin, "
                f"{step_seconds(runs[1]) * 1e3:.0f} ms on text (x {ratios[-1]:.3f}); first step "
                f"after {runs[0][0]['seconds']:.1f} and {runs[1][0]['seconds']:.1f} s; memory with "
                f"workers {memory[len(memory) // 2]:.0f} MiB half-way, {memory[-1]:.0f} at the end",
                flush=True,
            )
        if ratios:
            print(
                f"a step on text takes {statistics.median(ratios):.3f} of one on .bin (median of "
                f"{len(ratios)}, {min(ratios):.3f} to {max(ratios):.3f})",
                flush=True,
            )
        compare_resumed(folder, text, arguments.resume_ranks)


def compare_resumed(folder: Path, text: Mapping[str, object], ranks: int) -> None:
    """Kill a run on two ranks, resume it on ``ranks``, and compare its samples with a straight
    run's. Raises SystemExit if one differs."""
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, **text}
    small["train_iters"] = STEPS
    straight = samples_of(finished(folder, 1, small))
    saved = next(path for n in count() if not (path := folder / f"saved-{n}").exists())
    saving = {**small, "save": str(saved), "save_interval": SAVE_INTERVAL, "load": "auto"}
    before = killed(folder, 2, saving)
    after = finished(folder, ranks, saving)
    resumed_at = min(line["iteration"] for line in after)
    last = max(line["iteration"] for line in before)
    memory = [sum(line["memory"]) / 2**20 for line in after]
    wrong = [
        position
        for lines in (before, after)
        for position, digest in samples_of(lines).items()
        if straight[position] != digest
    ]
    seen = samples_of(before) | samples_of(after)
    print(
        f"killed at step {last} on 2 ranks, resumed at step {resumed_at} on {ranks}: {len(wrong)} "
        f"of {len(straight)} samples differ, {len(straight) - len(seen)} are missing; "
        f"{memory[0]:.0f} MiB of a rank and its workers after its first step, {max(memory):.0f} at "
        "most"
    )
    if wrong or seen.keys() != straight.keys():
        raise SystemExit(1)


def main() -> None:
    """Read the options, and bench or be one rank of a run."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench_stream",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, required=True, help="for shards and runs")
    parser.add_argument("--gigabytes", type=float, default=3.0, help="of text")
    parser.add_argument("--rate", type=float, default=4e6, help="bytes a second of the server")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds before each answer")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs that are timed")
    parser.add_argument("--steps", type=int, default=60, help="steps of these")
    parser.add_argument("--workers", type=int, default=2, help="--stream-workers")
    parser.add_argument("--resume-ranks", type=int, default=4, help="ranks of the resumed run")
    parser.add_argument("--train-on", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train_on is None:
        bench(arguments.folder, arguments.gigabytes, arguments)
        return
    begun = time.time()
    ml.train(json.loads(arguments.train_on), [Witness(arguments.folder, begun)])


if __name__ == "__main__":
    main()
