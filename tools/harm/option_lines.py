"""The part ``options``: command lines drawn at random, through the dry run and through the run.

A line that one of them takes, the other has to take, too; and what is refused is refused in the
same words, before the first step.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from megatron_llama.config.parse import options_of
from megatron_llama.prove.case import Case
from megatron_llama.prove.draw import draw
from megatron_llama.prove.given import SECTIONS
from tests.e2e.product import words as command_words
from tests.launcher import Finished, Launcher
from tests.refusals import UNKNOWABLE, first_line
from tools.harm.judging import Journal, Result, Verdict, emptied
from tools.harm.materials import CHAT, Workshop, write_records
from tools.harm.sandbox import GIB, Limits, Outcome, run_forked, valueless, warm

PART = "options"
MOST_PROCESSES = 4
STEPS = 2
PATIENCE = 120.0
"""Seconds after which a run that the dry run has taken is taken to go on."""
OUTSIDE = (
    *("wandb", "mlflow", "trackio", "hub", "tensorboard", "metrics", "profile", "nccl", "port"),
    *("launch", "nodes", "gpus", "dry_run", "export", "calibrat", "coefficients", "backend"),
    *("timeout", "url", "device", "memory", "train_iters", "epochs", "train_samples", "config"),
    *("data_path", "train_data", "valid", "load", "init_from", "hf", "save", "tokenizer"),
)
"""Parts of the names of options that reach outside of the run, or that the lines set themselves."""
VALUES = (
    *("-1", "0", "1", "2", "3", "7", "1.0", "2.5", "-0.5", "1e-30", "1e30", "1e400", "nan", "inf"),
    *("", "abc", "true", "null", "none", "[1]", "{}", '{"rope_type": 7}', "\u0662", "1_0", "0x10"),
    *("100000", "4 4", "1,2", "-", "--", "=", "1 ", "../x", "\ud83d", "\x00"),
)

FITTING: Mapping[type, Sequence[str]] = MappingProxyType(
    {
        int: ("-1", "0", "1", "2", "3", "5", "8", "16", "100000"),
        float: ("-1", "0", "1e-9", "0.1", "0.5", "1", "1.5", "1e9", "1e300", "5e-324"),
    }
)
"""Values of the kind of an option's default."""


