"""What a rank is asked for, until the run has done it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from megatron_llama.train.run.prefetch import ASKED, CONTINUE, RETURN, SAVE, SAVE_NOW, Interrupts


def test_a_save_that_was_asked_for_comes_after_a_return() -> None:
    """Of this rank or of another: what counts at a step is the largest request of all ranks."""
    interrupts = Interrupts()
    interrupts.ask_to_save()
    interrupts.ask_to_return()
    assert interrupts.request() == RETURN
    interrupts.returned()
    assert interrupts.request() == SAVE
    # Another rank has asked for a return at this step.
    assert interrupts.request() == SAVE
    interrupts.saved()
    assert interrupts.request() == CONTINUE


def test_a_save_is_made_once_and_a_later_request_is_another(tmp_path: Path) -> None:
    interrupts = Interrupts(str(tmp_path))
    (tmp_path / SAVE_NOW).touch()
    assert interrupts.request() == SAVE and not (tmp_path / SAVE_NOW).exists()
    interrupts.ask_to_save()
    interrupts.saved()
    assert interrupts.request() == SAVE
    interrupts.saved()
    assert interrupts.request() == CONTINUE


def test_a_stop_comes_before_all_else() -> None:
    interrupts = Interrupts()
    interrupts.ask_to_save()
    interrupts.ask_to_return()
    interrupts.ask_to_stop()
    assert interrupts.request() == ASKED


def test_an_interrupt_that_comes_twice_at_once_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm sends it to every process of a job, and so does whoever hands it on. A user's second one ends the run at once."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Interrupts() as interrupts:
        interrupts.listen()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert interrupts.stopped_by == signal.SIGINT
        now[0] += 1.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
