"""Real processes: running, stopped, ended, and others of the same number."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from megatron_llama.engine.comm.recorder import Recorder
from megatron_llama.launch import processes
from megatron_llama.launch.launcher import Place, launching_processes
from megatron_llama.launch.orphan import following_launcher
from megatron_llama.launch.processes import STOPPED, TRACED, UNKNOWN, Process, parent_of, process_of, program_of
from megatron_llama.launch.watch import Diagnosis, Watch


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield started
    started.kill()
    started.wait()


def named(child: subprocess.Popen[bytes]) -> Process:
    process = process_of(child.pid)
    assert process is not None
    return process


def stop(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)


def test_a_process_is_its_number_and_its_start(child: subprocess.Popen[bytes]) -> None:
    process = named(child)
    assert process.visible and process.state and parent_of(child.pid) == os.getpid()
    later = replace(process, start=process.start + 1)
    assert not replace(process, pid=2**80).state
    assert not later.state and not later.kill() and child.poll() is None, "another process of that number is not touched"
    stop(child)
    assert process.state == STOPPED
    assert process.kill() and child.wait() == -signal.SIGKILL
    assert not process.state and not process.kill()


def test_one_whose_status_nobody_has_asked_for_has_ended(child: subprocess.Popen[bytes]) -> None:
    process = named(child)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{child.pid}").exists() and not process.state


@pytest.mark.parametrize("field", ["boot", "namespace"])
def test_a_process_of_another_machine_or_container_is_not_looked_up(field: str, child: subprocess.Popen[bytes]) -> None:
    elsewhere = replace(named(child), **{field: "another"})
    assert not elsewhere.visible and not elsewhere.kill() and child.poll() is None
    assert not replace(elsewhere, boot="", namespace="").visible


def test_a_process_without_a_launcher_depends_on_none() -> None:
    """Nor does what a rank starts by itself, which may have a part of the rank's variables."""
    assert launching_processes({}) == launching_processes({"TORCHELASTIC_RUN_ID": "one", "TORCHELASTIC_RESTART_COUNT": "0"}) == ()
    assert launching_processes({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}) == (), "its parent is no slurmstepd"


def test_a_program_whose_name_is_cut_inside_a_character(tmp_path: Path) -> None:
    """The kernel keeps 15 bytes of it: here the last is the first of two."""
    script = tmp_path / "entrainer_modeéle.sh"
    assert script.name.encode()[14] == "é".encode()[0]
    script.write_text("#!/bin/sh\necho ready\nread line\n")
    script.chmod(0o755)
    with subprocess.Popen([script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stdout.readline() == "ready\n"
        process = process_of(running.pid)
        assert process is not None and process.state and program_of(running.pid).startswith("entrainer_")
        running.communicate("\n")


def test_torchruns_parent_counts_and_so_do_scripts_between() -> None:
    """The script has the variables of its rank; the launcher, this process, has none of them."""
    rank = {"TORCHELASTIC_RUN_ID": "one", "TORCHELASTIC_RESTART_COUNT": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    code = "from megatron_llama.launch.launcher import launching_processes as found; print([one.pid for one in found()])"
    script = f"{sys.executable} -c '{code}' && echo $$"
    printed = subprocess.run(["/bin/sh", "-c", script], env={**os.environ, **rank}, capture_output=True, text=True, check=True).stdout
    chain, shell = printed.splitlines()
    assert chain == f"[{shell}, {os.getpid()}]"


@pytest.mark.parametrize(
    ("stuck", "stopped", "asked", "killed"),
    [
        (True, False, True, True),
        (True, False, False, False),
        (False, False, True, False),
        (False, True, True, True),
        (True, True, False, True),
    ],
    ids=["to blame", "could not answer", "merely slow", "stopped", "stopped, with the store"],
)
def test_who_does_not_answer_is_killed_when_the_run_ends_because_of_it(
    stuck: bool, stopped: bool, asked: bool, killed: bool, child: subprocess.Popen[bytes]
) -> None:
    watch = Watch(Place(0, 2, 0), Recorder())
    watch._siblings = {1: named(child)}
    if stopped:
        stop(child)
    watch.end_silent(Diagnosis("", (), stuck), asked=asked)
    assert named(child).state, "it has answered"
    watch.end_silent(Diagnosis("", (1,), stuck), asked=asked)
    if killed:
        assert child.wait() == -signal.SIGKILL
    assert killed or named(child).state


def test_one_that_a_debugger_holds_is_not_killed(child: subprocess.Popen[bytes]) -> None:
    attach, detach = 16, 17
    trace = ctypes.CDLL(None, use_errno=True).ptrace
    assert trace(attach, child.pid, None, None) == 0
    try:
        os.waitpid(child.pid, os.WUNTRACED)
        watch = Watch(Place(0, 2, 0), Recorder())
        watch._siblings = {1: named(child)}
        assert named(child).state == TRACED
        watch.end_silent(Diagnosis("", (1,), stuck=True))
        assert named(child).state == TRACED
    finally:
        trace(detach, child.pid, None, None)


def test_a_process_that_cannot_be_looked_at_has_not_ended(child: subprocess.Popen[bytes]) -> None:
    """A rank that has no file descriptor left must not think that its launcher is gone."""
    process = named(child)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        state, killed = process.state, process.kill()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (state, killed) == (UNKNOWN, False) and child.poll() is None


@pytest.mark.parametrize("own", [True, False], ids=["hides others", "is another container's"])
def test_a_proc_that_does_not_show_a_process(own: bool, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    process = named(child)
    number = str(os.getpid() + (not own))
    (tmp_path / "self").symlink_to(number)
    (tmp_path / number / "ns").mkdir(parents=True)
    (tmp_path / number / "ns" / "pid").symlink_to(process.namespace)
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text(process.boot)
    if not own:  # there it is the number of another process
        (tmp_path / str(child.pid)).mkdir()
        shutil.copy(f"/proc/{child.pid}/stat", tmp_path / str(child.pid) / "stat")
    monkeypatch.setattr(processes, "PROC", tmp_path)
    assert not process.visible and not process.kill() and process_of(child.pid) is None
    assert not own or process.state == UNKNOWN
    monkeypatch.undo()
    assert process.visible and child.poll() is None


def test_nothing_follows_a_launcher_behind_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may fork then, and a fork copies no thread."""
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    following = [thread.name for thread in threading.enumerate()].count("launcher")
    with following_launcher(lambda why: None):
        assert [thread.name for thread in threading.enumerate()].count("launcher") == following + 1
    assert [thread.name for thread in threading.enumerate()].count("launcher") == following