class Liner:
    """Tries lines, each as a dry run and as a run of its processes."""

    def __init__(self, launcher: Launcher, shop: Workshop, scratch: Path, seed: int) -> None:
        self._launcher = launcher
        self._shop = shop
        self._folder = scratch
        self._seed = seed
        self._names = sorted(
            name for name in options_of(SECTIONS) if not any(outside in name for outside in OUTSIDE)
        )
        self._drawn: list[Case] = []

    def result(self, number: int) -> Result:
        """The verdict on a line."""
        begin = time.monotonic()
        words, processes = self.line(number)
        folder = emptied(self._folder)
        self._write_data(folder)
        dry = ("--dry-run=yes", f"--world-size={processes}")
        planned = run_forked(valueless(*words, *dry), folder, Limits(60.0, 8 * GIB))
        warm(planned)
        verdict, details = self._tried(words, processes, planned, folder)
        line = json.dumps([str(word) for word in words]) + f" on {processes}"
        seconds = round(time.monotonic() - begin, 3)
        return Result(PART, words[0], number, line, verdict, details, seconds, planned.bytes)

    def line(self, number: int) -> tuple[list[str], int]:
        """The command of a case, always the same for a seed, and its processes."""
        chance = random.Random(f"{self._seed}/options/{number}")
        while len(self._drawn) <= number:
            cases = draw(self._seed + len(self._drawn), 64)
            self._drawn += [case for case in cases if case.world_size <= MOST_PROCESSES]
        case = self._drawn[number]
        # Whole numbers with which a small run ends in seconds.
        own = dict.fromkeys(("vocab_size", "lr_decay_iters", "data_format"))
        sized = {**case.options, **own, "train_iters": STEPS, "save": "out", "save_interval": 1}
        line = command_words({name: _word(value) for name, value in sized.items()})
        if case.sft:
            line = ["sft", *line, "--train-data", "data.jsonl", "--chat-template", "chat.jinja"]
        else:
            dataset = self._shop.make("dataset")[0] / "d"
            line = ["pretrain", *line, "--data-path", str(dataset)]
        line += ["--tokenizer-model", str(self._shop.make("dataset")[0].parent / "tokenizer")]
        for _ in range(chance.choice((0, 1, 1, 2))):
            line += self._mutation(chance)
        return line, case.world_size

    def _mutation(self, chance: random.Random) -> list[str]:
        field = chance.choice(self._names)
        name = "--" + field.replace("_", "-")
        default = options_of(SECTIONS)[field].default
        if isinstance(default, bool):
            return [name]
        fitting = FITTING.get(type(default), VALUES)
        value = chance.choice(fitting if chance.random() < 0.7 else VALUES)
        form = chance.randrange(10)
        if form == 0:
            return [name]
        if form == 1:
            return [name[:-1], value]
        if form == 2:
            return [f"{name}={value}"]
        if form == 3:
            return [name, *value.split(), value]
        return [name, *value.split()] if value.split() else [name, value]

    def _write_data(self, folder: Path) -> None:
        for name, start in (("data.jsonl", 0), ("valid.jsonl", 40)):
            write_records(folder / name, _short_records(40, start))
        (folder / "chat.jinja").write_text(CHAT)

    def _tried(
        self, words: list[str], processes: int, planned: Outcome, folder: Path
    ) -> tuple[Verdict, str]:
        if planned.end != "done" and planned.end != "refused":
            return planned.end, f"dry run: {planned.last_line[-300:]}"
        try:
            run = self._launcher.start(words, processes, cwd=folder)
        except (ValueError, UnicodeError) as error:  # no process can be given such a word
            return "refused", str(error)
        try:
            ran = run.wait(timeout=PATIENCE)
        except AssertionError as error:
            if "still run after" in str(error) and planned.end == "done":
                return "equal", "taken by both; the run had not ended yet"
            return "silent", f"run and dry run do not agree: {str(error)[-500:]}"
        return agreement(planned, ran)


def agreement(planned: Outcome, ran: Finished) -> tuple[Verdict, str]:
    """The verdict on a dry run and its run."""
    if "Traceback (most recent call last)" in ran.err:
        return "traceback", ran.err.strip().splitlines()[-1][-300:]
    began = " iteration " in ran.out
    errors = [line for line in ran.err.splitlines() if line.startswith("error")]
    if set(ran.codes) == {0}:
        if planned.end == "done":
            return "equal", "taken by both"
        return "silent", f"the run takes what the dry run refuses: {planned.last_line[-300:]}"
    if planned.end == "refused" and not began:
        return "refused", planned.last_line[-300:]
    said = first_line(errors[0]) if errors else ran.err[-300:]
    if began and errors:  # what only the steps can show, such as a loss that is not finite
        return "refused", f"in the run: {said}"
    if errors and any(re.search(pattern, said) for pattern in UNKNOWABLE):
        return "refused", f"only the run can know: {said}"
    return "silent", f"the dry run takes what the run refuses: {said}"


def _short_records(count: int, start: int) -> list[dict[str, object]]:
    """Conversations that fit into the shortest samples that are drawn."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"say {number}"},
                {"role": "assistant", "content": f"{number}"},
            ]
        }
        for number in range(start, start + count)
    ]


def _word(value: object) -> object:
    """A value as the command line has it."""
    if isinstance(value, dict):
        return json.dumps(value)
    if value is False:
        return None
    return tuple(value) if isinstance(value, list) else value


def try_lines(
    count: int, shop: Workshop, journal: Journal, seed: int, deadline: float
) -> Iterator[Result | str]:
    """Yield the lines that the journal lacks."""
    output = shop.root.parent
    done = {number for part, _, number in journal.results if part == PART}
    missing = [number for number in range(count) if number not in done]
    if not missing:
        return
    with Launcher(emptied(output / "launched-lines")) as launcher:
        liner = Liner(launcher, shop, output / "scratch-lines", seed)
        for number in missing:
            if time.monotonic() > deadline:
                return
            result = liner.result(number)
            journal.add(result)
            yield result
