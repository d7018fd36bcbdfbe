"""The guide's commands are run as they are written, page after page."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from tests.launcher import ROOT, Launcher

PAGES = sorted((ROOT / "docs" / "guide").glob("[0-9]*.md"))
PYTHON = """#!/usr/bin/env bash
case "$1 $2 $3" in
    "-m megatron_llama env" | "-m megatron_llama chat") ;; # a start from nothing; one that reads what is typed
    "-m megatron_llama prove") ;; # it starts processes of its own
    "-m megatron_llama "*) exec torchrun --standalone --nproc-per-node 1 "$@" ;;
esac
exec {python} "$@"
"""
TORCHRUN = """#!{python} -SE
import json, os, socket, sys
assert sys.argv[1:3] == ["--standalone", "--nproc-per-node"], sys.argv
if sys.argv[4:6] != ["-m", "megatron_llama"]:
    os.execv("{python}", ["{python}", "-m", "torch.distributed.run", *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as line:
    line.connect("{address}")
    stream = line.makefile("rw")
    stream.write(json.dumps([sys.argv[6:], int(sys.argv[3]), os.getcwd()]) + "\\n")
    stream.flush()
    codes, out, err = json.loads(stream.readline())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(max(map(abs, codes)))
"""
"""What stands for ``python`` and ``torchrun`` on the path: commands start where everything is imported."""


def commands(page: Path) -> str:
    """All of its ``bash`` blocks; what needs a cluster or a package index is marked ``text``."""
    return "\n".join(re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))


def answer(listener: socket.socket, launcher: Launcher) -> None:
    """Start what is asked for, one after the other, until nobody listens any more."""
    while True:
        try:
            line, _ = listener.accept()
        except OSError:
            return
        with line, line.makefile("rw") as stream:
            argv, processes, folder = json.loads(stream.readline())
            ended = launcher.run(argv, processes, timeout=300, cwd=Path(folder))
            stream.write(json.dumps([ended.codes, ended.out, ended.err]) + "\n")
            stream.flush()


@contextmanager
def programs(folder: Path, launcher: Launcher) -> Iterator[None]:
    """``python`` and ``torchrun`` in a folder."""
    address = folder / "socket"
    for name, text in (("python", PYTHON), ("torchrun", TORCHRUN)):
        (folder / name).write_text(text.replace("{python}", sys.executable).replace("{address}", str(address)))
        (folder / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        answering = Thread(target=answer, args=(listener, launcher))
        answering.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            answering.join()


@pytest.fixture(scope="module")
def play(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], str]]:
    """Runs a page, after those before it, once each; gives what it printed."""
    work, bin, printed = (tmp_path_factory.mktemp("guide"), tmp_path_factory.mktemp("bin"), dict[Path, str]())
    (work / "runs" / "guide").mkdir(parents=True)
    for name in ("examples", "tools"):
        (work / name).symlink_to(ROOT / name)
    environ = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def run(page: Path) -> str:
        for one in PAGES[: PAGES.index(page) + 1]:
            if one not in printed:
                script = ["bash", "-euo", "pipefail", "-c", commands(one)]
                done = subprocess.run(script, cwd=work, env=environ, capture_output=True, text=True, timeout=300, check=False)
                assert done.returncode == 0, f"{one.name}\n{done.stdout}\n{done.stderr}"
                printed[one] = done.stdout
        return printed[page]

    with programs(bin, launcher):
        yield run


SAID = {
    "01-install": r"torch .*\n[\s\S]*preprocess",
    "02-data": r"vocabulary 1,024[\s\S]*documents",
    "03-pretrain": r"iteration 40/40",
    "04-watch": r'"iteration": 40[\s\S]*\n40 \d\.\d',
    "05-resume": r"iter_0000040[\s\S]*verified: [\s\S]*saved \S+/iter_0000050",
    "06-scale-out": r"layout          64 processes = tp 4 x cp 1 x pp 2 x dp 8",
    "07-convert": r"verdict: equal",
    "08-fine-tune": r"pairs[\s\S]*validation loss at iteration 20[\s\S]*saved \S+lora/iter_0000010",
    "09-evaluate": r"lm loss PPL[\s\S]*The with statement",
    "10-publish": r"bfloat16 .*The with",
    "11-your-own-module": r"step 1 loss [\s\S]*step 20 loss",
    "12-before-you-book": r"nearest published runs[\s\S]*tp 2: pretrain, 2 processes[\s\S]*\nholds: everything",
    "13-prefer": r"pairs, \d+ held out[\s\S]*rewards/margins: [\s\S]*validation loss at iteration 20[\s\S]*validation loss at iteration 10",
}


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page(page: Path, play: Callable[[Path], str]) -> None:
    assert re.search(SAID[page.stem], play(page)), play(page)
