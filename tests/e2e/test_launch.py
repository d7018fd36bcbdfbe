"""The launcher that all end-to-end tests stand on."""

from __future__ import annotations

from pathlib import Path

from tests.launcher import Launcher


def test_a_process_id_that_was_used_before_is_a_new_process(launcher: Launcher) -> None:
    """A day of tests starts more processes than there are ids: the status of whoever had the id is not this one's."""
    used = range(int(Path("/proc/sys/kernel/pid_max").read_text()))
    others = {pid: 2 for pid in used if pid not in launcher.ended}
    launcher.ended.update(others)
    try:
        assert launcher.run(["--version"]).ok().out.strip()
    finally:
        launcher.ended = {pid: code for pid, code in launcher.ended.items() if pid not in others}
