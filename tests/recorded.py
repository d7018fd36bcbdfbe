"""Notes where the package makes the sentences of its errors, so that tests can ask for their keys.

A sentence is text when it is caught, and its place is gone. So ``errors.describe``, ``errors.listing`` and ``UserError`` are watched: in the
process of a session always (``conftest.py``), and with ``--error-keys FILE`` also in workers of a pool and in what ``tests/launcher.py``
starts, which append to that file what they make. A process that a test starts in another way is not watched.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, wraps
from itertools import islice
from multiprocessing import parent_process
from types import FrameType
from typing import Any

from megatron_llama import errors
from tools.errors_docs.expressions import PACKAGE
from tools.errors_docs.match import Made

from tests.plant import ERROR_KEYS

MOST_CALLS = 4
"""Calls of the package around a sentence that are kept. The one that gives the words is among them."""
MOST_SENTENCES = 20_000
"""Sentences that a process keeps: those that were made last."""


@dataclass
class Recorder:
    """What this process has made."""

    file: str | None
    made: dict[str, Made] = field(default_factory=dict)
    _written: set[tuple[Any, ...]] = field(default_factory=set)
    _waiting: str = ""

    def note(self, kind: str, text: str, frame: FrameType | None) -> None:
        """Keep a text with the calls of the package that led to it."""
        calls = tuple(islice(_calls(frame), MOST_CALLS))
        self.made.pop(text, None)
        self.made[text] = made = Made(kind, text, calls, _test())
        if len(self.made) > MOST_SENTENCES:
            self.made.pop(next(iter(self.made)))
        if self.file is not None and (kind, calls, made.test) not in self._written:
            self._written.add((kind, calls, made.test))
            self._waiting += json.dumps(made) + "\n"
        # A test may have filled the disk of this process.
        if self.file is not None and resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY:
            with open(self.file, "a") as lines:  # whole lines, whoever else appends
                lines.write(self._waiting)
            self._waiting = ""


def _test() -> str:
    """The test that runs. A worker of a pool does not know: its environment is of the time when the pool began."""
    return "" if parent_process() is not None else os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]


def _calls(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    """Yield file and line of the calls of the package, the innermost first."""
    root = f"{PACKAGE}{os.sep}"
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(root) and path != errors.__file__:
            yield path.removeprefix(root), frame.f_lineno
        frame = frame.f_back


@cache  # a fork has what its parent has
def recorder() -> Recorder:
    """Watch the package for as long as this process lives."""
    watching = Recorder(os.environ.get(ERROR_KEYS))
    describe, listing, construct = errors.describe, errors.listing, errors.UserError.__init__

    @wraps(describe)
    def described(*args: Any, **options: Any) -> str:
        text = describe(*args, **options)
        watching.note("sentence", text, sys._getframe(1))
        return text

    @wraps(listing)
    def listed(title: str, problems: Iterable[str]) -> str:
        watching.note("title", title, sys._getframe(1))
        return listing(title, problems)

    @wraps(construct)
    def constructed(self: errors.UserError, where: object, **options: Any) -> None:
        if not options and str(where).splitlines()[0] not in watching.made:
            watching.note("title", str(where), sys._getframe(1))
        construct(self, where, **options)

    _replace("describe", describe, described)
    _replace("listing", listing, listed)
    setattr(errors.UserError, "__init__", constructed)  # noqa: B010  # which mypy does not let one assign
    return watching


def _replace(name: str, original: object, watched: object) -> None:
    """Put a function in the place of another one, in all modules that have imported it."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("megatron_llama") and vars(module).get(name) is original:
            setattr(module, name, watched)


def record_if_asked() -> None:
    """Watch the package if this session wants to know what all its processes make."""
    if ERROR_KEYS in os.environ:
        recorder()
