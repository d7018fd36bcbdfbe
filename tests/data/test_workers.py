"""Processes beside this one: what they have of it, in which order they answer, and what happens when one dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import count, islice
from pathlib import Path

import pytest
from megatron_llama.data.readers import CHUNK_BYTES
from megatron_llama.data.tokenizer.spm import SentencePieceTokenizer
from megatron_llama.data.workers import workers
from megatron_llama.errors import DataError

COPIES = """
import os, sys, threading
from functools import cache
from megatron_llama.data.workers import single_threaded, workers

@cache
def loaded() -> int:
    return os.getpid()

def where(piece: int) -> tuple[int, bool]:
    return piece, loaded() == os.getppid()

if __name__ == "__main__":
    loaded()
    if sys.argv[1] == "threads":
        stop = threading.Event()
        threading.Thread(target=stop.wait).start()
    alone = single_threaded()
    with workers(2, where) as run:
        print(alone, list(run(range(20))) == [(piece, alone) for piece in range(20)])
    if not alone:
        stop.set()
"""


@pytest.mark.parametrize(("threads", "says"), [("one", "True True\n"), ("threads", "False True\n")])
def test_what_is_loaded_is_shared_where_no_thread_can_hold_a_lock(threads: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "copies.py").write_text(COPIES)
    run = [sys.executable, tmp_path / "copies.py", threads]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == says


def die(piece: int) -> int:
    if piece == 3:
        os._exit(1)
    return piece


def test_few_pieces_wait_and_a_dead_process_is_an_error() -> None:
    """An endless input is read no further ahead than four pieces a process."""
    read = count()
    says = "got a dead worker process, expected enough memory for each; give fewer --workers"
    with pytest.raises(DataError, match=says), workers(2, die) as run:
        results = run(-piece for piece in read)
        assert list(islice(results, 20)) == [-piece for piece in range(20)] and next(read) <= 20 + 4 * 2
        list(run(range(10)))


ENDLESS = """
import os, signal, sys, time
from megatron_llama.data.workers import workers

if __name__ == "__main__":
    with workers(2, time.sleep) as run:
        os.kill(os.getpid(), int(sys.argv[1])) or list(run(iter(lambda: 600, None)))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nobody_works_on_for_a_process_that_is_gone(number: signal.Signals, tmp_path: Path) -> None:
    """Its output is open as long as one of them lives."""
    (tmp_path / "endless.py").write_text(ENDLESS)
    ended = subprocess.run([sys.executable, tmp_path / "endless.py", str(int(number))], capture_output=True, text=True, timeout=180)
    assert ended.returncode == -number


COMMAND = """
import sys
print("once")  # again in every process that is no copy of this one
if __name__ == "__main__":
    from megatron_llama.cli import main
    sys.exit(main(["preprocess", "--workers", "2", "--output-prefix", "out", "--input", "in.jsonl", "--tokenizer-model", sys.argv[1]]))
"""


def test_the_command_starts_copies_whatever_threads_libraries_like(tokenizer: SentencePieceTokenizer, tmp_path: Path) -> None:
    line = '{"text": "a word"}\n'
    count = 2 * CHUNK_BYTES // len(line) + 1
    (tmp_path / "in.jsonl").write_text(line * count)
    (tmp_path / "command.py").write_text(COMMAND)
    free = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    run = [sys.executable, "command.py", str(tokenizer.path)]
    said = subprocess.run(run, cwd=tmp_path, env=free, capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"once\nout: {count:,} documents, ") and said.count("\n") == 2
