"""``events.jsonl``: the events of a run, beside its curve.

``log.jsonl`` is one consistent curve, in which repeated steps stand once. This file is the other
half of the truth, for ``report``: every start with its configuration, every return to a checkpoint,
every save, and the end of each process. Lines are appended and never taken back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from megatron_llama.config.lines import bounded_lines, parse_json
from megatron_llama.errors import CheckpointError

FILE_NAME = "events.jsonl"
START = "start"
"""A process began to train. The line has the facts of ``train/setup/facts.py``."""
REWIND = "rewind"
"""The run went back to ``iteration``, when its log had come to ``reached``."""
SAVED = "saved"
"""The checkpoint ``path`` is complete."""
NOT_FINITE = "not finite"
"""The save of ``path`` has found values that are infinite or NaN: ``words`` has the tensors,
``kept`` says whether the checkpoint is there."""
FAULT = "fault"
"""The watch's ``words`` about ranks that hang or are gone, or about lines that a tracker has not
taken."""
END = "end"
"""The process ended: for a ``reason`` at ``iteration``, or with an ``error``. If the line is
missing, the process was killed."""


def tracked_runs(folder: Path) -> dict[str, str]:
    """Return the trackers' runs of the run in a folder, by tracker: those of its last fresh start
    and of later resumes. Unreadable lines are left out."""
    runs: dict[str, str] = {}
    try:
        file = (folder / FILE_NAME).open("rb")
    except OSError:
        return runs
    with file:
        for entry in _starts(file):
            if not entry.get("iteration"):
                runs = {}
            named = entry.get("trackers")
            items = named.items() if isinstance(named, dict) else ()
            runs |= {name: run for name, run in items if isinstance(run, str)}
    return runs


def _starts(file: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the lines of starts that can be read."""
    for line in bounded_lines(file):
        try:
            entry = parse_json(line or b"")
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("event") == START:
            yield entry


class EventFile:
    """Appends lines to the file of a run. Any thread may call it: each line is one write."""

    def __init__(self, folder: str | Path) -> None:
        """``folder`` has to exist when the first line is written."""
        self.path = Path(folder) / FILE_NAME

    def append(self, what: str, **details: Any) -> None:
        """Write one line, with the time of day. Raises CheckpointError."""
        now = datetime.now().isoformat(timespec="seconds")
        line = json.dumps({"event": what, "time": now, **details}) + "\n"
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            do = "free space or mend the permissions, and resume with --load"
            raise CheckpointError(
                self.path, got=error.strerror, expected="to append a line", do=do
            ) from error

    def tell(self, what: str, **details: Any) -> None:
        """As ``append``, for lines about a failure: a line that cannot be written is lost."""
        with suppress(CheckpointError):
            self.append(what, **details)
