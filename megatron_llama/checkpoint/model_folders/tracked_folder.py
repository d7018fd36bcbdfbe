"""Finds the folder in a run's checkpoints that is meant: the one that its tracker names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from megatron_llama.checkpoint.checkpoint_dir import TRACKER
from megatron_llama.config.limits import LARGEST_TRACKER
from megatron_llama.config.model_files import read_model_file
from megatron_llama.errors import CheckpointError


def find_folder(
    path: Path, holds: Sequence[str] = ("mp_rank_*",), what: str = "an mp_rank_* folder"
) -> Path:
    """Return the folder of a checkpoint, ``release`` or ``iter_NNNNNNN``: ``path`` itself, or the
    one that the tracker in it names. It holds a file of one of the names ``holds``; errors call
    that ``what``. Raises CheckpointError."""

    def has(folder: Path) -> bool:
        return any(next(folder.glob(name), None) is not None for name in holds)

    if has(path):
        return path
    tracker = path / TRACKER
    do = f"give the folder itself: {path}/iter_NNNNNNN or {path}/release"
    try:
        named = read_model_file(tracker, limit=LARGEST_TRACKER, do=do).decode().strip()
    except ValueError as error:
        raise CheckpointError(
            tracker, got=f"no readable file ({error})", expected="an iteration", do=do
        ) from error
    numbered = re.fullmatch(r"[0-9]{1,18}", named)
    folder = path / (f"iter_{int(named):07d}" if numbered else "release")
    if not (numbered or named == "release") or not has(folder):
        expected = f"an iteration with {what}"
        raise CheckpointError(tracker, got=named[:40], expected=expected, do=do)
    return folder
