"""The product as its users start it: processes of ``python -m megatron_llama ...``, without paying for the imports every time.

A server imports torch and the package once. Every process is a fork of it with an environment, a working folder, files for
its output and an exit status of its own, which runs ``megatron_llama.__main__``, or a program of a test.
``Launcher.start`` returns at once; what a run does is seen in its files, and its signals are real.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Self

from tests.plant import ERROR_KEYS, plant_what_is_ordered
from tests.unsynced import leave_writes_to_the_system

ROOT = Path(__file__).parent.parent
TIMEOUT = 300.0
"""Seconds after which a run is killed and its test fails: it hangs. Runs take one or two, more where others use the machine."""
POLL = 0.001
COMMANDS = (
    *("megatron_llama.checkpoint.model_folders.hf.reader", "megatron_llama.data.preprocess", "megatron_llama.data.tokenizer.load"),
    *("megatron_llama.launch.watch", "megatron_llama.model.generate", "megatron_llama.train.api.common.trained"),
    *("megatron_llama.train.api.train", "megatron_llama.train.commands.export", "megatron_llama.train.commands.pretrain"),
    *("megatron_llama.train.run.build", "megatron_llama.train.setup.auto", "megatron_llama.train.setup.vocabulary"),
    *("megatron_llama.tune.commands.sft", "sentencepiece", "tokenizers"),
)
"""What commands import when they run."""
TORCH = ("torch.distributed.checkpoint", "torch.distributed.fsdp", "yaml", "tokenizers", "sentencepiece")
"""What takes long and is not the package: a process that has imported only this is one in which nothing of the package is loaded."""
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID")


@dataclass(frozen=True)
class Job:
    """One process to start."""

    argv: Sequence[str]
    environ: Mapping[str, str]
    cwd: str
    out: str
    err: str
    file_bytes: int | None
    module: str = "megatron_llama"
    """What runs, as by ``python -m``."""
    code: str | None = None
    """What runs in place of the module, as by ``python -c``."""


@dataclass(frozen=True)
class Finished:
    """What a run left."""

    codes: tuple[int, ...]
    """Exit status by rank; -9 for a process that SIGKILL ended."""
    outs: tuple[str, ...]
    errs: tuple[str, ...]

    @property
    def out(self) -> str:
        """What rank 0 printed."""
        return self.outs[0]

    @property
    def err(self) -> str:
        """All complaints."""
        return "".join(self.errs)

    def ok(self, code: int = 0) -> Self:
        """Itself, after making sure that every rank ended with this status and complained about nothing."""
        assert set(self.codes) == {code} and self.err == "", f"exit {self.codes}\n{self.out}\n{self.err}"
        return self


class Run:
    """Processes that were started together."""

    def __init__(self, server: Launcher, pids: Sequence[int], jobs: Sequence[Job]) -> None:
        self._server, self.pids, self._jobs = server, tuple(pids), tuple(jobs)

    def signal(self, number: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to some ranks (default: all) that still run."""
        self._server.poll()
        for rank in range(len(self.pids)) if ranks is None else ranks:
            if self.pids[rank] not in self._server.ended:
                os.kill(self.pids[rank], number)

    def until(self, condition: Callable[[], bool], timeout: float = TIMEOUT) -> None:
        """Wait until something can be seen. Fails if the run ends without it, or in time does not show it."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self.over() and not condition():
                raise AssertionError(f"ended before it happened: {self._finished()}")
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                raise AssertionError(f"did not happen in {timeout} s: {self.wait()}")
            time.sleep(POLL)

    def over(self) -> bool:
        """Whether every process has ended."""
        self._server.poll()
        return all(pid in self._server.ended for pid in self.pids)

    def wait(self, timeout: float = TIMEOUT) -> Finished:
        """Wait for every process. Fails, and kills them, if that takes too long."""
        deadline = time.monotonic() + timeout
        while not self.over():
            left = deadline - time.monotonic()
            if left <= 0:
                running = [rank for rank, pid in enumerate(self.pids) if pid not in self._server.ended]
                self.signal(signal.SIGKILL)
                raise AssertionError(f"ranks {running} still run after {timeout} s: {self.wait()}")
            self._server.poll(left)
        ended = self._finished()
        self._rehearse(ended)
        return ended

    def _rehearse(self, ended: Finished) -> None:
        """Try again as a dry run what every rank has refused before its first step."""
        job = self._jobs[0]
        errors = [line for line in ended.err.splitlines() if line.startswith("error")]
        refused = set(ended.codes) in ({1}, {2}) and " iteration " not in ended.out
        # A disk that fills up is none that was full when the run began.
        if refused and errors and job.file_bytes is None and job.code is None:
            from tests.refusals import place, rehearse  # the server, which is this file too, does without

            with place(job.environ, Path(job.cwd)):
                rehearse(job.argv, len(self._jobs), errors[0])

    def text(self, rank: int = 0) -> str:
        """What a rank has printed so far."""
        return Path(self._jobs[rank].out).read_text()

    def _finished(self) -> Finished:
        codes = tuple(self._server.ended[pid] for pid in self.pids)
        return Finished(codes, tuple(Path(j.out).read_text() for j in self._jobs), tuple(Path(j.err).read_text() for j in self._jobs))


@dataclass
class Launcher:
    """Starts runs. Use it as a context manager; leaving it kills what still runs. ``folder``: for outputs. ``preload``: the modules that
    processes find imported."""

    folder: Path
    preload: Sequence[str] = COMMANDS
    ended: dict[int, int] = field(default_factory=dict)
    """Exit status by process id, of the last process that had it."""
    _runs: int = 0
    _received: bytes = b""

    def __enter__(self) -> Self:
        environ = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
        # What runs keep in their user's folder is this launcher's own.
        environ |= {"OMP_NUM_THREADS": "1", "HOME": str(self.folder / "home")}
        command = [sys.executable, "-m", "tests.launcher", *self.preload]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environ, bufsize=0)
        self._environ = environ
        return self

    def __exit__(self, *error: object) -> None:
        self._pipe(self._server.stdin).close()
        self._server.wait()

    def start(
        self,
        argv: Sequence[object],
        processes: int = 1,
        *,
        environ: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        place: Callable[[int], Mapping[str, str]] | None = None,
        file_bytes: Mapping[int, int] | None = None,
        module: str = "megatron_llama",
        code: str | None = None,
    ) -> Run:
        """Start ``processes`` ranks of one command. ``place``: what the launcher of a rank says in its environment, by default
        torchrun if there is more than one. ``file_bytes``: by rank, the largest file that it can write: a disk that fills up.
        ``module``, ``code``: what runs in place of the command line."""
        self._runs += 1
        place = place or (torchrun(processes, free_port()) if processes > 1 else lambda rank: {})
        jobs = [
            Job(
                [str(word) for word in argv],
                {**self._environ, **place(rank), **(environ or {})},
                str(cwd),
                str(self.folder / f"{self._runs}.{rank}.out"),
                str(self.folder / f"{self._runs}.{rank}.err"),
                (file_bytes or {}).get(rank),
                module,
                code,
            )
            for rank in range(processes)
        ]
        for job in jobs:
            for path in (job.out, job.err):
                Path(path).touch()
        self._pipe(self._server.stdin).write(json.dumps([asdict(job) for job in jobs]).encode() + b"\n")
        while True:
            for message in self._messages(timeout=None):
                if "started" in message:
                    return Run(self, message["started"], jobs)

    def run(self, argv: Sequence[object], processes: int = 1, *, timeout: float = TIMEOUT, **options: Any) -> Finished:
        """``start`` and ``wait``."""
        return self.start(argv, processes, **options).wait(timeout)

    def poll(self, timeout: float = 0.0) -> None:
        """Learn which processes have ended, waiting for one at most ``timeout`` seconds."""
        self._messages(timeout)

    def _messages(self, timeout: float | None) -> list[dict[str, Any]]:
        """What the server said; notes the processes that have ended."""
        out = self._pipe(self._server.stdout)
        if select.select([out], [], [], timeout)[0]:
            received = os.read(out.fileno(), 1 << 16)
            assert received, "the server of the launcher died"
            self._received += received
        *lines, self._received = self._received.split(b"\n")
        messages = [json.loads(line) for line in lines]
        for message in messages:  # in order: a process id is given again, 32768 processes later
            for pid in message.get("started", ()):
                self.ended.pop(pid, None)
            if "ended" in message:
                self.ended[message["ended"]] = message["code"]
        return messages

    @staticmethod
    def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
        assert stream is not None
        return stream


def torchrun(processes: int, port: int) -> Callable[[int], dict[str, str]]:
    """The environment that torchrun gives to a rank."""
    common = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return lambda rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def quiet_port() -> int:
    """A TCP port that nobody listens on, below those that the kernel gives to connections: nobody takes it before it is used."""
    for port in random.sample(range(20001, 32000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no port from 20001 to 31999 is free")


def serve() -> Job | None:
    """The server: a line of jobs in, a line of process ids out, and a line for everyone who ends. Returns a Job in every fork,
    None in the server itself when its input ends."""
    children: set[int] = set()
    waking, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        ready, _, _ = select.select([0, waking], [], [])
        if waking in ready:
            os.read(waking, 4096)
            while children and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                children.discard(ended[0])
                print(json.dumps({"ended": ended[0], "code": os.waitstatus_to_exitcode(ended[1])}), flush=True)
        if 0 in ready:
            line = sys.stdin.buffer.raw.readline()  # type: ignore[attr-defined]  # unbuffered, so that select sees what is left
            if not line:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                return None
            started = []
            for job in (Job(**values) for values in json.loads(line)):
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.close(waking)
                    os.close(woken)
                    return job
                started.append(pid)
            children.update(started)
            print(json.dumps({"started": started}), flush=True)


def become(job: Job) -> None:
    """Be the process that the job describes."""
    for stream, path in ((0, os.devnull), (1, job.out), (2, job.err)):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC if stream else os.O_RDONLY)
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ.update(job.environ)
    os.chdir(job.cwd)
    if job.file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job.file_bytes, job.file_bytes))
    sys.argv = [job.module if job.code is None else "-c", *job.argv]
    try:
        if job.code is None:
            runpy.run_module(job.module, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, job.cwd)
            exec(job.code, {"__name__": "__main__"})
    except SystemExit as end:
        if end.code == 0:  # what is left is the interpreter taking torch apart, 0.2 s; a failure may hang there, so that is tried
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(0)
        raise


if __name__ == "__main__":
    for name in sys.argv[1:]:
        import_module(name)
    plant_what_is_ordered()
    leave_writes_to_the_system()
    if ERROR_KEYS in os.environ:
        from tests.recorded import record_if_asked  # with the package, of which a fresh process has nothing

        record_if_asked()
    gc.freeze()  # a fork's interpreter ends three times faster when it need not visit what the server imported
    job = serve()
    if job is not None:
        become(job)
