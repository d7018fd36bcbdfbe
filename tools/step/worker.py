"""A contender in a process of its own: its allocator, its threads and its peak of memory are its
own."""

from __future__ import annotations

import gc
import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import cast

from megatron_llama.config.schema import Config
from tools.step.contenders import Entry

BUILT = 0
"""Instead of a number of steps: only an answer, as soon as there can be one."""


@dataclass(frozen=True)
class Task:
    """What a process is to do."""

    entry: Entry
    config: Config
    threads: int
    """0: torch's choice."""
    world_size: int


@dataclass(frozen=True)
class Sample:
    """Some consecutive steps."""

    seconds: float
    """Of one step, on average."""
    processor_seconds: float
    """The same, of all threads of the process together."""
    losses: tuple[float, ...]
    """Of each step."""
    peak_memory_bytes: int
    """So far; 0: unknown."""


class Failed(Exception):
    """A contender's process ended with an error; its last line is the message."""


class TooSlow(Exception):
    """A contender did not end its steps in time."""


class Worker:
    """A process that holds one contender."""

    def __init__(self, task: Task) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(task, theirs), daemon=True)
        self._process.start()
        self._built = False
        theirs.close()

    def wait_built(self) -> None:
        """Wait until the contender is built: its steps are timed from then on. Raises Failed."""
        if not self._built:
            self._built = True
            self._ask(BUILT, None)

    def steps(self, count: int, patience: float | None = None) -> Sample:
        """Train so many steps. Raises Failed, or TooSlow if they take longer than ``patience``
        seconds."""
        answer = self._ask(count, patience)
        assert answer is not None
        return answer

    def _ask(self, count: int, patience: float | None) -> Sample | None:
        try:
            self._pipe.send(count)
            if not self._pipe.poll(patience):
                raise TooSlow(f"a step takes more than {patience:g} s without bf16 instructions")
            answer = self._pipe.recv()
        except (EOFError, BrokenPipeError):
            self._process.join()
            raise Failed(f"the process ended with {self._process.exitcode}") from None
        if isinstance(answer, str):
            raise Failed(answer)
        return cast(Sample | None, answer)

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()

    def kill(self) -> None:
        """End the process in the middle of a step."""
        self._process.kill()
        self.close()


def _serve(task: Task, pipe: Connection) -> None:
    import torch

    if task.threads:
        torch.set_num_threads(task.threads)
    try:
        measure = _measure(task)
        while True:
            count = pipe.recv()
            pipe.send(None if count == BUILT else measure(count))
    except EOFError:
        return
    except Exception as error:
        traceback.print_exc()
        pipe.send(
            f"{type(error).__name__}: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
        )


def _measure(task: Task) -> Callable[[int], Sample]:
    """Build the contender, and how to time steps of it."""
    import torch
    import torch.distributed as dist

    from megatron_llama.engine.comm import device as devices
    from megatron_llama.launch.launcher import fix_sums
    from tools.step.contenders import build

    fixed = task.config.training.deterministic_mode
    if fixed:
        fix_sums()
    device = devices.accelerator(0)
    devices.open_backward(device)
    devices.reset_peak_memory(device)
    if task.world_size > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        # Messages go nowhere: the state is that of one rank, and nothing is waited for.
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=task.world_size)
    contender = build(task.entry, task.config, task.world_size)
    gc.collect()
    gc.freeze()  # as train() does, and a good setting for everybody

    def measure(count: int) -> Sample:
        devices.synchronize(device)
        begin = time.perf_counter()
        used = time.process_time()
        with devices.deterministic(wanted=fixed):
            losses = [contender.step() for _ in range(count)]
        devices.synchronize(device)
        seconds = (time.perf_counter() - begin) / count
        processor = (time.process_time() - used) / count
        return Sample(
            seconds,
            processor,
            tuple(map(float, torch.stack(losses).tolist())),
            devices.peak_memory_bytes(device) or 0,
        )

    return measure
