"""One task in a forked child: its end, its words, its values, its time and its memory.

The parent has torch and the commands imported, so a fork costs milliseconds where a new process
costs seconds. The parent must have no threads: it trains nothing and loads nothing itself.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from megatron_llama.errors import UserError

End = Literal["done", "refused", "traceback", "memory", "time"]
Task = Callable[[], Mapping[str, str]]
"""What a child does. It returns values to compare, and raises what the program raises."""

GIB = 2**30
CEILING = 6 * GIB
"""Address space that a child may take beyond the parent's. It keeps the machine alive; what counts
is the resident memory, which is measured."""
PATIENCE = 6
"""A child is ended after so many times the limit, since others may use the processors. Processor
time above the limit itself, or no end at all, is too long."""
IDLE = 5.0
"""Seconds without any processor time after which a child is taken to wait for ever."""
TRACEBACK = "Traceback (most recent call last)"
_OUT_OF_MEMORY = ("can't allocate memory", "bad_alloc", "Cannot allocate memory", "MemoryError")


@dataclass(frozen=True)
class Limits:
    """What a task may take."""

    seconds: float
    """Of a processor."""
    bytes: int
    """Resident memory, beyond that of the parent."""


@dataclass(frozen=True)
class Outcome:
    """What became of a task."""

    end: End
    words: str
    """Everything that it printed, with the traceback if there is one."""
    values: Mapping[str, str]
    seconds: float
    """By the clock."""
    bytes: int
    """The largest resident memory, beyond that of the parent; 0 if the child was ended."""
    modules: tuple[str, ...] = ()
    """The modules that the child had imported when it ended."""

    @property
    def last_line(self) -> str:
        """The last line that says something."""
        lines = [line.strip() for line in self.words.splitlines() if line.strip()]
        return lines[-1] if lines else ""


class RefusedError(UserError):
    """A command has ended with an exit status of its own, and has printed why."""


def command(*words: object) -> None:
    """Run a command of the program in this process. Raises RefusedError when it says no."""
    from megatron_llama.cli import main

    status = main([str(word) for word in words])
    if status != 0:
        raise RefusedError(f"exit status {status}")


def valueless(*words: object) -> Task:
    """A task that runs a command and compares nothing."""

    def task() -> Mapping[str, str]:
        command(*words)
        return {}

    return task


def warm(outcome: Outcome) -> None:
    """Import here what a child had to import, so that later children find it."""
    for name in outcome.modules:
        if name not in sys.modules and name.startswith(("megatron_llama.", "torch.", "numpy.")):
            try:
                import_module(name)
            except Exception:  # a module that only its package can import
                continue


def run_forked(task: Task, folder: Path, limits: Limits) -> Outcome:
    """Run a task in a child whose working folder is ``folder``, in a session of its own, and end
    everything that it leaves behind."""
    said, result = folder / "said.txt", folder / "result.json"
    sys.stdout.flush()
    sys.stderr.flush()
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_child(task, folder, said, result)
    status, used = _await(child, limits.seconds)
    seconds = time.monotonic() - begin
    words = said.read_text(errors="replace") if said.exists() else ""
    if status is None:
        return Outcome("time", words, {}, seconds, 0)
    if not result.exists():
        died = f"{words}\nthe process died with status {os.waitstatus_to_exitcode(status)}"
        memory = any(sign in words for sign in _OUT_OF_MEMORY)
        return Outcome("memory" if memory else "traceback", died, {}, seconds, 0)
    content = json.loads(result.read_text())
    end: End = content["end"]
    if content["bytes"] > limits.bytes:
        end = "memory"
    elif used > limits.seconds:
        end = "time"
    modules = tuple(content["modules"])
    return Outcome(end, words, content["values"], seconds, content["bytes"], modules)


def _be_child(task: Task, folder: Path, said: Path, result: Path) -> None:
    """Run the task and leave, whatever happens."""
    end: End = "done"
    values: Mapping[str, str] = {}
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        before = _status("VmRSS")
        ceiling = _status("VmSize") + CEILING
        resource.setrlimit(resource.RLIMIT_AS, (ceiling, ceiling))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        # The parent's may lead elsewhere, as they do under pytest.
        sys.stdout = open(1, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
        os.chdir(folder)
        try:
            values = task()
        except UserError:
            end = "refused"
        except SystemExit as leaving:
            end = "done" if leaving.code in (0, None) else "refused"
        except BaseException as error:
            traceback.print_exc()
            memory = isinstance(error, MemoryError) or any(s in str(error) for s in _OUT_OF_MEMORY)
            end = "memory" if memory else "traceback"
        sys.stdout.flush()
        sys.stderr.flush()
        if end == "refused" and "Traceback (most recent call last)" in said.read_text(
            "utf8", "replace"
        ):
            end = "traceback"
        grown = max(0, _status("VmHWM") - before)
        content: dict[str, Any] = {
            "end": end,
            "values": dict(values),
            "bytes": grown,
            "modules": sorted(sys.modules),
        }
        partial = result.with_suffix(".partial")
        partial.write_text(json.dumps(content))
        partial.rename(result)
    finally:
        os._exit(0)


def _await(child: int, allowed: float) -> tuple[int | None, float]:
    """Wait for a child and return its status, None if it had to be ended, and the processor time
    of it and of its children."""
    pause = 0.001
    begin = worked = time.monotonic()
    ticks = -1
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            _end_session(child)
            return status, usage.ru_utime + usage.ru_stime
        now = time.monotonic()
        if pause > 0.01:
            used = _processor_ticks(child)
            if used != ticks:
                ticks, worked = used, now
        spent = ticks / os.sysconf("SC_CLK_TCK")
        if spent > allowed * 1.2 or now - begin > allowed * PATIENCE or now - worked > IDLE:
            _end_session(child)
            _, _, usage = os.wait4(child, 0)
            return None, usage.ru_utime + usage.ru_stime
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)


def _processor_ticks(child: int) -> int:
    """Processor time of a process and of its children, as the kernel counts it."""
    try:
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it ends in this moment
        return -1
    return sum(map(int, fields[11:15]))


def _end_session(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _status(name: str) -> int:
    """A number of bytes of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)
