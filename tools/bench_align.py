"""How long does a step of ``align --method dpo`` take, beside TRL's DPOTrainer on the same CPU?

    python tools/bench_align.py [--rounds 5] [--steps 2] [--json FILE]

Both train the same drawn model on the same pairs (signatures of Python's standard library, each
with its documentation and that of another function), in fp32, in one process of one thread, with
the reference's log-probabilities known before the first step
(``precompute_ref_log_probs`` of TRL). Both processes live at once and take turns: of each round's
turn, the time is that of ``steps`` steps by the clock and by the processor. What is compared is
the time of a pair, because packed samples do not hold the same number of pairs in each step;
padding belongs to it. Numbers below 1 say that ours is faster; the median over rounds is the
result, and losses of the first step must agree.

With --even all pairs have one length, so that neither side pads or packs anything. Needs TRL
(``pip install '.[test]'``).
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, and no other

import torch

import megatron_llama as ml
from megatron_llama.checkpoint.model_folders.hf.writer import export_hf
from megatron_llama.config.help import help_text
from megatron_llama.config.parse import parse
from megatron_llama.config.schema import ModelConfig
from megatron_llama.data.corpus import docstring_pairs, python_documentation
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.data.tokenizer.spm import train_tokenizer
from megatron_llama.errors import ConfigError, UserError
from megatron_llama.model.init import InitialWeights
from megatron_llama.train.run.callbacks import Callback, Run, Step
from megatron_llama.tune.preference.methods import CHOSEN
from megatron_llama.tune.sft.built_in_templates import BUILT_IN
from megatron_llama.tune.sft.chat import ChatTokenizer
from megatron_llama.tune.sft.formats import read_example
from tools.processor import processor

SIDES = ("ours", "trl")
TEMPLATE = "plain"
LOG2 = math.log(2)
LR = 1e-4


@dataclass(frozen=True)
class BenchConfig:
    """What is trained, and for how long."""

    rounds: int = 5
    """How often the two take turns."""
    steps: int = 2
    """Timed steps of a turn."""
    warmup: int = 2
    """Steps before the first turn, which are not timed."""
    pairs: int = 8
    """Pairs in a step of TRL, and samples in a step of ours if they are not packed."""
    seq_length: int = 512
    """Tokens of a sample of ours: of both halves of a pair, or of several pairs."""
    even: bool = False
    """All pairs have the same length, half of --seq-length for each half."""
    hidden_size: int = 256
    """Width of the model."""
    num_layers: int = 4
    """Transformer blocks."""
    vocab_size: int = 4000
    """Tokens of the tokenizer, which is trained for the purpose."""
    json: str | None = None
    """Write what was measured to this file."""


@dataclass(frozen=True)
class Turn:
    """What one side did in its turn."""

    seconds: float
    """By the clock."""
    cpu_seconds: float
    """Of the processor, all threads."""
    pairs: int
    """Trained on."""
    first_loss: float
    """Of the first step of the run."""


class Gate:
    """Stops a worker after each turn, until it is told to go on."""

    def __init__(self, options: BenchConfig) -> None:
        self.options = options
        self.left = options.warmup
        self.pairs = 0
        self.first_loss = math.nan
        self._began = (0.0, 0.0)
        self._timed = False

    def step(self, pairs: int, loss: float) -> None:
        """A step is over. Ends the process when no turn follows."""
        if math.isnan(self.first_loss):
            self.first_loss = loss
        self.pairs += pairs
        self.left -= 1
        if self.left:
            return
        clock, processor = self._began
        turn = Turn(
            time.perf_counter() - clock,
            time.process_time() - processor,
            self.pairs,
            self.first_loss,
        )
        # The warm-up ends like a turn, so that the other side begins when this one is at rest.
        print(json.dumps(asdict(turn)), file=sys.__stdout__, flush=True)
        if not sys.stdin.readline():
            os._exit(0)
        self.left = self.options.steps
        self.pairs = 0
        self._began = (time.perf_counter(), time.process_time())


def write_materials(options: BenchConfig, folder: Path) -> None:
    """Write the tokenizer with the model, and the pairs in TRL's format."""
    texts = list(islice(python_documentation(), 400))
    tokenizer = train_tokenizer(texts, options.vocab_size, folder / "tokenizer.model")
    model = ModelConfig(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size * 11 // 4,
        num_hidden_layers=options.num_layers,
        num_attention_heads=options.hidden_size // 64,
        num_key_value_heads=max(1, options.hidden_size // 128),
        head_dim=64,
        max_position_embeddings=options.seq_length,
    )
    export_hf(folder / "hf", model, InitialWeights(1, 0.02), "float32", tokenizer)
    chat = ChatTokenizer(load_tokenizer(folder / "hf"), TEMPLATE)
    with open(folder / "pairs.jsonl", "w") as file:
        for prompt, chosen, rejected in islice(_pairs(options, chat), _count(options)):
            halves = [[{"role": "assistant", "content": text}] for text in (chosen, rejected)]
            talk = {"prompt": [{"role": "user", "content": prompt}]}
            file.write(json.dumps({**talk, "chosen": halves[0], "rejected": halves[1]}) + "\n")


def _count(options: BenchConfig) -> int:
    """Pairs that no run reads twice: packed samples hold up to four times as many."""
    steps = options.warmup + options.rounds * options.steps + 1
    return steps * options.pairs * (1 if options.even else 4)


def _pairs(options: BenchConfig, chat: ChatTokenizer) -> Iterator[tuple[str, str, str]]:
    """Pairs whose halves have at most half the tokens of a sample; with --even exactly as many."""
    found = [(question, answer) for question, answer in docstring_pairs() if len(question) < 80]
    words = [word for _, answer in found for word in answer.split()]
    at = 0
    number = 0
    while True:
        question, answer = found[number % len(found)]
        other = found[(number + 7) % len(found)][1]
        number += 1
        if not options.even:
            longest = max(_length(chat, question, text) for text in (answer, other))
            if longest <= options.seq_length // 2 and answer != other:
                yield question, answer, other
            continue
        halves = []
        for start in (at, at + options.seq_length):
            halves.append(
                _filled(chat, question, words[start % len(words) :], options.seq_length // 2)
            )
        at += 2 * options.seq_length
        if None not in halves and halves[0] != halves[1]:
            yield question, str(halves[0]), str(halves[1])


def _length(chat: ChatTokenizer, question: str, answer: str) -> int:
    """Tokens of a conversation."""
    talk = {"messages": [{"role": "user", "content": question}]}
    talk["messages"].append({"role": "assistant", "content": answer})
    return len(chat.read(read_example(talk, "messages"), "assistant").ids)


def _filled(chat: ChatTokenizer, question: str, words: Sequence[str], tokens: int) -> str | None:
    """Return as many words as fill a conversation to so many tokens; None if no number does."""
    for count in range(1, len(words)):
        answer = " ".join(words[:count])
        length = _length(chat, question, answer)
        if length >= tokens:
            return answer if length == tokens else None
    return None


class _Gated(Callback):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def on_step(self, run: Run, step: Step) -> None:
        kinds = [batch.completion_kinds for batch in step.batches]
        pairs = sum(int((each == CHOSEN).sum()) for each in kinds if each is not None)
        self._gate.step(pairs, float(step.loss))


def run_ours(options: BenchConfig, folder: Path) -> None:
    """Train with ``align`` until nobody asks for more."""
    ml.align(
        callbacks=[_Gated(Gate(options))],
        method="dpo",
        init_from_hf=str(folder / "hf"),
        train_data=[str(folder / "pairs.jsonl")],
        split="100,0,0",
        chat_template=TEMPLATE,
        packing=not options.even,
        seq_length=options.seq_length,
        micro_batch_size=_samples(options),
        global_batch_size=_samples(options),
        train_iters=options.warmup + options.rounds * options.steps + 1,
        lr=LR,
        lr_decay_style="constant",
        log_interval=10**6,
    )


def _samples(options: BenchConfig) -> int:
    """Of a step of ours: with packing two pairs or more are in each."""
    return options.pairs if options.even else max(1, options.pairs // 2)


def run_trl(options: BenchConfig, folder: Path) -> None:
    """Train with TRL until nobody asks for more."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    gate = Gate(options)

    class Gated(DPOTrainer):  # type: ignore[misc]
        """Stops between turns."""

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            """One step, less its update."""
            self.last = super().training_step(*args, **kwargs)
            return self.last

        def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
            super()._maybe_log_save_evaluate(*args, **kwargs)
            gate.step(options.pairs, float(self.last))

    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    tokenizer.chat_template = BUILT_IN[TEMPLATE]
    lines = (folder / "pairs.jsonl").read_text().splitlines()
    settings = DPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=options.warmup + options.rounds * options.steps + 1,
        per_device_train_batch_size=options.pairs,
        precompute_ref_log_probs=True,
        max_length=None,
        learning_rate=LR,
        lr_scheduler_type="constant",
        logging_steps=10**6,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    data = Dataset.from_list([json.loads(line) for line in lines])
    Gated(model, args=settings, train_dataset=data, processing_class=tokenizer).train()


RUN: Mapping[str, Callable[[BenchConfig, Path], None]] = {"ours": run_ours, "trl": run_trl}


class Worker:
    """One side, in a process of its own."""

    def __init__(self, side: str, argv: Sequence[str], folder: Path) -> None:
        self.side = side
        quiet = {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
        self._errors = open(folder / f"{side}.err", "w+")  # noqa: SIM115 - closed by ``close``
        self._process = subprocess.Popen(
            [sys.executable, __file__, "worker", side, str(folder), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **quiet},
        )
        self._read()  # of the warm-up

    def turn(self) -> Turn:
        """Let it run its steps."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Turn:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"seconds"'):
                return Turn(**json.loads(line))
        self._process.wait()
        self._errors.seek(0)
        raise RuntimeError(f"{self.side} ended: {self._errors.read()[-2000:]}")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def measure(options: BenchConfig, argv: Sequence[str]) -> dict[str, list[Turn]]:
    """Let both take their turns, each round the other one first."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_materials(options, folder)
        workers: list[Worker] = []
        turns: dict[str, list[Turn]] = {side: [] for side in SIDES}
        try:
            workers += [Worker(side, argv, folder) for side in SIDES]
            for number in range(options.rounds):
                for worker in workers if number % 2 == 0 else workers[::-1]:
                    turns[worker.side].append(worker.turn())
        finally:
            for worker in workers:
                worker.close()
    return turns


def ratios(turns: Mapping[str, Sequence[Turn]], field: str) -> list[float]:
    """The time of a pair of ours over that of TRL, round by round."""
    each = {side: [getattr(turn, field) / turn.pairs for turn in turns[side]] for side in SIDES}
    return [ours / theirs for ours, theirs in zip(each["ours"], each["trl"], strict=True)]


def report(options: BenchConfig, turns: Mapping[str, Sequence[Turn]]) -> Iterator[str]:
    """Yield the lines of the result."""
    lengths = "equal lengths" if options.even else "lengths as they are, ours packed"
    yield f"{lengths}; {options.rounds} rounds of {options.steps} steps"
    for side in SIDES:
        clock = statistics.median(1e3 * turn.seconds / turn.pairs for turn in turns[side])
        processor = statistics.median(1e3 * turn.cpu_seconds / turn.pairs for turn in turns[side])
        yield f"{side:5s} {clock:8.1f} ms a pair, {processor:8.1f} ms of the processor"
    for what, field in (("clock", "seconds"), ("processor", "cpu_seconds")):
        found = ratios(turns, field)
        spread = f"{min(found):.3f} to {max(found):.3f}"
        yield f"ours / TRL by {what}: {statistics.median(found):.3f} ({spread})"


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    if {"-h", "--help"} & set(argv):
        usage = "python tools/bench_align.py [--option value ...]"
        print(help_text(usage, __doc__ or "", [BenchConfig]), end="")
        return 0
    if argv[:1] == ["worker"]:
        _, side, folder, *rest = argv
        torch.set_num_threads(1)
        # What is printed on the way is no line of a turn.
        sys.stdout = sys.stderr
        RUN[side](parse(rest, [BenchConfig], aliases={}).get(BenchConfig), Path(folder))
        return 0
    options = parse(argv, [BenchConfig], aliases={}).get(BenchConfig)
    for name in ("rounds", "steps", "warmup", "pairs"):
        if getattr(options, name) < 1:
            got = getattr(options, name)
            raise ConfigError(f"--{name}", got=got, expected="1 or more", do=f"raise --{name}")
    print(processor(), flush=True)
    turns = measure(options, argv)
    # Both begin as the reference.
    losses = [turns[side][0].first_loss for side in SIDES]
    assert all(abs(loss - LOG2) < 1e-5 for loss in losses), f"first losses {losses}"
    for line in report(options, turns):
        print(line)
    if options.json:
        found = {side: [asdict(turn) for turn in turns[side]] for side in SIDES}
        medians = {f: statistics.median(ratios(turns, f)) for f in ("seconds", "cpu_seconds")}
        Path(options.json).write_text(json.dumps({"turns": found, "ratios": medians}, indent=2))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
