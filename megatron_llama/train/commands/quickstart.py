"""``quickstart``: from nothing to a trained LLaMA in HuggingFace format, by the other commands."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import Any

from megatron_llama.config.megatron_names import ALIASES, MEGATRON
from megatron_llama.config.parse import Parsed, parse
from megatron_llama.errors import ClusterError, DataError, UserError
from megatron_llama.train.commands.common.configs import QuickstartConfig

RECIPE = Path(__file__).with_name("quickstart.yaml")
GLOBAL_BATCH = 8
"""Samples of a step of the recipe."""
PROMPTS = ("Return the", "The with statement")
TO_CONTINUE = "Return a list of"


@dataclass(frozen=True)
class Processes:
    """The layout of the recipe over the devices of this machine."""

    count: int
    tensor: int
    """Tensor-parallel size; the other axis is data-parallel."""
    micro_batch: int
    """Samples of one data-parallel rank, such that a step has as many as the recipe."""


class Phases:
    """The headings of the steps, with the time that has passed."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._start = time.monotonic()

    def begin(self, number: int, title: str) -> None:
        """Print the heading of a step."""
        print(f"== {number} of {self._count}, {self.elapsed()}: {title}", flush=True)

    def elapsed(self) -> str:
        """Return the minutes and seconds since the start."""
        minutes, seconds = divmod(int(time.monotonic() - self._start), 60)
        return f"{minutes}:{seconds:02}"


