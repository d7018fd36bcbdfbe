"""What a run refuses before its first step, a strict dry run refuses in the same words.

Every refusal that a test provokes is tried twice: those of this process (``conftest.py`` puts ``rehearsing`` around ``cli.run``), and those
of a ``Launcher``'s runs. A test has nothing to do for it, so none can forget it.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stdout
from pathlib import Path
from types import MappingProxyType

from megatron_llama import cli
from megatron_llama.errors import UserError

TRAINING = ("pretrain", "sft", "align")
UNKNOWABLE: Mapping[str, str] = MappingProxyType(
    {
        r"^(validation )?loss at iteration \d+: got (nan|inf)": "a loss takes the model's forward pass on the devices of the run",
        r"^--init-from-hf: got \d snapshots": "one process does not see what the hub has told another machine",
        r"^\S+ is damaged, or its files stand for each other:": "files of weights are compared while a run trains",
        r"^--save \S+: got a run that writes there": "a folder is in use for a moment only, and a dry run may be of the time behind it",
        r"^--init-from-hf org/": "the hub's client reads HF_ENDPOINT once in a process, here before the test has said which server it is",
    }
)
"""What a dry run cannot know, by a pattern of the message's first line, and why."""
Run = Callable[[list[str]], int]


class RehearsalError(AssertionError):
    """A run and its dry run do not agree."""


def first_line(message: str) -> str:
    """The first line of an error, without what only a run of several processes says: which of its ranks failed."""
    line = re.sub(r"^(error( on rank \d+)?: )?(rank \d+: )?", "", message.splitlines()[0])
    line = re.sub(r" \(\d+ of \d+ ranks failed\)$", "", line)
    return re.sub(r"got \S+ \S+ free", "got less free", line)  # memory is free for a moment


def rehearsing(run: Run) -> Run:
    """``cli.run``, whose refusals are tried again; of the ranks of a launcher, those of the first."""

    def tried(words: list[str]) -> int:
        given = list(words)
        try:
            return run(words)
        except UserError as error:
            if os.environ.get("RANK", "0") == "0":
                rehearse(given, int(os.environ.get("WORLD_SIZE", "1")), str(error), run=run)
            raise

    return tried


def rehearse(words: Sequence[str], processes: int, refused: str, *, run: Run = cli.run) -> None:
    """Try a command line that a run has refused, with --dry-run=strict. Raises RehearsalError unless it is refused in the same words."""
    said = first_line(refused)
    if not words or words[0] not in TRAINING or any(re.match(r"--dry[-_]run", word) for word in words):
        return
    if any(re.search(pattern, said) for pattern in UNKNOWABLE):
        return
    printed = io.StringIO()
    found = ""
    try:
        with redirect_stdout(printed):
            run([*words, "--dry-run=strict", f"--world-size={processes}"])
    except UserError as error:
        found = first_line(str(error))
    if found != said:
        raise RehearsalError(f"the run: {said}\nthe dry run: {found or printed.getvalue()[-200:]}\n{' '.join(words)}")


@contextmanager
def place(environ: Mapping[str, str], folder: Path) -> Iterator[None]:
    """A section in which this process has another environment and working folder."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    try:
        with chdir(folder):
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