def processes_for(gpus: int) -> Processes:
    """Return the layout for a number of GPUs of one machine: tensor-parallel pairs where the number
    is even, and as many data-parallel ranks as can share the samples of a step equally. Without a
    GPU, two processes on the processor."""
    devices = gpus or 2
    tensor = 2 if devices % 2 == 0 else 1
    data = max(n for n in range(1, devices // tensor + 1) if GLOBAL_BATCH % n == 0)
    return Processes(tensor * data, tensor, GLOBAL_BATCH // data)


def quickstart(parsed: Parsed) -> None:
    """Make text and tokens, train, sample and export, each with the command that a user would type,
    printed before it runs. Steps that an earlier call has finished are skipped.

    Raises ClusterError under a launcher, DataError for a folder that cannot be made, ConfigError
    for a changed recipe that cannot be read, and UserError for a step that failed and has said
    why."""
    from megatron_llama.data.corpus import write_corpus
    from megatron_llama.engine.comm.device import accelerator_count
    from megatron_llama.files import replace_file
    from megatron_llama.launch.launcher import place_from_environment
    from megatron_llama.train.commands.pretrain import SECTIONS as PRETRAIN

    options = parsed.get(QuickstartConfig)
    started = place_from_environment()
    if started.world_size > 1:
        do = "start quickstart by itself: it starts as many as there is room for"
        got = f"{started.world_size} processes"
        raise ClusterError("quickstart", got=got, expected="one", do=do)
    out = Path(options.output)
    recipe = out / "quickstart.yaml"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not recipe.exists():
            # A copy to look at, to change and to start again; an interrupted run keeps its own.
            replace_file(recipe, RECIPE.read_bytes())
    except OSError as error:
        do = "give another --output"
        raise DataError(out, got=error.strerror, expected="a folder", do=do) from error
    gpus = accelerator_count()
    layout = processes_for(gpus)
    phases = Phases(6)

    if not (out / "docs.meta.json").exists():
        phases.begin(1, "text: the documentation that comes with Python")
        count = write_corpus(out / "corpus.jsonl")
        print(f"{out / 'corpus.jsonl'}: {count:,} documents")
        phases.begin(2, "tokenizer and tokens")
        made = ["--input", out / "corpus.jsonl", "--output-prefix", out / "docs", "--overwrite"]
        trained = ["--train-tokenizer", "--vocab-size", 4096, "--append-eod"]
        _run("preprocess", *made, *trained)

    split = [f"tensor parallel {layout.tensor} with sequence parallelism"] * (layout.tensor > 1)
    processes = "1 process" if layout.count == 1 else f"{layout.count} processes"
    phases.begin(3, f"training, with an ETA in each line: {', '.join([processes, *split])}")
    changes: list[object] = []
    if layout.tensor > 1:
        changes += ["--tensor-model-parallel-size", layout.tensor, "--sequence-parallel"]
    if layout.micro_batch != GLOBAL_BATCH:
        changes += ["--micro-batch-size", layout.micro_batch]
    if options.train_iters:
        # A sixth of the steps warms the learning rate up, as in the recipe.
        changes += ["--train-iters", options.train_iters]
        changes += ["--lr-warmup-iters", options.train_iters // 6]
    saved = out / "checkpoints"
    kept = ["--save", saved, "--load", saved]
    command = ["--config", recipe, "--data-path", out / "docs", *changes, *kept]
    # A changed recipe is read here first: of several processes that refuse it, torchrun may end the
    # one that prints before it has said why.
    parse(list(map(str, command)), PRETRAIN, aliases={**MEGATRON, **ALIASES})
    _run("pretrain", *command, processes=layout.count)

    phases.begin(4, "a sample")
    _run("generate", "--load", saved, "--prompt", *PROMPTS, "--max-new-tokens", 48)

    phases.begin(5, "export to HuggingFace")
    _run("export", "--load", saved, "--output", out / "hf")
    print(in_transformers(out / "hf"), flush=True)

    phases.begin(6, "the curves of the run as a picture")
    _run("report", saved, "--html", out / "report.html")

    print(f"\ndone in {phases.elapsed()}")
    print(_losses(saved / "log.jsonl"))
    print(f"loss curve:         {out / 'report.html'} (open it in a browser)")
    print(f"HuggingFace export: {out / 'hf'}\n")
    print(next_steps(out, gpus), flush=True)


def _run(command: str, *options: object, processes: int = 1) -> None:
    """Print a command of this package and run it, under torchrun if it has several processes. A
    SIGTERM is passed on to it. Raises UserError if it fails, and SystemExit after a SIGTERM."""
    words = ["-m", "megatron_llama", command, *map(str, options)]
    if processes > 1:
        launch = ["--nproc-per-node", str(processes), "--standalone"]
        print(f"$ torchrun {shlex.join([*launch, *words])}", flush=True)
        words = ["-m", "torch.distributed.run", *launch, *words]
    else:
        print(f"$ python {shlex.join(words)}", flush=True)
    process = Popen([sys.executable, *words])
    stopped: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        process.send_signal(number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        status = process.wait()
    except KeyboardInterrupt:
        # The terminal has interrupted the command too. It may be saving, so it is not killed here.
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if stopped:
        raise SystemExit(128 + stopped[0])
    if status != 0:
        do = "mend what it said, and start quickstart again: it goes on here"
        raise UserError(f"quickstart: {command}", got=f"status {status}", expected="0", do=do)


def in_transformers(folder: Path) -> str:
    """Return transformers' output from the export, or that transformers is not installed."""
    if find_spec("transformers") is None:
        return (
            "transformers is not installed, so nothing has loaded the export yet: with it, "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}) does"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(TO_CONTINUE, return_tensors="pt")
    text = tokenizer.decode(model.generate(**batch, max_new_tokens=24, do_sample=False)[0])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"transformers loads it ({parameters:,} parameters) and continues: {text!r}"


def _losses(log: Path) -> str:
    """Return the first and the last validation loss of a run's log."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    curve = [line["validation_loss"] for line in lines if "validation_loss" in line]
    return f"validation loss:    {curve[0]:.3f} before training, {curve[-1]:.3f} after"


def next_steps(out: Path, gpus: int) -> str:
    """Return the next commands for the user, as they can be typed in this shell."""
    first, python, torchrun = _programs()
    if not gpus:
        first.append("export OMP_NUM_THREADS=1")
    recipe = shlex.quote(str(out / "quickstart.yaml"))
    data = f"--config {recipe} --data-path {shlex.quote(str(out / 'docs'))}"
    pipeline = "--pipeline-model-parallel-size 2 --micro-batch-size 2"
    load = f"--load {shlex.quote(str(out / 'checkpoints'))}"
    lines = [
        *([" && ".join(first)] if first else []),
        "# the same run under pipeline parallelism, without starting it",
        f"{python} pretrain {data} {pipeline} --dry-run --world-size 4",
    ]
    if gpus == 0 or gpus >= 4:
        lines += [
            "# four processes: two pipeline stages of two data-parallel ranks",
            f"{torchrun} --nproc-per-node 4 -m megatron_llama pretrain {data} {pipeline} "
            "--train-iters 20 --log-interval 5",
        ]
    lines += [
        "# another prompt; all options",
        f'{python} generate {load} --prompt "If the argument is" --temperature 0.5',
        f"{python} pretrain --help",
    ]
    return "\n  ".join(["Next:", *lines])


def _programs() -> tuple[list[str], str, str]:
    """Return the commands that make this interpreter the shell's, and the calls of this package and
    of torchrun: by their names where the shell finds them, or after ``activate`` of a virtual
    environment."""
    here = Path(sys.executable).parent
    names = ("python -m megatron_llama", "torchrun")
    on_path = shutil.which("python")
    if on_path is not None and Path(on_path).absolute().parent == here:
        return [], *names
    if (here / "activate").exists():
        place = here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here
        return [f"source {shlex.quote(str(place / 'activate'))}"], *names
    python = shlex.quote(sys.executable)
    return [], f"{python} -m megatron_llama", f"{python} -m torch.distributed.run"
